"""The report of an own loop: what was set, what it reported, and what nobody looked after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpsearch.objectives.own_loop.loop_objective import LoopObjective
from hpsearch.objectives.training.reports.describe import own_settings
from hpsearch.objectives.training.reports.report import code, image, write_sections
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import RunResult

_PANELS = 8  # of the curves; what else was reported is in metrics.jsonl
_NOT_LOOKED_AFTER = """\
The loop is the objective's own, and these are its business: how data are divided (by `trial.split_seed`, the same for
every trial), that the test set stays closed, and what is drawn at random before the first of `trial.epochs()`, which a
resumed trial draws again. Gradients, leakage and overfitting were not looked for."""


def write_loop_report(path: Path, objective: LoopObjective, result: RunResult, identity: dict[str, Any]) -> None:
    """Writes `report.md` for an own loop that has ended.

    Args:
        path: the file to write; the curves lie beside it.
        objective: what was trained.
        result: what it came to.
        identity: of the run: its configuration, epochs and seeds.
    """
    summary = [
        f"- best epoch {result.best_epoch + 1} of {len(result.history)} trained, {identity['epochs']} planned",
        f"- seed {identity['seed']}, split seed {identity['split_seed']}",
        *([f"- {result.resume_note}"] if result.resume_note else []),
    ]
    rows = [f"| `{setting.name}` | `{code(setting.value)}` |" for setting in own_settings(identity["config"])]
    write_sections(
        path,
        {
            f"{objective.name}: {result.status}, best {objective.metric} {result.best_value:.6g}": summary,
            "Configuration": ["| setting | value |", "|---|---|", *rows] if rows else ["No settings."],
            "What was reported": [*_reported(result), *image(path, "curves.png", "Curves over the epochs")],
            "What was not looked after": [_NOT_LOOKED_AFTER],
        },
    )


def drawn(history: Sequence[EpochRecord], metric: str) -> list[str]:
    """What of the reported numbers to draw over the epochs, the study's metric first."""
    names = [name for record in history for name in record.metrics if name != "epoch_seconds"]
    curves = [name.removeprefix("train_").removeprefix("val_") for name in names if name != "lr"]
    return list(dict.fromkeys([metric, *curves]))[:_PANELS]


def _reported(result: RunResult) -> list[str]:
    first, best, last = result.history[0].metrics, result.best_metrics, result.history[-1].metrics
    lines = ["| | first epoch | best epoch | last epoch |", "|---|---|---|---|"]
    for name in dict.fromkeys([*first, *best, *last]):
        cells = [f"{epoch[name]:.6g}" if name in epoch else "" for epoch in (first, best, last)]
        lines.append(f"| {name.replace('|', ' ')} | {' | '.join(cells)} |")
    return lines
