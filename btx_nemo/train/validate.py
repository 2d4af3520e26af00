"""Validation: the loss of each domain, and what the routers did there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from btx_nemo.config.schema import TrainConfig
from btx_nemo.data.sampler import num_validation_microbatches, validation_batches
from btx_nemo.families.config import ModelConfig
from btx_nemo.train.routing import collect_routing, separate_routing
from btx_nemo.train.step import Trainee, mean_validation_loss


def validate(trainee: Trainee, config: TrainConfig, model: ModelConfig, datasets: Mapping[str, Any]) -> dict[str, Any]:
    """{valid: {domain: loss}, routing: {domain: [layer][expert] load}}, the same on every rank. Collective."""
    from megatron.core import parallel_state as mpu

    share = {
        "micro_batch_size": config.micro_batch_size,
        "dp_size": mpu.get_data_parallel_world_size(),
        "num_samples": config.eval_batches * config.global_batch_size,
        "multiple_of": config.layout.pp if config.layout.vpp > 1 else 1,  # the interleaved schedule takes no other
    }
    record: dict[str, Any] = {"valid": {}, "routing": {}}
    for domain, dataset in datasets.items():
        with separate_routing(trainee.gpt):
            record["valid"][domain] = mean_validation_loss(
                trainee,
                validation_batches(dataset, dp_rank=mpu.get_data_parallel_rank(), **share),
                microbatches=num_validation_microbatches(dataset, **share),
                micro_batch_size=config.micro_batch_size,
                seq_length=config.data.seq_length,
            )
            routing = collect_routing(trainee.gpt, model)
        if routing is not None:
            record["routing"][domain] = routing.load
    return record
