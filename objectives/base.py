"""What every objective has, however it trains: a name, a metric, a search space, a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from objectives.errors import users_code
from objectives.preparation import prepared_folder
from objectives.search_space import Given

if TYPE_CHECKING:
    from pathlib import Path

    from objectives.search_space import SearchSpace


class BaseObjective(ABC):
    """One learning problem: an `Objective` is trained by this project's loop, a `LoopObjective` by one of its own.

    Attributes:
        name: what it is called in studies; the class's name unless given.
        metric: the validation metric to optimise.
        direction: whether the metric is better when it is higher or lower.
        epochs: length of a full trial, the default of a search.
        n_trials: number of trials, the default of a search.
        defaults: values of parameters that `suggest` asks for, a fair start: what the first trial of a search runs.
    """

    name: ClassVar[str] = ""
    metric: str = "accuracy"
    direction: Literal["maximize", "minimize"] = "maximize"
    epochs: ClassVar[int] = 20
    n_trials: ClassVar[int] = 24
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives a subclass without a name its class's name."""
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

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

    def prepare(self, folder: Path) -> None:  # noqa: B027 nothing unless overridden
        """Downloads, or features that take long: once on each machine, before `data`, which finds it in `prepared`.

        It is called again when the objective's source changes. Others wait while it runs; one that is killed is
        done again from an empty folder.
        """

    @property
    def prepared(self) -> Path:
        """The folder that `prepare` filled on this machine."""
        return prepared_folder(self.name, type(self), self.prepare)
