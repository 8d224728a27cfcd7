"""Importances of the parameters of a study, for its report and its headline."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE

_MIN_BEST_TRIALS = 5  # Optuna recommends at least 5, so that PED-ANOVA is stable
_MIN_TRIALS = 4 * _MIN_BEST_TRIALS  # so that the best trials are at most a quarter of all
_BEST_FRACTION = 0.1  # as in Optuna


@dataclass(frozen=True)
class Importances:
    """The importances of the parameters for one metric, estimated by PED-ANOVA (Watanabe et al. 2023).

    Attributes:
        shares: (parameter, importance), most important first; the sum of the importances is 1.
        n_trials: number of trials from which the importances are estimated.
        n_best: number of best trials that are compared with all trials.
        has_pruned: whether pruned trials are among the trials.
        trials_by_conditional: number of trials that have the parameter, by name of each conditional parameter.
    """

    shares: list[tuple[str, float]]
    n_trials: int
    n_best: int
    has_pruned: bool
    trials_by_conditional: dict[str, int]


def compute_importances(study: StoredStudy, metric_index: int = 0) -> Importances | str:
    """Return the importances of the parameters; if they are unavailable, a text with the reason.

    With one metric, pruned trials count too, since most trials of a search may be pruned. As in Optuna's TPE, they are
    worse than complete trials, and ranked by their last epoch, then by its value.

    Args:
        study: the study.
        metric_index: index of the metric in the values of a trial.
    """
    if study.spec.pruner.shares_checkpoints:
        return "Not available: the pruner pbt changes parameters during the training."
    maximize = study.spec.maximize_each[metric_index]
    keys = {trial.number: (math.inf, value) for trial, value in _list_values(study, metric_index)}
    if not study.spec.is_multi_objective:
        keys |= {trial.number: (step, value) for trial, step, value in _list_last_values(study)}
    trials = [trial for trial in study.trials() if trial.number in keys]
    if len({name for trial in study.trials() for name in trial.params}) == 1:
        return "Not available: the study has only one parameter."
    if len(trials) < _MIN_TRIALS:
        kind = "complete trials" if study.spec.is_multi_objective else "complete or pruned trials"
        return f"Shown with {_MIN_TRIALS} or more {kind}; the study has {len(trials)}."
    if len(set(keys.values())) == 1:  # Optuna would give all the same importance
        return f"Not available: all {len(trials)} trials have the same value."
    order = sorted({(step, value if maximize else -value) for step, value in keys.values()})
    rank_by_key = {key: float(rank) for rank, key in enumerate(order)}
    ranks = {number: rank_by_key[step, value if maximize else -value] for number, (step, value) in keys.items()}
    n_best = max(math.ceil(_BEST_FRACTION * len(trials)), _MIN_BEST_TRIALS)
    try:
        shares = _estimate([(trial, ranks[trial.number]) for trial in trials], n_best)
    except (ValueError, RuntimeError) as error:
        return f"Not available yet: {error}"
    counts = {name: sum(name in trial.params for trial in trials) for trial in trials for name in trial.params}
    conditional = {name: count for name, count in counts.items() if count < len(trials)}
    has_pruned = any(trial.state == TrialState.PRUNED for trial in trials)
    return Importances(shares, len(trials), n_best, has_pruned, conditional)


def _list_values(study: StoredStudy, metric_index: int) -> list[tuple[FrozenTrial, float]]:
    complete = study.trials(TrialState.COMPLETE)
    return [(t, t.values[metric_index]) for t in complete if t.values and all(map(math.isfinite, t.values))]


def _list_last_values(study: StoredStudy) -> list[tuple[FrozenTrial, float, float]]:
    """Return the last epoch and its value of the pruned trials."""
    pruned = [t for t in study.trials(TrialState.PRUNED) if t.intermediate_values and INFEASIBLE not in t.user_attrs]
    last = [(trial, *max(trial.intermediate_values.items())) for trial in pruned]
    return [(trial, float(step), value) for trial, step, value in last if math.isfinite(value)]


def _estimate(trials: Sequence[tuple[FrozenTrial, float]], n_best: int) -> list[tuple[str, float]]:
    """Return the importances, given the trials with their ranks, of which the largest is the best."""
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=n_best / len(trials))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about experimental evaluators do not help the reader
        ranked = optuna.create_study(direction="maximize")
        ranked.add_trials(
            [create_trial(params=t.params, distributions=t.distributions, value=rank) for t, rank in trials]
        )
        return list(optuna.importance.get_param_importances(ranked, evaluator=evaluator).items())
