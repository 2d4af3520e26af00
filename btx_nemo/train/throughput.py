"""How much of the devices a run uses: floating-point operations against the peak, and memory."""

from __future__ import annotations

from btx_nemo.config.schema import TrainConfig
from btx_nemo.estimate.suggest import flops
from btx_nemo.families.config import ModelConfig
from btx_nemo.megatron.platform import device_name, peak_memory

PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("GB200", {"fp32": 80e12, "bf16": 2500e12, "fp16": 2500e12}),
    ("B200", {"fp32": 75e12, "bf16": 2250e12, "fp16": 2250e12}),
    ("H100 PCIe", {"fp32": 51e12, "bf16": 756e12, "fp16": 756e12}),
    ("H100 NVL", {"fp32": 60e12, "bf16": 835e12, "fp16": 835e12}),
    ("H100", {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}),
    ("H200", {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}),
    ("A100", {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}),
    ("L40S", {"fp32": 91.6e12, "bf16": 362e12, "fp16": 362e12}),
)
"""Part of a device's name -> its dense peak FLOP/s by precision, as NVIDIA's data sheets have it; the first one counts.

With FP8, too, the utilisation is of the peak of 16-bit numbers, so that it can be compared.
"""


def peak_flops(config: TrainConfig) -> float | None:
    """Peak FLOP/s of this process's device: what the configuration says, or what its name does; None where unknown."""
    if config.log.peak_flops is not None:
        return config.log.peak_flops
    name = device_name()
    return next((peaks.get(config.precision) for part, peaks in PEAKS if part in name), None)


class Throughput:
    """Model FLOPs of a run: those that the architecture asks for, active experts only, nothing computed twice."""

    def __init__(self, config: TrainConfig, model: ModelConfig, ranks: int):
        self.per_token, self.ranks, self.peak = flops(model, config.data.seq_length), ranks, peak_flops(config)

    def record(self, tokens_per_second: float) -> dict[str, float | None]:
        """As metrics.jsonl has it: FLOP/s of a rank, their share of the peak, the most memory this process had."""
        rate = self.per_token * tokens_per_second / self.ranks
        return {
            "flops_per_second": round(rate),
            "flops_utilization": round(rate / self.peak, 4) if self.peak else None,
            "memory_bytes": peak_memory(),
        }
