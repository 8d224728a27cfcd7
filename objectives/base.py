"""What every objective has, however it trains: a name, a metric, a search space, a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpsearch.objectives.errors import ObjectiveError, users_code
from hpsearch.objectives.preparation import prepared_folder
from hpsearch.objectives.search_space import Given

if TYPE_CHECKING:
    from pathlib import Path

    from hpsearch.objectives.search_space import SearchSpace


class BaseObjective(ABC):
    """One learning problem: an `Objective` is trained by this project's loop, a `LoopObjective` by one of its own.

    Attributes:
        name: what it is called in studies; the class's name unless given.
        metric: the validation metric to optimise.
        direction: whether the metric is better when it is higher or lower.
        directions: several metrics that a study is to optimise at once, each with its direction; the first of them is
            `metric`, by which the best epoch is chosen. Empty: one metric.
        constraints: what a trial has to keep to, by metric, as `{"model_mb": "<= 10"}`.
        reported: what beside `metric` the study asks every epoch to report: see `also_report`.
        epochs: length of a full trial, the default of a search.
        n_trials: number of trials, the default of a search.
        defaults: values of parameters that `suggest` asks for, a fair start: what the first trial of a search runs.
    """

    name: ClassVar[str] = ""
    metric: str = "accuracy"
    direction: Literal["maximize", "minimize"] = "maximize"
    directions: Mapping[str, Literal["maximize", "minimize"]] = {}
    constraints: Mapping[str, str] = {}
    reported: tuple[str, ...] = ()
    epochs: ClassVar[int] = 20
    n_trials: ClassVar[int] = 24
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives a subclass without a name its class's name, and one with `directions` the first of them as its metric.

        Raises:
            ObjectiveError: `directions` are none, or the class names another metric than the first of them.
        """
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        if cls.directions:
            _take_first(cls)

    @abstractmethod
    def suggest(self, trial: SearchSpace) -> Any:
        """The configuration of one trial, from the values that the trial suggests."""

    def configure(self, trial: SearchSpace) -> Any:
        """`suggest`, with its answer checked.

        Raises:
            ObjectiveError: it is no configuration.
        """
        return self.suggest(trial)

    def default_config(self) -> Any:
        """A configuration that is a fair start without any search: `defaults`, else the middle of the search space.

        Raises:
            ObjectiveError: `suggest` failed.
        """
        with users_code(f"{type(self).__name__}.suggest"):
            return self.configure(Given(self.defaults))

    def judge_by(self, metric: str, direction: Literal["maximize", "minimize"]) -> None:
        """Optimise another metric than the class names, as a study may say.

        Raises:
            MetricError: there is no such metric.
            ObjectiveError: it is better the other way round.
        """
        self.metric, self.direction = metric, direction

    def also_report(self, names: Collection[str]) -> None:
        """Report in every epoch, beside `metric`, what a study asks for: what it optimises, and what it bounds.

        Call it after `judge_by`. What is named is in each epoch's record: see `objectives.measured.value_of`. What
        cannot be known here to be missing is found by the first evaluation, before training.

        Raises:
            MetricError: a name is known to be none that the objective can report.
        """
        self.reported = tuple(name for name in dict.fromkeys(names) if name != self.metric)

    def prepare(self, folder: Path) -> None:  # noqa: B027 nothing unless overridden
        """Downloads, or features that take long: once on each machine, before `data`, which finds it in `prepared`.

        It is called again when the objective's source changes. Others wait while it runs; one that is killed is
        done again from an empty folder.
        """

    @property
    def prepared(self) -> Path:
        """The folder that `prepare` filled on this machine."""
        return prepared_folder(self.name, type(self), self.prepare)


def _take_first(cls: type[BaseObjective]) -> None:
    """Makes the first of a class's `directions` its metric."""
    directions = cls.directions
    if not isinstance(directions, Mapping) or not all(isinstance(name, str) and name for name in directions):
        raise ObjectiveError(f"{cls.__name__}.directions must be a dictionary of directions by metric")
    for name, direction in directions.items():
        if direction not in ("maximize", "minimize"):
            raise ObjectiveError(
                f"{cls.__name__}.directions: {name} must be 'maximize' or 'minimize', not {direction!r}"
            )
    first, direction = next(iter(directions.items()))
    for field, wanted in (("metric", first), ("direction", direction)):
        given = cls.__dict__.get(field, wanted)
        if given != wanted:
            raise ObjectiveError(
                f"{cls.__name__}.{field} is {given!r}, but directions begin with {first!r}, to {direction}: "
                f"leave {field} out, or put what is to choose the best epoch first"
            )
    cls.metric, cls.direction = first, direction
