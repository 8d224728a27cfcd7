"""The plots of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from objectives.training.reproducibility.metrics_file import EpochRecord

_LEGEND = 12  # more layers than this are named by the first and the last
_HEIGHT, _DPI = 3.8, 120  # inches, dots per inch
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.8, 0.15, 0.55, 0.15  # inches around each panel


def curves(
    history: Sequence[EpochRecord], path: Path, *, metric: str | None = None, best_epoch: int | None = None
) -> Path:
    """Draws train and validation loss, and the metric, over epochs, as a PNG.

    Args:
        history: one record an epoch, at least one.
        path: the file to write.
        metric: such as `accuracy`; the first one recorded besides the loss unless given.
        best_epoch: marked with a line; none unless given.
    """
    names = [name.removeprefix("val_") for name in history[0].metrics if name.startswith("val_")]
    metric = metric or next((name for name in names if name != "loss"), "loss")
    panels = ["loss"] if metric == "loss" else ["loss", metric]
    figure, all_axes = _figure(5.2, len(panels))
    for axes, name in zip(all_axes, panels, strict=True):
        _panel(axes, history, name, best_epoch)
    return _saved(figure, path)


def gradient_flow(steps: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Draws the norm of the gradient in each layer over optimizer steps, as a PNG; None when no step was noted.

    Args:
        steps: the records of a `StepLog`.
        path: the file to write.
    """
    noted = [record for record in steps if "layers" in record]
    if not noted:
        return None
    import matplotlib
    from matplotlib.ticker import NullLocator

    figure, (axes,) = _figure(7.5)
    names = list(noted[-1]["layers"])
    colours = matplotlib.colormaps["viridis"]
    for number, name in enumerate(names):
        points = [(r["step"], r["layers"][name]) for r in noted if r["layers"].get(name)]
        if points:
            label = name or "(model)" if len(names) <= _LEGEND or number in (0, len(names) - 1) else None
            colour = colours(number / max(len(names) - 1, 1))
            axes.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1, marker=".", markersize=3)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high > 30 * low:  # minor ticks and powers set as formulas are half of the work, and tell nothing more here
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("norm of the gradient, before clipping")
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize="small", title="layer, input first")
    return _saved(figure, path)


def rate_range(rates: Sequence[float], losses: Sequence[float], path: Path, *, suggestion: float) -> Path:
    """Draws the loss of a learning-rate range test over the rate, with the suggested one, as a PNG."""
    figure, (axes,) = _figure(6.5)
    axes.plot(rates, losses, color="#1f77b4")
    axes.axvline(suggestion, color="#d62728", linewidth=1, linestyle="--", label=f"suggested: {suggestion:.2g}")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss of the same training samples")
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none")
    return _saved(figure, path)


def overfit_curve(losses: Sequence[float], path: Path, *, target: float) -> Path:
    """Draws the loss on one batch, step by step, and what it has to fall below, as a PNG."""
    figure, (axes,) = _figure(6.5)
    axes.plot(losses, color="#1f77b4")
    axes.axhline(target, color="#d62728", linewidth=1, linestyle="--", label=f"target: {target:.2g}")
    axes.set_yscale("log")
    axes.set_xlabel("optimizer step on one batch")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none")
    return _saved(figure, path)


def _figure(width: float, panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure of panels side by side, each so many inches wide, and their axes.

    The margins are fixed: a layout engine draws the figure once more to find them, half of what a plot takes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, _HEIGHT))
    FigureCanvasAgg(figure)
    size = ((width - _LEFT - _RIGHT) / (width * panels), (_HEIGHT - _BOTTOM - _TOP) / _HEIGHT)
    lefts = [(number * width + _LEFT) / (width * panels) for number in range(panels)]
    return figure, [figure.add_axes((left, _BOTTOM / _HEIGHT, *size)) for left in lefts]


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, pil_kwargs={"compress_level": 3})
    return path


def _panel(axes: Any, history: Sequence[EpochRecord], name: str, best_epoch: int | None) -> None:
    for split, colour in (("train", "#7f7f7f"), ("val", "#1f77b4")):
        points = [(r.epoch + 1, r.metrics[f"{split}_{name}"]) for r in history if f"{split}_{name}" in r.metrics]
        if points:
            label = "train" if split == "train" else "validation"
            axes.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=3)
    if best_epoch is not None:
        value = history[best_epoch].metrics[f"val_{name}"]
        axes.axvline(best_epoch + 1, color="#d62728", linewidth=1, linestyle="--")
        axes.plot([best_epoch + 1], [value], "o", color="#d62728", label=f"best epoch {best_epoch + 1}: {value:.4g}")
    axes.set_xlabel("epoch")
    axes.set_ylabel(name.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none")
