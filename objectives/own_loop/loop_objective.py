"""`LoopObjective`: an objective with its own training loop."""

from __future__ import annotations

import dataclasses
import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest, users_code
from hpsearch.objectives.objective import BaseObjective

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hpsearch.objectives.own_loop.loop_trial import LoopTrial
    from hpsearch.objectives.search_space import SearchSpace


class LoopObjective(BaseObjective):
    """A learning problem whose training is a loop of one's own: a GAN, reinforcement learning, a script that exists.

    `run` is given a trial; it iterates over `trial.epochs()` and reports each epoch once. Around that all of a trial
    holds: it is pruned, stopped and resumed, its budget is exact, its numbers and files go to MLflow. Each epoch is
    seeded by (seed, epoch): what is drawn in it is the same after a resume. What is drawn before the first epoch is
    drawn again then, from the same seed; nothing else of what is outside `epochs()` is looked after.

    Example:
        >>> class Gan(LoopObjective):
        ...     metric, direction, epochs = "frechet", "minimize", 30
        ...     def suggest(self, trial):
        ...         return {"lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True)}
        ...     def run(self, trial):
        ...         gan = Networks(trial.config["lr"]).to(trial.device)
        ...         if trial.state:
        ...             gan.load_state_dict(trial.state)
        ...         for epoch in trial.epochs():
        ...             gan.train_epoch()
        ...             trial.report({"frechet": gan.distance()}, state=gan.state_dict())
    """

    @abstractmethod
    def suggest(self, trial: SearchSpace) -> Any:
        """The configuration of one trial: a dictionary, or a dataclass, of plain values."""

    @abstractmethod
    def run(self, trial: LoopTrial) -> None:
        """Trains the trial to its end, or to where `trial.epochs()` ends it."""

    def test(self, best: Any, config: Any, device: torch.device, seed: int) -> Mapping[str, float]:
        """Scores on the test set, the study's metric among them, for `open-test`.

        Args:
            best: what `trial.report` was given as `best`, or as `state`, in the best epoch.
            config: of the trial.
            device: to compute on.
            seed: by which the study's data is divided, `trial.split_seed` in `run`.
        """
        raise NotImplementedError

    def export(self, best: Any, config: Any) -> tuple[nn.Module, Any]:
        """A module on the CPU with the best weights, and a batch of at least two inputs for it, for `promote`.

        Args:
            best: as in `test`.
            config: of the trial.
        """
        raise NotImplementedError

    def defines(self, method: str) -> bool:
        """Whether `test` or `export` is overridden."""
        return getattr(type(self), method) is not getattr(LoopObjective, method)

    def configure(self, trial: SearchSpace) -> Any:
        """`suggest`, with its answer checked.

        Raises:
            ObjectiveError: it is not of plain values, which a checkpoint can hold.
        """
        config = self.suggest(trial)
        plain_config(config, f"{type(self).__name__}.suggest")
        return config


def plain_config(config: Any, what: str) -> Any:
    """A configuration as JSON values.

    Raises:
        ObjectiveError: it holds something else.
    """
    values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
    if not isinstance(values, Mapping):
        raise ObjectiveError(f"{what} must return a dictionary or a dataclass, not {type(config).__name__}")
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ObjectiveError(f"{what}: {name} must be a plain value, not {value!r}") from error
    return json.loads(json.dumps(values))


class _Suggested(Exception):  # noqa: N818 no error: the function has asked for all that it wants to know
    """The function begins to train."""


class _Asking:
    """A trial while it is only asked for values: the function is left where it begins to train."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("suggest_"):
            raise _Suggested
        ask: Callable[..., Any] = getattr(self._space, name)

        def noted(parameter: str, *arguments: Any, **settings: Any) -> Any:
            self.values[parameter] = ask(parameter, *arguments, **settings)
            return self.values[parameter]

        return noted


class FunctionObjective(LoopObjective):
    """A function `main(trial)` as an objective: it asks `trial.suggest_float(...)` first, then trains.

    To learn what it searches it is called up to where it first asks the trial for anything else: let what takes long
    come after. Metric, direction or directions, constraints, epochs and number of trials are attributes of the
    function, or the study's.
    """

    function: ClassVar[Callable[[Any], None]]

    def suggest(self, trial: SearchSpace) -> dict[str, Any]:
        """The values that the function asks for before it trains."""
        asking = _Asking(trial)
        try:
            type(self).function(asking)
        except _Suggested:
            return asking.values
        raise ObjectiveError(f"{self.name} never trained: iterate over trial.epochs(), and report each of them")

    def run(self, trial: LoopTrial) -> None:
        """The function."""
        type(self).function(_Told(trial))


class _Told:
    """A trial that answers what it is asked for with what was suggested."""

    def __init__(self, trial: LoopTrial) -> None:
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("suggest_"):
            return getattr(self._trial, name)
        return self._told

    def _told(self, parameter: str, *_arguments: Any, **_settings: Any) -> Any:
        if parameter not in self._trial.config:
            raise ObjectiveError(f"{parameter!r} is asked for too late: ask for all parameters before trial.epochs()")
        return self._trial.config[parameter]


@cache
def objective_of(function: Callable[[Any], None]) -> type[FunctionObjective]:
    """The objective that a function stands for, the same class each time."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ObjectiveError(
            f"{function.__name__} must take one argument, the trial: def {function.__name__}(trial)"
        ) from error
    names = ("metric", "direction", "directions", "constraints", "epochs", "n_trials")
    given = {name: getattr(function, name) for name in names if hasattr(function, name)}
    parts = {"name": function.__name__, "function": staticmethod(function), "__module__": function.__module__}
    return type(function.__name__, (FunctionObjective,), {**parts, **given})


@dataclass(frozen=True)
class RestoredLoop:
    """The best of an own loop, beside the objective that knows what to do with it."""

    objective: LoopObjective
    config: Any
    best: Any
    seed: int
    split_seed: int

    def test(self) -> dict[str, float]:
        """Scores on the test set, by the objective's own `test`: what is seen once cannot be unseen."""
        import torch

        from hpsearch.objectives.training.reproducibility.seeds import reproducible, set_seed

        objective, who = self.objective, type(self.objective).__name__
        with users_code(f"{who}.test"), reproducible(deterministic=False):
            set_seed(self.seed, "test")
            found = objective.test(self.best, self.config, torch.device("cpu"), self.split_seed)
            scores = {str(name): float(value) for name, value in found.items()}
        if objective.metric not in scores:
            hint = nearest(objective.metric, list(scores))
            raise MetricError(objective.metric, f"is none that {who}.test gives: {hint}")
        return scores


def restore_loop(objective: LoopObjective, best: Mapping[str, Any]) -> RestoredLoop:
    """What a `best.pt` holds, ready to be tested.

    Raises:
        ObjectiveError: the objective has no `test`.
    """
    if isinstance(objective, FunctionObjective):
        raise ObjectiveError(
            f"{objective.name} is a function, which has no test(): make it the run() of a LoopObjective with a test()"
        )
    if not objective.defines("test"):
        raise ObjectiveError(f"{objective.name} has no test(): define it to score the best of a search on the test set")
    config = config_of(objective, best["config"])
    return RestoredLoop(objective, config, best["model"], best["seed"], best["split_seed"])


def config_of(objective: LoopObjective, values: Mapping[str, Any]) -> Any:
    """A configuration from its plain values, in the class that the objective gives it."""
    made: Any = type(objective.default_config())
    in_class = dataclasses.is_dataclass(made)
    return made(**values) if in_class else dict(values)
