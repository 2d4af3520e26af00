"""Where tokens go: one panel a layer, domains against experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_routing(
    routing: Mapping[str, Sequence[Sequence[float]]], experts: Sequence[str], path: Path, *, title: str
) -> None:
    """Writes a PNG of token shares.

    `routing` maps a domain to [layer][expert] shares (a layer sums to one); `experts` names the experts in order.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    domains = list(routing)
    layers = len(routing[domains[0]])
    columns = min(layers, 4)
    rows = -(-layers // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(1.5 + 2.6 * columns, 1.2 + 2.1 * rows),
        squeeze=False,
        layout="constrained",
    )
    top = max(share for table in routing.values() for layer in table for share in layer)
    image = None
    for layer in range(rows * columns):
        axis = axes[layer // columns][layer % columns]
        if layer >= layers:
            axis.set_axis_off()
            continue
        shares = [routing[domain][layer] for domain in domains]
        image = axis.imshow(shares, vmin=0, vmax=top, cmap="Blues", aspect="auto")
        for row, line in enumerate(shares):
            for column, share in enumerate(line):
                colour = "white" if share > 0.6 * top else "black"
                axis.text(column, row, f"{share:.0%}", ha="center", va="center", color=colour, fontsize=9)
        axis.set_title(f"layer {layer + 1}", fontsize=10)
        axis.set_xticks(range(len(experts)), experts, rotation=30, ha="right", fontsize=8)
        axis.set_yticks(range(len(domains)), domains if layer % columns == 0 else [""] * len(domains), fontsize=9)
    figure.supylabel("text of this domain", fontsize=10)
    figure.supxlabel("goes to this expert", fontsize=10)
    figure.suptitle(title, fontsize=11)
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of tokens")
    figure.savefig(path, dpi=120)
    plt.close(figure)
