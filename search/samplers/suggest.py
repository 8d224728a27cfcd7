"""Suggest the parameters of a trial, avoid duplicates of other trials, and derive the seeds of a trial."""

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

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.search_space import check_name, check_parameter
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.database.locks import suggestion_lock
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claim_results import Claim


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**31, derived by SHA-256, so that the seeds of similar `parts` are unrelated."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def derive_training_seed(spec: StudySpec, number: int) -> int:
    """Return the training seed of a trial; in a study of finalists, all configurations have the same new seeds."""
    if spec.finalists_of is not None:
        return spec.finalists_of.get_trial_and_seed(number)[1]
    return derive_seed(spec.seed, "trial", number)


def get_resplit_seed(spec: StudySpec, number: int) -> int | None:
    """Return the seed of the new data split of a finalist; None if the trial uses the study's data split.

    Finalists with the same training seed have the same data split.
    """
    if spec.finalists_of is None or not spec.finalists_of.divisions:
        return None
    return derive_seed(spec.seed, "division", derive_training_seed(spec, number))


def make_sampler(spec: SamplerSpec, *, study_seed: int, trial_number: int, epochs: int, retry: int = 0) -> BaseSampler:
    """Return the sampler for one trial.

    The sampler's seed depends on the trial's number, so that workers do not suggest the same startup points. The QMC
    sequence is the same for all trials of the study.

    Args:
        spec: sampler of the study.
        study_seed: seed of the study.
        trial_number: number of the trial.
        epochs: number of epochs of a full trial.
        retry: number of suggestions that were rejected as duplicates for this trial.
    """
    seed = derive_seed(study_seed, "sampler", trial_number, *([retry] if retry else []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return spec.build(seed=seed, common_seed=derive_seed(study_seed, "qmc"), epochs=epochs)


log = logging.getLogger(__name__)

# Maximum number of suggestions by the study's sampler, and then by a random choice of untried configurations.
SAMPLER_TRIES = 4
UNTRIED_TRIES = 8

_MAX_CHOICES = 1000  # number of values of a parameter above which a random value is rarely a duplicate


class Suggestion(NamedTuple):
    """The configuration of a trial, as the objective returns it, and the sampled parameters of the trial."""

    config: Any
    params: dict[str, Any]


def suggest(objective: BaseObjective, study: optuna.Study, claim: Claim, spec: StudySpec) -> Suggestion:
    """Suggest and store the parameters of a claimed trial, and return them with the configuration.

    Parameters that an earlier attempt stored, or with which the trial was enqueued, are kept. For other trials, the
    seed of the suggestion depends only on the study's seed and the trial's number. If a suggestion has the same
    parameters as another trial, the sampler suggests again with other seeds. If all these suggestions are duplicates,
    an untried configuration is chosen at random. If none is found, the duplicate is accepted. Duplicates are not
    searched if they are improbable, because a parameter is continuous and the sampler does not repeat values.

    Args:
        objective: objective that defines the search space.
        study: Optuna study on a `PostgresStorage`; its sampler is replaced.
        claim: claim of the trial.
        spec: spec of the study.

    Raises:
        ObjectiveError: the objective returns no configuration, or the name of a parameter is invalid.
        ClaimLostError: the worker does not own the trial any more; nothing was written.
    """
    storage = study._storage
    assert isinstance(storage, PostgresStorage)
    tries = SAMPLER_TRIES + UNTRIED_TRIES
    given = storage.get_trial(claim.trial_id)
    for number in range(tries):
        study.sampler = _choose_sampler(spec, claim.number, number)
        # As in `Study.ask`: otherwise samplers would use trials that were cached at this worker's first suggestion.
        study._thread_local.cached_all_trials = None
        # The lock is held until the parameters are written at the end of the block, so that other workers see them.
        with (
            suggestion_lock(storage.engine, study._study_id) as acquire_lock,
            storage.batch_writes(claim.trial_id) as batch,
        ):
            config = objective.configure(optuna.Trial(study, claim.trial_id))
            suggested = storage.get_trial(claim.trial_id)
            check_trial(suggested)
            if spec.finalists_of is not None:
                _check_finalist(suggested, spec.finalists_of.get_trial_and_seed(claim.number)[0])
            # In population-based training, a suggestion must not depend on the order in which trials start.
            may_repeat = spec.sampler.is_indexed_by_trial or spec.pruner.shares_checkpoints
            if given.params or may_repeat or _may_repeat(suggested, spec.sampler):
                return Suggestion(config, suggested.params)
            acquire_lock()
            duplicate = _find_duplicate(storage, study._study_id, suggested)
            if duplicate is None:
                return Suggestion(config, suggested.params)
            if number == tries - 1:
                log.info("trial %d repeats trial %d: no untried configuration was found", claim.number, duplicate)
                return Suggestion(config, suggested.params)
            batch.discard()
    raise AssertionError("unreachable: the loop returns at its last try")


def check_trial(trial: optuna.trial.BaseTrial) -> None:
    """Check that the database accepts the parameters of a trial, and the names of its user attributes.

    Raises:
        ObjectiveError: it rejects one of them.
    """
    for name, value in trial.params.items():
        check_parameter(name, [value])
    for name in trial.user_attrs:
        check_name("user attribute", name)


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
    """Return whether a duplicate is allowed or improbable, so that the trial need not be compared with other trials.

    It is allowed if all parameters are fixed. It is improbable if a parameter is continuous, and the sampler does not
    repeat values.
    """
    fixed = trial.system_attrs.get("fixed_params", {})
    free = {name: d for name, d in trial.distributions.items() if name not in fixed}
    return not free or (not sampler.can_repeat and any(math.isinf(_count_choices(d)) for d in free.values()))


def _find_duplicate(storage: PostgresStorage, study_id: int, trial: FrozenTrial) -> int | None:
    """Return the number of another trial, in any state, with the same parameters; None if there is no such trial."""
    params = trial.params
    for other in storage.get_all_trials(study_id, deepcopy=False):
        if other.params == params and other.number != trial.number:
            return other.number
    return None


def _count_choices(distribution: BaseDistribution) -> float:
    """Return the number of possible values of a parameter; infinite for a float range without a step."""
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
    """Random sampler that chooses among the values for which an untried configuration exists."""

    def __init__(self, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            super().__init__(seed)
        self._random = RandomSampler(seed)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value for which an untried configuration exists.

        Return any random value if there are too many values to enumerate, or if other trials have another search space.
        """
        if _count_choices(param_distribution) <= _MAX_CHOICES:
            with contextlib.suppress(ValueError):
                return super().sample_independent(study, trial, param_name, param_distribution)
        return self._random.sample_independent(study, trial, param_name, param_distribution)
