"""Samplers that run a list of configurations: grid and brute force."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator

from hpsearch.objectives.errors import wrap_user_errors
from hpsearch.objectives.search_space import FixedTrial, NotInSpaceError, StudylessTrial, TrialProtocol
from hpsearch.search.errors import suggest_names
from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

    from hpsearch.objectives.base_objective import BaseObjective
    from hpsearch.search.samplers.known_trials import States


_MAX = 100_000  # configurations; a limit, because each one is checked when the study is created

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class Grid(SamplerSpec):
    """Run each point of a grid once, in random order.

    The option `search_space` lists the values of each parameter: `{lr = [1e-3, 1e-2], width = [32, 64]}`. The grid must
    contain all parameters of the objective. The budget is the number of points, unless --trials is lower.
    """

    name: Literal["grid"] = "grid"
    search_space: dict[str, list[bool | int | float | str | None]]

    is_indexed_by_trial: ClassVar[bool] = True
    examples: ClassVar[Mapping[str, str]] = {"search_space": "{lr: [0.001, 0.01], width: [32, 64]}"}

    @field_validator("search_space", mode="before")
    @classmethod
    def _parse_numbers(cls, given: Any) -> Any:
        """Convert numbers such as 1e-3, which YAML reads as text."""
        if not given or not isinstance(given, dict) or not all(isinstance(values, list) for values in given.values()):
            raise ValueError(f"{given!r} is not a table of lists; write {{lr = [0.001, 0.01], width = [32, 64]}}")
        for name, value in ((name, value) for name, values in given.items() for value in values):
            if not isinstance(value, bool | int | float | str | None):
                raise ValueError(f"{name} has the invalid value {value!r}; use numbers, text, true, false or none")
        return {name: [_to_number(value) for value in values] for name, values in given.items()}

    @field_validator("search_space")
    @classmethod
    def _check_values(cls, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for name, values in given.items():
            if not values:
                raise ValueError(f"{name} has no values; give at least one, or remove {name}")
            for index, value in enumerate(values):
                if any(value == other and _is_bool(value) == _is_bool(other) for other in values[:index]):
                    raise ValueError(f"{name} has the value {value!r} twice; remove one of them")
        if (points := math.prod(len(values) for values in given.values())) > _MAX:
            raise ValueError(f"the grid has {points} points, and the limit is {_MAX}; give fewer values")
        return given

    def max_trials(self) -> int:
        return math.prod(len(values) for values in self.search_space.values())

    def fit_to_objective(self, objective: BaseObjective) -> Self:
        used: set[str] = set()
        for point in self._points():
            space = FixedTrial(point)
            try:
                with wrap_user_errors(f"{type(objective).__name__}.suggest"):
                    objective.configure(space)
            except NotInSpaceError as error:
                raise ValueError(f"sampler.search_space: {error}") from None
            if missing := [name for name in space.values if name not in point]:
                raise ValueError(
                    f"sampler.search_space: parameter {missing[0]!r} of {objective.name} is missing; "
                    f"give its values as {missing[0]} = [...]"
                )
            used |= set(space.values)
        if unused := [name for name in self.search_space if name not in used]:
            hint = suggest_names(unused[0], used)
            raise ValueError(f"sampler.search_space: parameter {unused[0]!r} does not exist in {objective.name}{hint}")
        return self

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        points = self._points()
        random.Random(common_seed).shuffle(points)  # noqa: S311 not for secrets
        return _make_grid_sampler(points)

    def _points(self) -> list[dict[str, Any]]:
        names, values = zip(*sorted(self.search_space.items()), strict=True)
        return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)  # distinguished from numbers, although True == 1


def _to_number(value: object) -> object:
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _make_grid_sampler(points: list[dict[str, Any]]) -> BaseSampler:
    from optuna.samplers import RandomSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    class GridSampler(RandomSampler):
        """Grid sampler that derives a trial's point from the trial's number and the number of earlier enqueued trials.

        Optuna's sampler chooses a point that no trial has yet, so concurrent workers may choose the same point.
        """

        def sample_independent(
            self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
        ) -> Any:
            trials = study._storage.get_all_trials(study._study_id, deepcopy=False)
            enqueued = sum("fixed_params" in other.system_attrs for other in trials if other.number < trial.number)
            value = points[(trial.number - enqueued) % len(points)][param_name]
            return param_distribution.to_external_repr(param_distribution.to_internal_repr(value))

    return GridSampler()


class BruteForce(SamplerSpec):
    """Run each configuration of the search space once, in random order, with Optuna's ``BruteForceSampler``.

    Float parameters need a `step`. The budget is the number of configurations, unless --trials is lower. The option
    `configurations` is computed when the study is created.
    """

    name: Literal["brute_force"] = "brute_force"
    configurations: int | None = Field(default=None, ge=1)

    def max_trials(self) -> int | None:
        return self.configurations

    def fit_to_objective(self, objective: BaseObjective) -> Self:
        configurations = list_configurations(objective.configure)
        try:
            with wrap_user_errors(f"{type(objective).__name__}.suggest"):
                count = sum(1 for _ in itertools.islice(configurations, _MAX + 1))
        except NotInSpaceError as error:
            raise ValueError(f"sampler brute_force cannot search {objective.name}: {error}") from None
        if count > _MAX:
            raise ValueError(
                f"sampler brute_force would run more than {_MAX} configurations of {objective.name}; "
                "give its parameters fewer values, or use another sampler"
            )
        return self.model_copy(update={"configurations": count})

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        return _make_brute_force_sampler(seed)


def list_configurations(configure: Callable[[TrialProtocol], object]) -> Iterator[dict[str, Any]]:
    """Iterate over all combinations of the parameter values that `configure` requests.

    Raises:
        NotInSpaceError: a parameter is a range without `step`, which has no finite grid.
    """
    indices: list[int] = []  # per parameter, the index of its next value
    while True:
        space = _GridTrial(indices)
        configure(space)
        yield space.values
        indices = [*indices, *[0] * (len(space.counts) - len(indices))][: len(space.counts)]
        while indices and indices[-1] + 1 == space.counts[len(indices) - 1]:
            indices.pop()
        if not indices:
            return
        indices[-1] += 1


class _GridTrial(StudylessTrial):
    """Trial that returns, for each parameter, the grid value at a given index; without an index, the first value."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__()
        self._indices = indices
        self.counts: list[int] = []

    def _range(self, name: str, low: float, high: float, step: float | None, *, log: bool) -> float:
        if step is None and low < high:
            raise NotInSpaceError(name, f"has infinitely many values in [{low}, {high}]; set a step")
        count = math.floor((high - low) / step + 1e-8) + 1 if step else 1
        number: float = self._suggest(name, count, lambda index: low + index * (step or 0))
        return number

    def _category(self, name: str, choices: Sequence[Any]) -> Any:
        return self._suggest(name, len(choices), lambda index: choices[index])

    def _suggest(self, name: str, count: int, value: Callable[[int], Any]) -> Any:
        if name in self.values:
            return self.values[name]
        position = len(self.counts)
        self.counts.append(count)
        return value(self._indices[position] if position < len(self._indices) else 0)


def _make_brute_force_sampler(seed: int) -> BaseSampler:
    from optuna.samplers import BruteForceSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial, TrialState

    class BruteForceWithWaiting(BruteForceSampler):
        """Optuna's sampler, changed so that it does not suggest configurations of waiting trials again."""

        def sample_independent(
            self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
        ) -> Any:
            view: Any = _WithWaiting(study)
            return super().sample_independent(view, trial, param_name, param_distribution)

    class _WithWaiting:
        """View of a study's storage that includes waiting trials with parameters, which were paused or released."""

        def __init__(self, study: Study) -> None:
            self._study_id, self._inner, self._storage = study._study_id, study._storage, self

        def get_all_trials(self, study_id: int, deepcopy: bool, states: States) -> list[FrozenTrial]:
            trials = self._inner.get_all_trials(study_id, deepcopy=deepcopy)
            return [trial for trial in trials if trial.state != TrialState.WAITING or trial.params]

    return BruteForceWithWaiting(seed)
