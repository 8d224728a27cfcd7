"""The trials that a study has to learn from, and its process: with hyperparameters that are kept with the study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.learning import Lesson, known
from hpsearch.search.curves.process import Points, Posterior, Process
from hpsearch.search.curves.space import Space

FITTED = "curves:process"  # the study's system attribute with the hyperparameters that were fitted last
REFIT = 1.15  # times the trials of the last fit, from which on they are old

_STATES = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def told_trials(study: optuna.Study, *, but: int | None = None) -> list[FrozenTrial]:
    """The trials that have reported something, or ended before they could."""
    trials = study._get_trials(deepcopy=False, states=_STATES, use_cache=True)
    return [t for t in known(trials) if t.number != but]


def silent_rows(study: optuna.Study, space: Space, *, but: int) -> np.ndarray:
    """The configurations [n, parameters] of trials that run and have reported nothing yet."""
    trials = study._get_trials(deepcopy=False, states=(TrialState.RUNNING,), use_cache=True)
    silent = [t for t in trials if t.params and t.number != but and not t.intermediate_values]
    return np.array([space.row(t.params) for t in silent]).reshape(-1, len(space.names))


def posterior_of(
    study: optuna.Study, kept: Mapping[str, Any], lesson: Lesson, trials: int, *, name: str = FITTED
) -> Posterior:
    """What the points show, by hyperparameters of the study's; fitted here when those are old.

    Args:
        study: where they are kept.
        kept: what was kept last, by the same name.
        lesson: the points.
        trials: how many there are by now.
        name: of the system attribute; each metric has its own.
    """
    names, process = lesson.space.names, lesson.new_process
    if kept.get("names") == names and len(kept["theta"]) == len(process.theta):
        process = Process(process.owner, torch.tensor(kept["theta"], dtype=torch.float64), process.steady)
    else:
        kept = {}
    if trials >= REFIT * kept.get("trials", 0):
        process = lesson.fitted(process)
        fitted: Any = {"names": names, "trials": trials, "theta": process.theta.tolist()}
        study._storage.set_study_system_attr(study._study_id, name, fitted)
    return process.given(lesson.points, lesson.scores)


def believing(
    posterior: Posterior, space: Space, rows: np.ndarray, numbers: np.ndarray, silent: np.ndarray
) -> Posterior:
    """As if trials that run had ended as is foreseen.

    Args:
        posterior: what is known.
        space: whose rows follow.
        rows: of trials that have reported something [n, parameters].
        numbers: of these trials among the points [n]; -1 for one that has none.
        silent: rows of others [m, parameters].
    """
    if not len(rows) and not len(silent):
        return posterior
    apart = [*numbers.tolist(), *range(-2, -2 - len(silent), -1)]
    return posterior.believing(Points.at_the_end(space.features(np.concatenate([rows, silent])), apart))
