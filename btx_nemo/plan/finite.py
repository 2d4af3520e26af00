"""Whether values are finite: what is read, and what a result becomes in its dtype."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from btx_nemo.errors import UserError
from btx_nemo.plan.expr import ELEMENTWISE, FRESH, Expr, SwiGLU, children, infer
from btx_nemo.plan.layout import Box, Layout, TensorInfo

_INFINITY = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "bfloat16": 0xFF << 7, "float16": 0x1F << 10}
_SIGNED = {8: np.int64, 4: np.int32, 2: np.int16}
_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16}


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a contiguous CPU tensor holds neither NaN nor infinity; exact, two integer maxima and no copy.

    Non-finite values have all exponent bits set, so they are the largest integers of either sign when their bits are
    read as signed (positive ones) and as unsigned (negative ones).
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _INFINITY:
        return not tensor.dtype.is_floating_point or bool(torch.isfinite(tensor.float()).all())
    if tensor.numel() == 0:
        return True
    raw = tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
    flat = raw.numpy().reshape(-1)
    size = tensor.element_size()
    if int(flat.view(_SIGNED[size]).max()) >= _INFINITY[name]:
        return False
    return int(flat.view(_UNSIGNED[size]).max()) < _INFINITY[name] + (1 << (8 * size - 1))


def check_finite(tensor: torch.Tensor, box: Box, name: str, where: str) -> None:
    """Raise UserError naming file, tensor and index when a part of a source tensor is not finite."""
    if all_finite(tensor):
        return
    wide = tensor if tensor.element_size() > 1 else tensor.float()
    at = torch.nonzero(~torch.isfinite(wide))
    local = at[0].tolist()
    index = [low + i for (low, _), i in zip(box, local, strict=True)]
    value = float(tensor[tuple(local)])
    raise UserError(
        f"{where}: tensor {name!r} holds a non-finite value ({value}) at index {index}; train or export it again"
    )


def may_overflow(expr: Expr, sources: Mapping[str, Layout], info: TensorInfo) -> bool:
    """Whether finite sources can give a result that is not: it is fresh or computed, or a cast narrows its range."""

    def computed(part: Expr) -> bool:
        return isinstance(part, (*ELEMENTWISE, *FRESH, SwiGLU)) or any(map(computed, children(part)))

    return computed(expr) or infer(expr, sources, info).dtype != info.dtype


def check_result(tensor: torch.Tensor, target: str, start: tuple[int, ...]) -> None:
    """Raise UserError naming target and index when a result that begins at index `start` is not finite."""
    if all_finite(tensor):
        return
    local = torch.nonzero(~torch.isfinite(tensor))[0].tolist()
    index = [low + i for low, i in zip(start, local, strict=True)]
    name = str(tensor.dtype).removeprefix("torch.")
    raise UserError(
        f"target tensor {target!r} would hold a value beyond the range of {name} at index {index}; choose another "
        "dtype (dtype=bfloat16 or dtype=float32), or, where sources hold values that large, train them again"
    )
