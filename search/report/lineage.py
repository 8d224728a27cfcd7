"""The lineage chart of population-based training: which trial copied which, and the lineage of the best trial."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.search.pruners.pbt import PBT
from hpsearch.search.study.ranking import get_schedule
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.rungs.generations import read_generations

# In units of the drawing, which fills the width of the page.
_WIDTH, _LEFT, _ROW, _TOP, _BEND = 1000, 70, 20, 14, 14


def make_lineage(study: StoredStudy, best: FrozenTrial | None) -> dict[str, Any] | None:
    """Return the drawing of the lineage chart: one row per trial, epochs from left to right; None without copies.

    Args:
        study: the study.
        best: the best trial, whose lineage is highlighted; None if no trial is complete.
    """
    pruner, epochs = study.spec.pruner, study.spec.epochs
    if not isinstance(pruner, PBT) or (schedule := pruner.get_rung_schedule(epochs)) is None:
        return None
    decisions = read_generations(study.engine, study.study_id)
    copies = [
        (schedule.epochs[each.generation], each.parent, each.number) for each in decisions if each.parent is not None
    ]
    if not copies:
        return None
    trials = study.trials()

    def x(epoch: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 10) * epoch / epochs, 1)

    def y(number: int) -> int:
        return _TOP + _ROW * number

    def join(epoch: int, parent: int, child: int) -> str:
        at = x(epoch)
        return f"M{at - _BEND},{y(parent)} C{at},{y(parent)} {at - _BEND},{y(child)} {at},{y(child)}"

    chosen = None if best is None else best.number
    lines = [("complete", f"M{x(0)},{y(t.number)} H{x(len(t.intermediate_values))}") for t in trials]
    lines += [("", join(*copy)) for copy in copies]
    parts = [] if best is None else get_schedule(best) or [{"epoch": 0, "trial": best.number}]
    for part, after in pairwise([*parts, {"epoch": epochs, "trial": None}]):
        end = x(after["epoch"]) - (0 if after["trial"] is None else _BEND)
        lines.append(("best", f"M{x(part['epoch'])},{y(part['trial'])} H{end}"))
        if after["trial"] is not None:
            lines.append(("best", join(after["epoch"], part["trial"], after["trial"])))
    ticks = sorted({0, epochs, *schedule.epochs})
    shown = ticks[:: len(ticks) // 12 + 1]
    return {
        "width": _WIDTH,
        "height": y(len(trials)) + 16,
        "lines": lines,
        "labels": [(f"trial {t.number}", y(t.number) + 4, t.number == chosen) for t in trials],
        "ticks": [(epoch, x(epoch)) for epoch in shown],
        "bottom": y(len(trials)),
        "copies": "1 copy" if len(copies) == 1 else f"{len(copies)} copies",
    }
