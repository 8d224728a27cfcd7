"""Search through a whole space."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from hpsearch.objectives.errors import users_code
from hpsearch.objectives.search_space import NotInSpaceError, every_configuration
from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from collections.abc import Container

    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

    from hpsearch.objectives.base import BaseObjective

MOST = 100_000  # configurations, all of which are counted


class BruteForce(SamplerSpec):
    """Each configuration of the objective's search space once, in random order, Optuna's ``BruteForceSampler``.

    No parameter may be a range of floats without a `step`. The budget is the number of configurations, unless --trials
    is less; `configurations` is filled in.
    """

    name: Literal["brute_force"] = "brute_force"
    configurations: int | None = Field(default=None, ge=1)

    def most(self) -> int | None:
        return self.configurations

    def for_objective(self, objective: BaseObjective) -> Self:
        every = every_configuration(objective.configure)
        try:
            with users_code(f"{type(objective).__name__}.suggest"):
                count = sum(1 for _ in itertools.islice(every, MOST + 1))
        except NotInSpaceError as error:
            raise ValueError(f"sampler: brute_force cannot search {objective.name}: {error}") from None
        if count > MOST:
            raise ValueError(
                f"sampler: brute_force would run more than {MOST} configurations of {objective.name}: "
                "give its parameters fewer values, or use another sampler"
            )
        return self.model_copy(update={"configurations": count})

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        return _sampler(seed)


def _sampler(seed: int) -> BaseSampler:
    from optuna.samplers import BruteForceSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState

    class Whole(BruteForceSampler):
        """Optuna's, which takes what a waiting trial has for tried as well."""

        def sample_independent(
            self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
        ) -> Any:
            seen: Any = _WithWaiting(study)
            return super().sample_independent(seen, trial, param_name, param_distribution)

    class _WithWaiting:
        """A study whose storage lists the trials that wait and have parameters: paused, or given back."""

        def __init__(self, study: Study) -> None:
            self._study_id, self._inner, self._storage = study._study_id, study._storage, self

        def get_all_trials(
            self, study_id: int, deepcopy: bool, states: Container[TrialState] | None
        ) -> list[FrozenTrial]:
            trials = self._inner.get_all_trials(study_id, deepcopy=deepcopy)
            return [trial for trial in trials if trial.state != TrialState.WAITING or trial.params]

    return Whole(seed)
