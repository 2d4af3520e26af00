"""BAM (Zhang et al., 2024, arXiv 2408.08274): a name that says why it is not there."""

from __future__ import annotations

from btx_nemo.errors import UserError
from btx_nemo.mix.recipes.base import Ingredients, Mixture, register

REASON = (
    "Megatron-Core has one attention block in a layer and dispatches tokens to feed-forward experts only, and BAM's "
    "attention experts see whole sequences; use recipe=btx, which averages attention, or recipe=nexus"
)


@register("bam")
def bam(given: Ingredients) -> Mixture:
    """Raises UserError, always."""
    raise UserError(f"recipe=bam: not supported because {REASON}")
