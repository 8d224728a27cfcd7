"""A picture of the searches: the best so far against the epochs spent, for each surrogate."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

from tests.benchmarks.search_quality.problems import PROBLEMS
from tests.benchmarks.search_quality.results import Cell, Setting

POINTS = 200


def draw(cells: list[Cell], setting: Setting, path: Path) -> None:
    """Medians over seeds, a panel for each surrogate; dotted: the baseline's quality at the end of the budget."""
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
        spread = np.nanmax(late) - np.nanmin(late) or 1.0
        axis.set_ylim(np.nanmin(late) - 0.03 * spread, np.nanmax(late) + 0.03 * spread)
        axis.set_title(f"{cell.objective}, {cell.family}", fontsize=10)
        axis.set_ylabel(PROBLEMS[cell.objective].objective.metric)
        axis.set_xlabel("epochs spent")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=75)
    plt.close(figure)
