"""Draw figures of the searches: the best so far over the epochs spent, per surrogate, and the ratios of epochs."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.results import Cell, Ratio, Setting

POINTS = 200


def draw(cells: list[Cell], setting: Setting, path: Path) -> None:
    """Draw medians over seeds, a panel per surrogate; the dotted line is the target, the baseline's final quality."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    objectives = list(dict.fromkeys(cell.objective for cell in cells))
    families = list(dict.fromkeys(cell.family for cell in cells))
    size = (4.2 * len(objectives), 3.2 * len(families) + 1.2)
    figure, axes = plt.subplots(len(families), len(objectives), figsize=size, squeeze=False, layout="constrained")
    epochs = np.unique(np.linspace(setting.budget / POINTS, setting.end, POINTS).astype(int))
    for cell in cells:
        axis = axes[families.index(cell.family), objectives.index(cell.objective)]
        seeds = np.arange(len(next(iter(cell.histories.values()))))
        target = cell.target(setting, seeds)
        shown = []
        for place, (way, histories) in enumerate(cell.histories.items()):
            middle = np.median([[history.at(spent) for spent in epochs] for history in histories], axis=0)
            style = "-" if way.startswith("hpsearch") else "--"
            axis.plot(epochs, middle, style, color=f"C{place % 10}", label=way, linewidth=1.2)
            shown.append(middle)
        axis.axhline(target, color="black", linewidth=0.8, linestyle=":")
        axis.axvline(setting.budget, color="black", linewidth=0.8, linestyle=":")
        late = np.array(shown)[:, epochs >= setting.budget // 20]
        extent = np.nanmax(late) - np.nanmin(late) or 1.0
        axis.set_ylim(np.nanmin(late) - 0.03 * extent, np.nanmax(late) + 0.03 * extent)
        axis.set_title(f"{cell.objective}, {cell.family}", fontsize=10)
        axis.set_ylabel(PROBLEMS[cell.objective].objective.metric)
        axis.set_xlabel("epochs spent")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=75)
    plt.close(figure)


def draw_ratios(ratios: dict[str, Ratio], path: Path, *, baseline: str) -> None:
    """Draw a point per method with its interval, the fewest epochs at the top; the line is the baseline."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ways = sorted(ratios, key=lambda way: -ratios[way].middle)
    figure, axis = plt.subplots(figsize=(7.5, 0.9 + 0.28 * len(ways)), layout="constrained")
    for place, way in enumerate(ways):
        found, ours = ratios[way], way.startswith("hpsearch")
        color = "C0" if ours else "0.45"
        axis.plot([found.low, found.high], [place, place], color=color, linewidth=1.5)
        axis.plot(found.middle, place, "o" if ours else "s", color=color, markersize=5)
        axis.annotate(f"{found.middle:.2f}", (found.high, place), (5, -3), textcoords="offset points", fontsize=8)
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_xlim(right=axis.get_xlim()[1] * 1.15)
    ticks = [
        tick for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0) if axis.get_xlim()[0] < tick < axis.get_xlim()[1]
    ]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_yticks(range(len(ways)), ways, fontsize=8)
    axis.set_xlabel(f"epochs to the final quality of {baseline}, relative to it (lower is better)", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
