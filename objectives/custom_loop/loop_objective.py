"""`LoopObjective`: an objective with a custom training loop."""

from __future__ import annotations

import dataclasses
import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import MetricError, ObjectiveError, suggest_names, wrap_user_errors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hpsearch.objectives.custom_loop.loop_trial import LoopTrial
    from hpsearch.objectives.search_space import TrialProtocol


class LoopObjective(BaseObjective):
    """A learning problem with a custom training loop: a GAN, reinforcement learning, an existing script.

    `run` receives a trial, iterates over `trial.epochs()` and reports each epoch once. hpsearch prunes, stops and
    resumes the trial, counts each epoch once in the study's budget, and logs metrics and files to MLflow. At the start
    of each epoch the random generators are seeded by (seed, epoch), so that a repeated epoch uses the same random
    numbers. Code before the first epoch runs again after a resume, with the same seed. hpsearch manages no other code
    outside the loop over `epochs()`.

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
    def suggest(self, trial: TrialProtocol) -> Any:
        """Return the configuration of one trial: a dictionary or dataclass of JSON values."""

    @abstractmethod
    def run(self, trial: LoopTrial) -> None:
        """Train the trial until `trial.epochs()` ends."""

    def test(self, best: Any, config: Any, device: torch.device, seed: int) -> Mapping[str, float]:
        """Return scores on the test set, including the study's metric, for `evaluate-test`.

        Args:
            best: the argument `best` of `trial.report` in the best epoch, or its argument `state` if `best` is None.
            config: configuration of the trial.
            device: device to compute on.
            seed: seed of the data split; the same as `trial.split_seed` in `run`.
        """
        raise NotImplementedError

    def export(self, best: Any, config: Any) -> tuple[nn.Module, Any]:
        """Return a module on the CPU with the best weights, and an example batch of at least two inputs, for `promote`.

        Args:
            best: as in `test`.
            config: configuration of the trial.
        """
        raise NotImplementedError

    def defines(self, method: str) -> bool:
        """Return whether the class overrides `test` or `export`."""
        return getattr(type(self), method) is not getattr(LoopObjective, method)

    def configure(self, trial: TrialProtocol) -> Any:
        """Call `suggest` and check its result.

        Raises:
            ObjectiveError: the result is not a dictionary or dataclass of JSON values, or a conversion to JSON and
                back changes it, so that `test` and `export` would get another configuration.
        """
        config, owner = self.suggest(trial), f"{type(self).__name__}.suggest"
        values = config_to_json(config, owner)
        if self.defines("test") or self.defines("export"):
            _check_json_round_trip(config, values, owner)
        return config


def _check_json_round_trip(config: Any, values: Mapping[str, Any], owner: str) -> None:
    config_class = type(config)
    try:
        restored = config_class(**values) if dataclasses.is_dataclass(config_class) else values
    except TypeError as error:
        raise ObjectiveError(
            f"{owner}: {config_class.__name__}(**fields) failed: {error}; make all fields arguments of the constructor"
        ) from error
    for name in values:
        if isinstance(config, Mapping) and name not in config:
            raise ObjectiveError(f"{owner}: the key of {name!r} must be a text")
        before, after = ((c[name] if isinstance(c, Mapping) else getattr(c, name)) for c in (config, restored))
        if before != after:
            raise ObjectiveError(f"{owner}: {name!r} is {before!r}, but its JSON value is {after!r}; return {after!r}")


def is_coroutine_or_generator(function: Any) -> bool:
    """Return whether the function is a coroutine or a generator, so that a call executes nothing."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds)


def format_not_executed(name: str) -> str:
    """Return the error message for a coroutine or a generator of this name."""
    return f"{name} is a coroutine or a generator, which hpsearch does not execute; use def without yield"


def config_to_json(config: Any, what: str) -> Any:
    """Convert a configuration to a dictionary of JSON values; error messages begin with `what`.

    Raises:
        ObjectiveError: the configuration is not a dictionary or dataclass of JSON values.
    """
    values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else config
    if not isinstance(values, Mapping):
        raise ObjectiveError(f"{what} must return a dictionary or a dataclass, not {type(config).__name__}")
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ObjectiveError(f"{what}: {name!r} must be a JSON value, not {value!r}") from error
    return json.loads(json.dumps(values))


class _TrainingReached(Exception):  # noqa: N818 not an error
    """Exception at the function's first access to the trial that is not a `suggest_*` method."""


class _SuggestRecorder:
    """Trial that records the suggested values and raises `_TrainingReached` at an access that is not `suggest_*`."""

    def __init__(self, space: TrialProtocol) -> None:
        self._space = space
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("suggest_"):
            raise _TrainingReached
        suggest: Callable[..., Any] = getattr(self._space, name)

        def record(parameter: str, *arguments: Any, **settings: Any) -> Any:
            self.values[parameter] = suggest(parameter, *arguments, **settings)
            return self.values[parameter]

        return record


class FunctionObjective(LoopObjective):
    """Objective that wraps a function `main(trial)`, which calls `trial.suggest_*` first and then trains.

    To get the search space, hpsearch calls the function and stops it at its first access to the trial that is not
    `suggest_*`. Slow code must come after this access. `metric`, `direction`, `directions`, `constraints`, `epochs` and
    `n_trials` are attributes of the function or settings of the study.
    """

    function: ClassVar[Callable[[Any], None]]

    def suggest(self, trial: TrialProtocol) -> dict[str, Any]:
        """Return the values of the parameters that the function suggests before it trains."""
        recorder = _SuggestRecorder(trial)
        try:
            type(self).function(recorder)
        except _TrainingReached:
            return recorder.values
        raise ObjectiveError(f"{self.name} ended without training; iterate over trial.epochs() and report each epoch")

    def run(self, trial: LoopTrial) -> None:
        """Call the function with a trial whose `suggest_*` methods return the trial's configuration."""
        type(self).function(_ReplayTrial(trial))


class _ReplayTrial:
    """Trial whose `suggest_*` methods return the values of its configuration."""

    def __init__(self, trial: LoopTrial) -> None:
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("suggest_"):
            return getattr(self._trial, name)
        return self._get_value

    def _get_value(self, parameter: str, *_arguments: Any, **_settings: Any) -> Any:
        if parameter not in self._trial.config:
            raise ObjectiveError(f"{parameter!r} is suggested too late; suggest all parameters before trial.epochs()")
        return self._trial.config[parameter]


@cache
def wrap_function(function: Callable[[Any], None]) -> type[FunctionObjective]:
    """Wrap a function `main(trial)` in an objective class; the result is cached.

    Raises:
        ObjectiveError: the function cannot be called with one argument, or is a coroutine or a generator.
    """
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ObjectiveError(
            f"{function.__name__} must accept one argument, the trial; write def {function.__name__}(trial)"
        ) from error
    if is_coroutine_or_generator(function):
        raise ObjectiveError(format_not_executed(function.__name__))
    names = ("metric", "direction", "directions", "constraints", "epochs", "n_trials")
    given = {name: getattr(function, name) for name in names if hasattr(function, name)}
    parts = {"name": function.__name__, "function": staticmethod(function), "__module__": function.__module__}
    return type(function.__name__, (FunctionObjective,), {**parts, **given})


@dataclass(frozen=True)
class RestoredLoop:
    """Best state of a custom training loop, with its objective and configuration."""

    objective: LoopObjective
    config: Any
    best: Any
    seed: int
    split_seed: int

    def test(self) -> dict[str, float]:
        """Return the scores of the objective's `test` on the test set. Call this method only once per study."""
        import torch

        from hpsearch.objectives.training.reproducibility.seeds import make_reproducible, set_seed

        objective, owner = self.objective, type(self.objective).__name__
        with wrap_user_errors(f"{owner}.test"), make_reproducible(deterministic=False):
            set_seed(self.seed, "test")
            found = objective.test(self.best, self.config, torch.device("cpu"), self.split_seed)
            scores = {str(name): float(value) for name, value in found.items()}
        if objective.metric not in scores:
            hint = suggest_names(objective.metric, list(scores))
            raise MetricError(objective.metric, f"is missing in the result of {owner}.test; {hint}")
        return scores


def restore_loop(objective: LoopObjective, best: Mapping[str, Any]) -> RestoredLoop:
    """Restore the best state of a custom loop from the content of the file `best.pt`.

    Raises:
        ObjectiveError: the objective has no `test`.
    """
    if isinstance(objective, FunctionObjective):
        raise ObjectiveError(
            f"{objective.name} is a function without test(); move the code to run() of a LoopObjective that has test()"
        )
    if not objective.defines("test"):
        raise ObjectiveError(f"{objective.name} has no test(); define test() to evaluate a trial on the test set")
    config = config_from_json(objective, best["config"])
    return RestoredLoop(objective, config, best["model"], best["seed"], best["split_seed"])


def config_from_json(objective: LoopObjective, values: Mapping[str, Any]) -> Any:
    """Convert JSON values to a configuration of the class that the objective's `suggest` returns."""
    config_class: Any = type(objective.default_config())
    is_dataclass = dataclasses.is_dataclass(config_class)
    return config_class(**values) if is_dataclass else dict(values)
