"""The plots of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from objectives.training.records import EpochRecord

_LEGEND = 12  # more layers than this are named by the first and the last


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
    figure = _figure(5.2 * len(panels))
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
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

    figure = _figure(7.5)
    axes = figure.subplots()
    names = list(noted[-1]["layers"])
    colours = matplotlib.colormaps["viridis"]
    for number, name in enumerate(names):
        points = [(r["step"], r["layers"][name]) for r in noted if r["layers"].get(name)]
        if points:
            label = name or "(model)" if len(names) <= _LEGEND or number in (0, len(names) - 1) else None
            colour = colours(number / max(len(names) - 1, 1))
            axes.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1, marker=".", markersize=3)
    axes.set_yscale("log")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("norm of the gradient, before clipping")
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize="small", title="layer, input first")
    return _saved(figure, path)


def rate_range(rates: Sequence[float], losses: Sequence[float], path: Path, *, suggestion: float) -> Path:
    """Draws the smoothed loss of a learning-rate range test over the rate, with the suggested one, as a PNG."""
    figure = _figure(6.5)
    axes = figure.subplots()
    axes.plot(rates, losses, color="#1f77b4")
    axes.axvline(suggestion, color="#d62728", linewidth=1, linestyle="--", label=f"suggested: {suggestion:.2g}")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss, smoothed")
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none")
    return _saved(figure, path)


def overfit_curve(losses: Sequence[float], path: Path, *, target: float) -> Path:
    """Draws the loss on one batch, step by step, and what it has to fall below, as a PNG."""
    figure = _figure(6.5)
    axes = figure.subplots()
    axes.plot(losses, color="#1f77b4")
    axes.axhline(target, color="#d62728", linewidth=1, linestyle="--", label=f"target: {target:.2g}")
    axes.set_yscale("log")
    axes.set_xlabel("optimizer step on one batch")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none")
    return _saved(figure, path)


def _figure(width: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
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
