"""`verify`: the same model twice? Logits on the same tokens, which decide, and the tensors, which explain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from btx_nemo.checkpoints.tokenizer_files import vocabulary, vocabulary_difference
from btx_nemo.convert.logits import hf_logits, megatron_logits
from btx_nemo.errors import CheckFailed, UserError
from btx_nemo.families.source import Source, check_tied, open_source
from btx_nemo.plan.execute import BLOCK_BYTES, evaluate
from btx_nemo.plan.layout import TensorInfo, row_blocks
from btx_nemo.plan.progress import byte_progress

BATCH, LENGTH, SEED = 2, 64, 20240312
"""The probe: random tokens, the same in every run on every machine."""
FP32_NOISE = 1e-5
"""Share of the largest logit by which equal models were seen to differ, with room: 4e-6 for SmolLM2 (30 layers)."""


@dataclass(frozen=True)
class LogitDifference:
    """Two models' logits on the probe."""

    largest: float
    """Largest absolute difference; NaN when either model gives a NaN or both are not finite in one place."""
    at: tuple[int, int, int]
    """Where: sequence, position, token id."""
    mean: float
    """Mean absolute difference."""
    magnitude: float
    """Largest absolute logit of either."""
    agreement: float
    """Share of positions on which the most likely next token is the same."""


@dataclass(frozen=True)
class TensorDifference:
    """The first tensor, in the family's order, whose values are not equal."""

    name: str
    """Hugging Face name."""
    largest: float
    """Largest absolute difference."""
    at: tuple[int, ...]
    """Index of it."""
    differing: int
    """How many tensors differ in all."""


def verify(a: Path, b: Path, *, tolerance: float | None = None) -> None:
    """Compare two models, each a Hugging Face folder, a checkpoint or a run directory, and print what was found.

    Logits are computed in fp32 in this process: by transformers for Hugging Face folders, by Megatron-Core for ours.
    Tensors are compared too, streamed, where both models have the same; they do not decide.

    The default tolerance is 1e-4, or 1e-5 of the largest logit where that is more: fp32 itself is no finer.

    Raises CheckFailed when the largest absolute difference of logits is over `tolerance` (NaN is), UserError when a
    folder is not such a model, or when the two have different vocabularies.
    """
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise UserError(f"tolerance={tolerance}: must be zero or a positive number")
    sources = open_source(a, "a"), open_source(b, "b")
    for source in sources:
        check_tied(source)
    _check_vocabularies(*sources)
    tokens = probe(*sources)
    found = compare_logits(*(source_logits(source, tokens) for source in sources))
    if tolerance is None:
        tolerance = default_tolerance(found)
    _print_logits(sources, found, tolerance)
    print(f"tensors: {_tensor_line(*sources)}")
    if not found.largest <= tolerance:
        raise CheckFailed(
            f"{a} and {b}: logits differ by {found.largest:.3g} at {_place(found.at)}, "
            f"over the tolerance of {tolerance:g}{_rounding(found)}"
        )


def probe(*sources: Source) -> Tensor:
    """The token ids [B, S] that models of one vocabulary are compared on."""
    positions = min(source.config.max_position_embeddings for source in sources)
    return probe_tokens(sources[0].config.vocab_size, min(LENGTH, positions))


def default_tolerance(found: LogitDifference) -> float:
    """1e-4, or 1e-5 of the largest logit where that is more."""
    return max(1e-4, FP32_NOISE * found.magnitude) if math.isfinite(found.magnitude) else 1e-4


def probe_tokens(vocab_size: int, length: int = LENGTH) -> Tensor:
    """The token ids [B, S] that models of this vocabulary are compared on."""
    return torch.randint(0, vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(SEED))


def compare_logits(a_BSV: Tensor, b_BSV: Tensor) -> LogitDifference:
    """Where two tensors of logits [B, S, V] differ most. A NaN is the largest difference of all."""
    difference_BSV = (a_BSV.double() - b_BSV.double()).abs()
    flat = difference_BSV.flatten().nan_to_num(nan=math.inf, posinf=math.inf)
    index = int(flat.argmax())
    size, vocab = difference_BSV.shape[1], difference_BSV.shape[2]
    return LogitDifference(
        largest=float(difference_BSV.flatten()[index]),
        at=(index // (size * vocab), index // vocab % size, index % vocab),
        mean=float(difference_BSV.mean()),
        magnitude=max(float(a_BSV.abs().max()), float(b_BSV.abs().max())),
        agreement=float((a_BSV.argmax(-1) == b_BSV.argmax(-1)).double().mean()),
    )


def compare_tensors(a: Source, b: Source, *, cast: bool = False) -> TensorDifference | None:
    """Every tensor of two models with the same names and shapes, block by block; None when all values are equal.

    With `cast` the first model's values are first cast to the second's dtypes. Raises UserError when a source holds a
    value that is not finite.
    """
    layouts = a.layout(), b.layout()
    first: TensorDifference | None = None
    differing = 0
    total = sum(info.nbytes for info in layouts[0].values())
    with byte_progress(total, "compare") as advance:
        for name, info in layouts[0].items():
            dtypes = info.dtype, layouts[1][name].dtype
            wide = TensorInfo(info.shape, dtypes[1] if cast else "float64" if "float64" in dtypes else "float32")
            largest, at = 0.0, None
            for box in row_blocks(wide, BLOCK_BYTES):
                parts = [evaluate(s.table[name], {s.name: s.reader}, wide, name, 0, box) for s in (a, b)]
                advance(parts[0].numel() * getattr(torch, info.dtype).itemsize)
                if torch.equal(*parts):
                    continue
                difference = (parts[0].double() - parts[1].double()).abs()
                if float(difference.max()) > largest:
                    largest = float(difference.max())
                    local = torch.unravel_index(difference.argmax(), difference.shape)
                    at = tuple(low + int(i) for (low, _), i in zip(box, local, strict=True))
            if at is not None:
                differing += 1
                first = first or TensorDifference(name, largest, at, 0)
    return first and TensorDifference(first.name, first.largest, first.at, differing)


def _check_vocabularies(a: Source, b: Source) -> None:
    if a.config.vocab_size != b.config.vocab_size:
        raise UserError(
            f"{b.folder}: vocab_size={b.config.vocab_size} but {a.folder} has {a.config.vocab_size}; "
            "logits of different vocabularies cannot be compared"
        )
    difference = vocabulary_difference(vocabulary(b.tokenizer), vocabulary(a.tokenizer))
    if difference:
        raise UserError(
            f"{b.tokenizer}/tokenizer.json: {difference} in {a.tokenizer}; "
            "logits of different vocabularies cannot be compared"
        )


def source_logits(source: Source, tokens_BS: Tensor) -> Tensor:
    """fp32 logits [B, S, V]: transformers' of a Hugging Face folder, Megatron-Core's of ours."""
    if source.kind == "hf":
        return hf_logits(source.folder, tokens_BS)
    logits = megatron_logits(source, tokens_BS)
    assert logits is not None
    return logits


def _tensor_line(a: Source, b: Source) -> str:
    layouts = a.layout(), b.layout()
    for source, other in ((a, b), (b, a)):
        missing = [name for name in source.table if name not in other.table]
        if missing:
            return f"not compared: {other.folder} has no {missing[0]}, which {source.folder} has"
    for name, info in layouts[0].items():
        shape = layouts[1][name].shape
        if info.shape != shape:
            return f"not compared: {name} has shape {list(info.shape)} in {a.folder}, {list(shape)} in {b.folder}"
    dtypes = "" if a.dtype == b.dtype else f" ({a.dtype} against {b.dtype})"
    try:
        found = compare_tensors(a, b)
    except UserError as error:  # a value that is not finite: the logits have said so already
        return f"not compared: {error}"
    if found is None:
        return f"all {len(layouts[0])} equal{dtypes}"
    return (
        f"{found.differing} of {len(layouts[0])} differ{dtypes}; the first is {found.name}, "
        f"by at most {found.largest:.3g}, at {list(found.at)}"
    )


def _rounding(found: LogitDifference) -> str:
    """What to think of a small failure: two engines sum in different orders, and large logits round coarsely."""
    if not found.largest <= FP32_NOISE * found.magnitude:
        return ""
    share = found.largest / found.magnitude
    return f", but only {share:.1g} of the largest logit, which fp32 rounding can explain; --tolerance accepts it"


def _place(at: tuple[int, int, int]) -> str:
    return f"sequence {at[0]}, position {at[1]}, token id {at[2]}"


def _print_logits(sources: tuple[Source, Source], found: LogitDifference, tolerance: float) -> None:
    engines = {"hf": "transformers", "megatron": "Megatron-Core"}
    shown = [f"{source.folder} ({engines[source.kind]})" for source in sources]
    rows = [
        ("models", f"{shown[0]}\n{shown[1]}"),
        ("largest difference", f"{found.largest:.3g} (tolerance {tolerance:g})"),
        ("where", _place(found.at)),
        ("mean difference", f"{found.mean:.3g}"),
        ("largest logit", f"{found.magnitude:.3g}"),
        ("same next token", f"{100 * found.agreement:.4g} % of positions"),
    ]
    console = Console()
    if not console.is_terminal:  # nothing is cut or wrapped when it is piped
        for name, value in rows:
            print(f"{name}: {value.replace(chr(10), ', ')}")
        return
    table = Table("logits", "", title="probe: random tokens, fp32")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)
