"""The plots of a run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hpsearch.objectives.training.loop.steplog import DENSE_STEPS
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.working_folder import import_matplotlib

P = ParamSpec("P")
T = TypeVar("T")

_COLUMNS = 2  # columns of panels
_MARGIN, _MAX_NAME = 2.4, 32  # margin in inches for layer names, and their maximum length in characters
_MAX_LABELS = 12  # with more layers, only the first and the last layer have a label
_HEIGHT, _DPI = 3.8, 100  # inches, dots per inch
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.8, 0.15, 0.55, 0.4  # inches around each panel; the legend is above the panel
_TICKS = 5  # few ticks, because drawing the axes takes half of the time
_GREY, _BLUE, _RED = "#7f7f7f", "#1f77b4", "#d62728"
_NAMES = (0.005, 0.14, 0.37)  # x positions of the names of curves, as shares of the width

_LARGEST = 1e300  # matplotlib cannot place ticks at larger numbers

_STYLE_LOCK = threading.RLock()  # the style belongs to the process
_figures = threading.local()  # the figures of this thread, by their kind and panels


def _in_default_style(draw: Callable[P, T]) -> Callable[P, T]:
    """Let a function draw in matplotlib's default style. With other styles, it could start LaTeX, or fail."""

    @functools.wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> T:
        import_matplotlib()
        import matplotlib

        with _STYLE_LOCK, matplotlib.rc_context():
            matplotlib.rcdefaults()
            return draw(*args, **kwargs)

    return draw_in_style


@_in_default_style
def plot_curves(history: list[EpochRecord], path: Path, names: Sequence[str], *, best_epoch: int | None = None) -> Path:
    """Draw a panel for each name, such as `loss`, with its training and validation values over epochs, as a PNG."""
    figure, all_axes = _get_figure("curves", 5.2, len(names))
    for axes, name in zip(all_axes, names, strict=True):
        _draw_panel(axes, history, name, best_epoch)
    return _save(figure, path)


@_in_default_style
def plot_gradient_norms(steps: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Draw the gradient norm of each layer in the records of a `StepLog`, as a PNG; return None without norms."""
    records = [record for record in steps if "layers" in record]
    names = list(records[-1]["layers"]) if records else []
    curves = [_drawable((r["step"], r["layers"][name]) for r in records if r["layers"].get(name)) for name in names]
    if not any(curves):
        return None
    import matplotlib
    from matplotlib.ticker import NullLocator

    figure, (axes,) = _get_figure("gradients", 7.5, margin=_MARGIN)
    colours = matplotlib.colormaps["viridis"]
    for number, (name, points) in enumerate(zip(names, curves, strict=True)):
        if points:
            short = name if len(name) <= _MAX_NAME else f"...{name[3 - _MAX_NAME :]}"
            label = short if len(names) <= _MAX_LABELS or number in (0, len(names) - 1) else None
            colour = colours(number / max(len(names) - 1, 1))
            axes.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1, marker=".", markersize=3)
    axes.set_yscale("log")
    axes.set_xscale("symlog", linthresh=DENSE_STEPS, linscale=1.5)  # each of the first steps has a record
    first, last = records[0]["step"], records[-1]["step"]
    axes.set_xlim(-0.5, last + max(0.05 * (last - first), 0.5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    low, high = axes.get_ylim()
    if high > 30 * low:  # minor ticks and formulas take half of the time
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("norm of the gradient, before clipping")
    axes.legend(
        framealpha=0.9,
        edgecolor="none",
        fontsize="small",
        title="layer, input first",
        loc="upper left",
        bbox_to_anchor=(1, 1.03),
    )
    return _save(figure, path)


@_in_default_style
def plot_lr_range(rates: Sequence[float], losses: Sequence[float], path: Path, *, suggestion: float) -> Path:
    """Draw the loss of a learning-rate range test over the rate, with the suggested rate, as a PNG."""
    figure, axes = _plot_curve(losses, "loss of the same training samples", rates, "learning rate")
    axes.axvline(suggestion, color=_RED, linewidth=1, linestyle="--", label=f"suggested: {suggestion:.2g}")
    axes.set_xscale("log")
    return _save_with_legend(figure, axes, path)


@_in_default_style
def plot_overfit(losses: Sequence[float], path: Path, *, target: float) -> Path:
    """Draw the loss on one batch over steps, and the target that the loss must reach, as a PNG."""
    figure, axes = _plot_curve(losses, "loss", range(len(losses)), "optimizer step on one batch")
    axes.axhline(target, color=_RED, linewidth=1, linestyle="--", label=f"target: {target:.2g}")
    if min((loss for _, loss in _drawable(enumerate(losses))), default=0.0) > 0:
        axes.set_yscale("log")
    return _save_with_legend(figure, axes, path)


def _plot_curve(ys: Sequence[float], ylabel: str, xs: Sequence[float], xlabel: str) -> tuple[Any, Any]:
    figure, (axes,) = _make_figure(6.5)
    points = _drawable(zip(xs, ys, strict=True))
    axes.plot([x for x, _ in points], [y for _, y in points], color=_BLUE)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _draw_grid(axes)
    return figure, axes


def _drawable(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points with finite values that matplotlib can draw."""
    return [(x, y) for x, y in points if abs(y) < _LARGEST]


def _make_figure(width: float, panels: int = 1, *, margin: float = 0.0) -> tuple[Any, list[Any]]:
    """Return a figure with panels, two per row, and their axes; widths are in inches, `margin` is the right margin.

    The margins are fixed, because a layout engine draws the figure twice, which doubles the time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(panels, _COLUMNS)
    rows = -(-panels // columns)
    across, down = width * columns + margin, _HEIGHT * rows
    figure = Figure(figsize=(across, down))
    FigureCanvasAgg(figure)
    size = ((width - _LEFT - _RIGHT) / across, (_HEIGHT - _BOTTOM - _TOP) / down)
    lefts = [(number * width + _LEFT) / across for number in range(columns)]
    bottoms = [(row * _HEIGHT + _BOTTOM) / down for row in reversed(range(rows))]
    places = [(left, bottom) for bottom in bottoms for left in lefts][:panels]
    return figure, [figure.add_axes((*place, *size)) for place in places]


def _get_figure(kind: str, width: float, panels: int = 1, *, margin: float = 0.0) -> tuple[Any, list[Any]]:
    """Return a figure of `_make_figure`, reused within a thread, because creating axes takes most of the time.

    Lines and texts of the previous plot are removed; the caller sets everything else that differs.
    """
    kept = vars(_figures)
    if (found := kept.get(f"{kind} {panels}")) is None:
        found = kept[f"{kind} {panels}"] = _make_figure(width, panels, margin=margin)
        for axes in found[1]:
            _draw_grid(axes)
    for axes in found[1]:
        for artist in (*axes.lines, *axes.texts):
            artist.remove()
        axes.relim()
        axes.autoscale()
    return found


def _draw_grid(axes: Any) -> None:
    """Draw grid lines instead of tick marks."""
    axes.tick_params(which="both", length=0, bottom=False, left=False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _save_with_legend(figure: Any, axes: Any, path: Path) -> Path:
    """Save a figure with a legend above the panel, where the legend hides no curve and needs no layout search."""
    axes.legend(frameon=False, fontsize="small", ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, pil_kwargs={"compress_level": 1})
    return path


def _draw_panel(axes: Any, history: Sequence[EpochRecord], name: str, best_epoch: int | None) -> None:
    for split, colour in (("train", _GREY), ("val", _BLUE)):
        points = _drawable(
            (r.epoch + 1, r.metrics[f"{split}_{name}"]) for r in history if f"{split}_{name}" in r.metrics
        )
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3)
            _write_name(axes, 0 if split == "train" else 1, "train" if split == "train" else "validation", colour)
    if best_epoch is not None and f"val_{name}" in history[best_epoch].metrics:
        value = history[best_epoch].metrics[f"val_{name}"]
        axes.axvline(best_epoch + 1, color=_RED, linewidth=1, linestyle="--")
        for point in _drawable([(best_epoch + 1, value)]):
            axes.plot(*point, "o", color=_RED)
        _write_name(axes, 2, f"best epoch {best_epoch + 1}: {value:.4g}", _RED)
    axes.set_xlabel("epoch")
    axes.set_ylabel(name.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=_TICKS)
    axes.yaxis.get_major_locator().set_params(nbins=_TICKS)


def _write_name(axes: Any, place: int, text: str, colour: str) -> None:
    """Write the name of a curve above the panel, in its colour; a legend is slower."""
    axes.text(_NAMES[place], 1.025, f"\u25cf {text}", color=colour, fontsize="small", transform=axes.transAxes)
