"""Suggest the parameters of a trial, without duplicates, and derive its seeds."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import warnings
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, BruteForceSampler, RandomSampler
from optuna.trial import FrozenTrial

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.objective import BaseObjective
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.database.locks import suggestion_lock
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claims import Claim


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**31, derived from `parts` by SHA-256, so that similar parts give unrelated seeds."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def derive_training_seed(spec: StudySpec, number: int) -> int:
    """Return the training seed of a trial; finalists share common new seeds."""
    if spec.finalists_of is not None:
        return spec.finalists_of.assignment(number)[1]
    return derive_seed(spec.seed, "trial", number)


def get_resplit_seed(spec: StudySpec, number: int) -> int | None:
    """Return the seed of a finalist's new data split, common like its training seed; None for the study's split."""
    if spec.finalists_of is None or not spec.finalists_of.divisions:
        return None
    return derive_seed(spec.seed, "division", derive_training_seed(spec, number))


def make_sampler(
    spec: SamplerSpec, *, study_seed: int, trial_number: int, epochs: int, retry: int = 0
) -> optuna.samplers.BaseSampler:
    """Return the sampler for one trial.

    The seed depends on the trial's number, so that workers do not suggest the same startup points. The QMC sequence is
    common to the study. `retry` is the number of rejected suggestions for this trial.
    """
    seed = derive_seed(study_seed, "sampler", trial_number, *([retry] if retry else []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return spec.build(seed=seed, common_seed=derive_seed(study_seed, "qmc"), epochs=epochs)


log = logging.getLogger(__name__)

# Number of suggestions by the study's sampler, and then by a search among untried configurations.
SAMPLER_TRIES = 4
UNTRIED_TRIES = 8

_MAX_CHOICES = 1000  # choices of one parameter; with more, a random choice is rarely a duplicate


class Suggestion(NamedTuple):
    """The configuration of a trial, as the objective returns it, and its parameters."""

    config: Any
    params: dict[str, Any]


def suggest(objective: BaseObjective, study: optuna.Study, claim: Claim, spec: StudySpec) -> Suggestion:
    """Suggest and store the parameters of a claimed trial, and return them with the configuration.

    Parameters from an earlier attempt or of an enqueued trial are kept. Otherwise the first suggestion depends on the
    study's seed and the trial's number only. If it duplicates another trial, and all parameters are discrete or the
    sampler may repeat itself, the sampler suggests again with other seeds; then an untried configuration is chosen. If
    there is none, the duplicate is accepted.

    Args:
        objective: objective that defines the search space.
        study: Optuna study on a `PostgresStorage`; its sampler is replaced.
        claim: claim of the trial.
        spec: spec of the study.

    Raises:
        ObjectiveError: the objective returns no configuration.
        ClaimLostError: the worker does not own the trial any more; nothing was written.
    """
    storage = study._storage
    assert isinstance(storage, PostgresStorage)
    tries = SAMPLER_TRIES + UNTRIED_TRIES
    given = storage.get_trial(claim.trial_id)
    for number in range(tries):
        study.sampler = _choose_sampler(spec, claim.number, number)
        # Like `Study.ask`: otherwise samplers would use the trials of this worker's first suggestion again.
        study._thread_local.cached_all_trials = None
        # The lock is held until the parameters are written at the end of the block, so that other workers see them.
        with (
            suggestion_lock(storage.engine, study._study_id) as acquire_lock,
            storage.batch_writes(claim.trial_id) as batch,
        ):
            config = objective.configure(optuna.Trial(study, claim.trial_id))
            suggested = storage.get_trial(claim.trial_id)
            if spec.finalists_of is not None:
                _check_finalist(suggested, spec.finalists_of.assignment(claim.number)[0])
            if given.params or spec.sampler.is_indexed_by_trial or _may_repeat(suggested, spec.sampler):
                return Suggestion(config, suggested.params)
            acquire_lock()
            duplicate = _find_duplicate(storage, study._study_id, suggested)
            if duplicate is None:
                return Suggestion(config, suggested.params)
            if number == tries - 1:
                log.info("trial %d repeats trial %d: no untried configuration was found", claim.number, duplicate)
                return Suggestion(config, suggested.params)
            batch.discard()
    raise AssertionError("the last try returns")


def _choose_sampler(spec: StudySpec, trial_number: int, retry: int) -> BaseSampler:
    if retry < SAMPLER_TRIES:
        seeds = {"study_seed": spec.seed, "trial_number": trial_number, "retry": retry}
        return make_sampler(spec.sampler, epochs=spec.epochs, **seeds)
    return _UntriedSampler(derive_seed(spec.seed, "sampler", trial_number, retry))


def _check_finalist(trial: FrozenTrial, finalist: int) -> None:
    fixed = trial.system_attrs.get("fixed_params", {})
    if differ := sorted(name for name in fixed | trial.params if fixed.get(name) != trial.params.get(name)):
        raise ObjectiveError(
            f"the configuration differs from that of trial {finalist} ({', '.join(differ)}), because the objective's "
            "code was changed; restore the code, and retry the trial"
        )


def _may_repeat(trial: FrozenTrial, sampler: SamplerSpec) -> bool:
    """Return whether duplicates need no check: all parameters are fixed, or a duplicate is improbable."""
    fixed = trial.system_attrs.get("fixed_params", {})
    free = {name: d for name, d in trial.distributions.items() if name not in fixed}
    return not free or (not sampler.can_repeat and any(math.isinf(_count_choices(d)) for d in free.values()))


def _find_duplicate(storage: PostgresStorage, study_id: int, trial: FrozenTrial) -> int | None:
    """Return the number of another trial with the same parameters, in any state; None if there is none."""
    params = trial.params
    for other in storage.get_all_trials(study_id, deepcopy=False):
        if other.params == params and other.number != trial.number:
            return other.number
    return None


def _count_choices(distribution: BaseDistribution) -> float:
    """Return the number of values of a parameter; infinite for a range of floats without a step."""
    match distribution:
        case CategoricalDistribution():
            return len(distribution.choices)
        case IntDistribution():
            return (distribution.high - distribution.low) // distribution.step + 1
        case FloatDistribution(step=float(step)):
            return round((distribution.high - distribution.low) / step) + 1
        case _:
            return 1 if distribution.single() else math.inf


class _UntriedSampler(BruteForceSampler):
    """Random sampler among the values for which an untried configuration exists."""

    def __init__(self, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            super().__init__(seed)
        self._random = RandomSampler(seed)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value; any random one if there are too many to enumerate, or other trials have another space."""
        if _count_choices(param_distribution) <= _MAX_CHOICES:
            with contextlib.suppress(ValueError):
                return super().sample_independent(study, trial, param_name, param_distribution)
        return self._random.sample_independent(study, trial, param_name, param_distribution)
