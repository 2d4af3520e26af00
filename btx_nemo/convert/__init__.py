"""Conversions between Hugging Face folders and Megatron checkpoints: plans, streamed, bit-exact both ways."""

from __future__ import annotations

from btx_nemo.convert.hf import export_hf, import_hf

__all__ = ["export_hf", "import_hf"]
