"""The front of a study of several metrics, in words, and the bounds that a trial breaks."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.attributes import BROKEN

_MOST = 12  # of the front's trials in a text


def told_values(spec: StudySpec, trial: FrozenTrial) -> str:
    """Return a trial's values for a person: ``accuracy 0.9871, latency_ms 1.92``."""
    values = trial.values or ()
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(spec.ways, values, strict=False))


def broken_bounds(spec: StudySpec, trial: FrozenTrial) -> list[str]:
    """Return a line for each constraint that a finished trial breaks: ``model_mb 12.5, not <= 10``."""
    if not spec.constraints or not trial.state.is_finished():
        return []
    if lines := trial.user_attrs.get(BROKEN):
        return [str(line) for line in lines]
    # One that was pruned while it waited at a rung was settled by another: by how much is there, as Optuna has it.
    over = {bound: trial.constraints.get(bound.metric, 0.0) for bound in spec.bounds}
    return [
        bound.told(bound.limit + by if bound.sign == "<=" else bound.limit - by) for bound, by in over.items() if by > 0
    ]


def front_lines(spec: StudySpec, front: Sequence[FrozenTrial]) -> list[str]:
    """Return the front as lines of plain text, a line for each trial, the best by the first metric first."""
    many = f"{len(front)} trials that no other dominates" if len(front) > 1 else "1 trial"
    lines = [f"front: {many}"]
    rows = [("trial", *spec.ways)]
    rows += [(str(trial.number), *(f"{value:.6g}" for value in trial.values)) for trial in front[:_MOST]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(front) > _MOST:
        lines.append(f"    and {len(front) - _MOST} more")
    return lines
