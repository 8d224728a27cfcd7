"""What is foreseen of a study's trials that run or wait, where enough of them have reported."""

from __future__ import annotations

from collections.abc import Container

from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from hpsearch.search.curves.foreseen import Forecast, foreseeable, told
from hpsearch.search.study.ranking import best_first
from hpsearch.search.study.study import StoredStudy

_LINES = 10  # of trials, the best first


def foreseen(study: StoredStudy, of: Container[int] | None = None) -> dict[int, Forecast]:
    """Return by their numbers what trials will end with, the best first; of several metrics nothing is foreseen.

    Args:
        study: the study.
        of: numbers of those that are asked about; None for all that run or wait.
    """
    trials, spec = study.trials(), study.spec
    if spec.several:  # of which no one number is the end
        return {}
    if not foreseeable(trials, spec.epochs):
        return {}
    from hpsearch.search.curves.forecast import forecasts  # it loads torch: a second, which most studies do not need

    found = forecasts(trials, epochs=spec.epochs, maximize=spec.maximize, metric=spec.metric, of=of)
    order = best_first({number: each.value for number, each in found.items()}, maximize=spec.maximize)
    return {number: found[number] for number in order}


def foreseen_line(study: StoredStudy) -> str | None:
    """Return the best that is foreseen of a trial that runs or waits, in one line; None where nothing is."""
    for number, found in foreseen(study).items():
        does = _STATES[study.trials()[number].state]
        return f"trial {number}, which {does}, is foreseen to end with {study.spec.metric} {found}"
    return None


_STATES = {TrialState.RUNNING: "runs", TrialState.WAITING: "waits"}


def foreseen_table(study: StoredStudy, *, every: bool) -> Table | None:
    """Return a line for each trial of which something is foreseen, or the best of them; None where there is none."""
    found = foreseen(study)
    if not found:
        return None
    lines = list(found.items())[: None if every else _LINES]
    left = f", the best {len(lines)} of {len(found)}" if len(lines) < len(found) else ""
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
        title=f"foreseen after epoch {study.spec.epochs}{left}",
        title_justify="left",
        title_style="bold",
    )
    for column in ("trial", "", "epochs", "best so far", "foreseen", "nine of ten between"):
        table.add_column(column, justify="left" if column in {"", "nine of ten between"} else "right", no_wrap=True)
    trials = study.trials()
    for number, each in lines:
        trial = trials[number]
        best = best_so_far(trial, maximize=study.spec.maximize)
        table.add_row(
            str(number),
            _STATES[trial.state],
            str(len(trial.intermediate_values)),
            *told(best, each),
        )
    return table


def best_so_far(trial: FrozenTrial, *, maximize: bool) -> float:
    """Return the best value that a trial has reported; some is a number."""
    values = [value for value in trial.intermediate_values.values() if value == value]  # noqa: PLR0124 but NaN
    return max(values) if maximize else min(values)
