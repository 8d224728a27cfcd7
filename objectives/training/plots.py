"""The learning curves of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from objectives.training.session import EpochRecord


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name.removeprefix("val_") for name in history[0].metrics if name.startswith("val_")]
    metric = metric or next((name for name in names if name != "loss"), "loss")
    panels = ["loss"] if metric == "loss" else ["loss", metric]
    figure = Figure(figsize=(5.2 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, history, name, best_epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _panel(axes: Any, history: Sequence[EpochRecord], name: str, best_epoch: int | None) -> None:
    for split, colour in (("train", "#7f7f7f"), ("val", "#1f77b4")):
        points = [(r.epoch, r.metrics[f"{split}_{name}"]) for r in history if f"{split}_{name}" in r.metrics]
        if points:
            label = "train" if split == "train" else "validation"
            axes.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=3)
    if best_epoch is not None:
        value = history[best_epoch].metrics[f"val_{name}"]
        axes.axvline(best_epoch, color="#d62728", linewidth=1, linestyle="--")
        axes.plot([best_epoch], [value], "o", color="#d62728", label=f"best epoch {best_epoch}: {value:.4g}")
    axes.set_xlabel("epoch")
    axes.set_ylabel(name.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(framealpha=0.9, edgecolor="none")
