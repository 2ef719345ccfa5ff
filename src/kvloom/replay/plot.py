"""Hit-rate curves as an image. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .simulator import Outcome
from .traffic import Traffic

__all__ = ["check_plot", "plot_curves"]


def check_plot(path: str | Path) -> None:
    """Raise ValueError if no image can be written to `path`. Called before replaying."""
    if find_spec("matplotlib") is None:
        raise ValueError("a plot needs matplotlib: pip install 'kvloom[plot]'")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"cannot write the plot to {path}: there is no such folder")


def plot_curves(traffic: Traffic, outcomes: Sequence[Outcome], path: str | Path) -> None:
    """Write an image of hit rates over capacities to `path`, with one line per policy. The suffix of `path` selects
    PNG, SVG or PDF."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    if not outcomes:
        raise ValueError("nothing to plot")
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        points = sorted((o.capacity_blocks, o.hit_rate) for o in outcomes if o.policy == policy)
        sizes, rates = zip(*points, strict=True)
        if policy == "ideal":
            axes.axhline(rates[0], color="black", linestyle=":", label=policy)
        else:
            axes.plot(sizes, rates, marker="o", linestyle="--" if policy == "min" else "-", label=policy)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"capacity in blocks of {traffic.block_tokens} tokens")
    axes.set_ylabel("block hit rate")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write the plot to {path}: {error}") from None
