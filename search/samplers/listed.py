"""Samplers that run a list of configurations: grid and brute force."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from hpsearch.objectives.errors import wrap_user_errors
from hpsearch.objectives.search_space import FixedTrial, NotInSpaceError, list_configurations
from hpsearch.search.errors import suggest_names
from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from collections.abc import Container

    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

    from hpsearch.objectives.objective import BaseObjective


MOST = 100_000  # points, all of which are checked

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class Grid(SamplerSpec):
    """Each point of a grid, as `search_space = {lr = [1e-3, 1e-2], width = [32, 64]}` gives it, once, in random order.

    It must have all of the objective's parameters. The budget is the number of points, unless --trials is less.
    """

    name: Literal["grid"] = "grid"
    search_space: dict[str, list[bool | int | float | str | None]]

    is_indexed_by_trial: ClassVar[bool] = True
    examples: ClassVar[Mapping[str, str]] = {"search_space": "{lr: [0.001, 0.01], width: [32, 64]}"}

    @field_validator("search_space", mode="before")
    @classmethod
    def _numbers(cls, given: Any) -> Any:
        """YAML reads 1e-3 as a word."""
        if not given or not isinstance(given, dict) or not all(isinstance(values, list) for values in given.values()):
            raise ValueError(f"{given!r} is no table of lists, such as {{lr = [0.001, 0.01], width = [32, 64]}}")
        for name, value in ((name, value) for name, values in given.items() for value in values):
            if not isinstance(value, bool | int | float | str | None):
                raise ValueError(
                    f"{name} has {value!r}, which is no value of a parameter: give numbers, words, true or none"
                )
        return {name: [_number(value) for value in values] for name, values in given.items()}

    @field_validator("search_space")
    @classmethod
    def _distinct(cls, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for name, values in given.items():
            if not values:
                raise ValueError(f"{name} has no value: give some, or leave it out")
            for place, value in enumerate(values):
                if any(value == other and _is_switch(value) == _is_switch(other) for other in values[:place]):
                    raise ValueError(f"{name} has {value!r} twice: leave one out")
        if (points := math.prod(len(values) for values in given.values())) > MOST:
            raise ValueError(f"{points} points are more than {MOST}: give fewer values, or use another sampler")
        return given

    def max_trials(self) -> int:
        return math.prod(len(values) for values in self.search_space.values())

    def for_objective(self, objective: BaseObjective) -> Self:
        asked: set[str] = set()
        for point in self._points():
            space = FixedTrial(point)
            try:
                with wrap_user_errors(f"{type(objective).__name__}.suggest"):
                    objective.configure(space)
            except NotInSpaceError as error:
                raise ValueError(f"sampler.search_space.{error.name}: {error.reason}") from None
            if missing := [name for name in space.values if name not in point]:
                raise ValueError(
                    f"sampler.search_space has no {missing[0]!r}, which {objective.name} asks for: "
                    f"give its values, such as {missing[0]} = [...]"
                )
            asked |= set(space.values)
        for name in self.search_space:
            if name not in asked:
                raise ValueError(
                    f"sampler.search_space.{name}: no parameter of {objective.name}{suggest_names(name, asked)}"
                )
        return self

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        points = self._points()
        random.Random(common_seed).shuffle(points)  # noqa: S311 no secret
        return _grid_sampler(points)

    def _points(self) -> list[dict[str, Any]]:
        names, values = zip(*sorted(self.search_space.items()), strict=True)
        return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)  # which is no number, though True == 1


def _number(value: object) -> object:
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _grid_sampler(points: list[dict[str, Any]]) -> BaseSampler:
    from optuna.samplers import RandomSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    class ByNumber(RandomSampler):
        """Gives a trial the point of its place among those that nobody gave another: on any worker the same.

        (Optuna's chooses among the points that no trial has yet, which several workers may do at once.)
        """

        def sample_independent(
            self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
        ) -> Any:
            trials = study._storage.get_all_trials(study._study_id, deepcopy=False)
            others = sum("fixed_params" in other.system_attrs for other in trials if other.number < trial.number)
            value = points[(trial.number - others) % len(points)][param_name]
            return param_distribution.to_external_repr(param_distribution.to_internal_repr(value))

    return ByNumber()


class BruteForce(SamplerSpec):
    """Each configuration of the objective's search space once, in random order, Optuna's ``BruteForceSampler``.

    No parameter may be a range of floats without a `step`. The budget is the number of configurations, unless --trials
    is less; `configurations` is filled in.
    """

    name: Literal["brute_force"] = "brute_force"
    configurations: int | None = Field(default=None, ge=1)

    def max_trials(self) -> int | None:
        return self.configurations

    def for_objective(self, objective: BaseObjective) -> Self:
        every = list_configurations(objective.configure)
        try:
            with wrap_user_errors(f"{type(objective).__name__}.suggest"):
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
        return _brute_force_sampler(seed)


def _brute_force_sampler(seed: int) -> BaseSampler:
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
