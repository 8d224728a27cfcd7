"""What keeps to a study's constraints, as the dashboard asks for it: it knows but the older form of Optuna's."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.pareto import front, losses_of

_OLDER = "constraints"  # the system attribute: numbers without names, positive where one is broken


def in_older_form(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial with its constraints as the dashboard's pages read them, or the trial itself if it has none."""
    if not trial.constraints or _OLDER in trial.system_attrs:
        return trial
    told = copy.copy(trial)  # the other is in the storage's cache
    told._system_attrs = {**trial.system_attrs, _OLDER: list(trial.constraints.values())}
    return told


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial breaks no constraint."""
    return all(over <= 0 for over in trial.constraints.values())


def feasible_front(trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """Return the COMPLETE trials within all bounds that none dominates, by number: the dashboard's own has no bounds.

    Args:
        trials: of a study of several metrics.
        directions: of the metrics.
    """
    ended = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.values and is_feasible(trial)]
    maximize = [direction == StudyDirection.MAXIMIZE for direction in directions]
    return [ended[place] for place in front(losses_of([trial.values for trial in ended], maximize))]
