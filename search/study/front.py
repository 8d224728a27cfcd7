"""The front of a study of several metrics, in words: the trials that no other dominates."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from search.spec.spec import StudySpec

_MOST = 12  # of the front's trials in a text


def told_values(spec: StudySpec, trial: FrozenTrial) -> str:
    """Return a trial's values for a person: ``accuracy 0.9871, latency_ms 1.92``."""
    values = trial.values or ()
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(spec.ways, values, strict=False))


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
