"""Suggest the parameters of a trial: seeds, sampler, and no duplicates."""

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
    """Return a seed below 2**31 from `parts` by SHA-256: the same everywhere, unrelated for related parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1


def training_seed(spec: StudySpec, number: int) -> int:
    """Return the seed of a trial's training: its own in a search, the common fresh one among finalists."""
    if spec.finalists_of is not None:
        return spec.finalists_of.assignment(number)[1]
    return derive_seed(spec.seed, "trial", number)


def get_resplit_seed(spec: StudySpec, number: int) -> int | None:
    """Return the seed of a trial's division of the data, common as that of its training; None for the study's own."""
    if spec.finalists_of is None or not spec.finalists_of.divisions:
        return None
    return derive_seed(spec.seed, "division", training_seed(spec, number))


def make_sampler(
    spec: SamplerSpec, *, study_seed: int, trial_number: int, epochs: int, again: int = 0
) -> optuna.samplers.BaseSampler:
    """Return the sampler for one trial.

    A sampler seeded alike in each worker suggests the same start-up points in each; one seeded by the trial's
    number does not, and makes these points a function of the study alone. A QMC sequence is one for the study.
    `again` counts the suggestions for this trial that were not taken.
    """
    seed = derive_seed(study_seed, "sampler", trial_number, *([again] if again else []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return spec.build(seed=seed, common_seed=derive_seed(study_seed, "qmc"), epochs=epochs)


log = logging.getLogger(__name__)

# How often the study's own sampler is asked before the untried configurations are gone through, and how often those.
SAMPLER_TRIES = 4
UNTRIED_TRIES = 8

_MANY = 1000  # choices of one parameter, from which on a random one is hardly ever a repetition


class Suggestion(NamedTuple):
    """The configuration of a trial, as the objective makes it, and the parameters that it is made of."""

    config: Any
    params: dict[str, Any]


def suggest(objective: BaseObjective, study: optuna.Study, claim: Claim, spec: StudySpec) -> Suggestion:
    """Return the configuration and parameters of a claimed trial; the parameters are written when this returns.

    A trial that has parameters from an earlier attempt, or from whoever enqueued it, keeps them. Otherwise the first
    suggestion, whose seed is made of the study's seed and the trial's number alone, is taken unless another trial has
    the same, and all parameters are discrete or the sampler is one that repeats itself; then the sampler is asked again
    with another seed, and after that a configuration is chosen that no trial has. When there is none the repetition is
    accepted.

    Args:
        objective: suggests and checks the configuration.
        study: Optuna's, on a `PostgresStorage`; its sampler is set here.
        claim: the trial.
        spec: the study's.

    Raises:
        ObjectiveError: the objective gives no configuration.
        ClaimLostError: the trial is no longer this worker's; nothing was written.
    """
    storage = study._storage
    assert isinstance(storage, PostgresStorage)
    tries = SAMPLER_TRIES + UNTRIED_TRIES
    given = storage.get_trial(claim.trial_id)
    for number in range(tries):
        study.sampler = _sampler(spec, claim.number, number)
        # As `Study.ask` does: else samplers see the trials of this worker's first suggestion for ever.
        study._thread_local.cached_all_trials = None
        # The turn is kept until what was suggested is written, at the end of the block: others see it, or wait for it.
        with (
            suggestion_lock(storage.engine, study._study_id) as take_turn,
            storage.batch_writes(claim.trial_id) as held,
        ):
            config = objective.configure(optuna.Trial(study, claim.trial_id))
            made = storage.get_trial(claim.trial_id)
            if spec.finalists_of is not None:
                _require_same(made, spec.finalists_of.assignment(claim.number)[0])
            if given.params or spec.sampler.is_indexed_by_trial or _is_free(made, spec.sampler):
                return Suggestion(config, made.params)
            take_turn()
            twin = _twin(storage, study._study_id, made)
            if twin is None:
                return Suggestion(config, made.params)
            if number == tries - 1:
                log.info("trial %d runs the configuration of trial %d: no other was found", claim.number, twin)
                return Suggestion(config, made.params)
            held.discard()
    raise AssertionError("the last try returns")


def _sampler(spec: StudySpec, trial_number: int, tried: int) -> BaseSampler:
    if tried < SAMPLER_TRIES:
        which = {"study_seed": spec.seed, "trial_number": trial_number, "again": tried}
        return make_sampler(spec.sampler, epochs=spec.epochs, **which)
    return _Untried(derive_seed(spec.seed, "sampler", trial_number, tried))


def _require_same(trial: FrozenTrial, finalist: int) -> None:
    fixed = trial.system_attrs.get("fixed_params", {})
    if differ := sorted(name for name in fixed | trial.params if fixed.get(name) != trial.params.get(name)):
        raise ObjectiveError(
            f"this is not the configuration of trial {finalist} any more ({', '.join(differ)}): the objective's code "
            "was changed since; put it back, and try the trial again"
        )


def _is_free(trial: FrozenTrial, sampler: SamplerSpec) -> bool:
    """Whether the trial may be run whatever the others are: by chance it repeats none, or somebody wants it so."""
    fixed = trial.system_attrs.get("fixed_params", {})
    free = {name: d for name, d in trial.distributions.items() if name not in fixed}
    return not free or (not sampler.can_repeat and any(math.isinf(_choices(given)) for given in free.values()))


def _twin(storage: PostgresStorage, study_id: int, trial: FrozenTrial) -> int | None:
    """Return the number of another trial with the same parameters, in whatever state."""
    params = trial.params
    for other in storage.get_all_trials(study_id, deepcopy=False):
        if other.params == params and other.number != trial.number:
            return other.number
    return None


def _choices(distribution: BaseDistribution) -> float:
    """Return how many values a parameter can have."""
    match distribution:
        case CategoricalDistribution():
            return len(distribution.choices)
        case IntDistribution():
            return (distribution.high - distribution.low) // distribution.step + 1
        case FloatDistribution(step=float(step)):
            return round((distribution.high - distribution.low) / step) + 1
        case _:
            return 1 if distribution.single() else math.inf


class _Untried(BruteForceSampler):
    """Chooses, at random, among the values under which there is a configuration that no trial has."""

    def __init__(self, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            super().__init__(seed)
        self._random = RandomSampler(seed)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value; at random, where there are too many to go through or other trials have another space."""
        if _choices(param_distribution) <= _MANY:
            with contextlib.suppress(ValueError):
                return super().sample_independent(study, trial, param_name, param_distribution)
        return self._random.sample_independent(study, trial, param_name, param_distribution)
