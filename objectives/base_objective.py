"""`BaseObjective`: search space, metric and prepared files of a learning problem, whatever its training loop."""

from __future__ import annotations

import hashlib
import inspect
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpsearch.objectives.errors import MetricError, ObjectiveError, wrap_user_errors
from hpsearch.objectives.private_folders import open_private_folder
from hpsearch.objectives.search_space import FixedTrial

if TYPE_CHECKING:
    from hpsearch.objectives.search_space import TrialProtocol


def _compute_source_digest(cls: type) -> str:
    try:
        source = inspect.getsource(inspect.getmodule(cls) or cls)
    except (TypeError, OSError):  # a class that was defined in a console has no source
        source = cls.__qualname__
    return hashlib.sha256(source.encode()).hexdigest()[:12]


class BaseObjective(ABC):
    """Base class of `Objective` (trained by hpsearch's loop) and `LoopObjective` (with a custom training loop).

    Attributes:
        name: name in studies; the class name by default.
        metric: the validation metric to optimize.
        direction: "maximize" or "minimize".
        directions: direction by metric, for a multi-objective study. The first metric is also `metric`, which selects
            the best epoch. Empty for a study with one metric.
        constraints: bounds by metric, such as `{"model_mb": "<= 10"}`. A trial that violates a bound is infeasible.
        reported: metrics in addition to `metric` that every epoch must report; `set_reported_metrics` sets them.
        epochs: default number of epochs of a full trial.
        n_trials: default number of trials of a search.
        defaults: parameter values of the first trial of a search.
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
        """Set the name of a subclass that defines no name, and set `metric` and `direction` from `directions`.

        Raises:
            ObjectiveError: `directions` is invalid, or its first metric differs from `metric`.
        """
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        if cls.directions:
            _set_metric_from_directions(cls)

    @abstractmethod
    def suggest(self, trial: TrialProtocol) -> Any:
        """Return the configuration of one trial, built from values that `trial.suggest_*` returns."""

    def configure(self, trial: TrialProtocol) -> Any:
        """Call `suggest` and check its result.

        Raises:
            ObjectiveError: the result is not a configuration.
        """
        return self.suggest(trial)

    def default_config(self) -> Any:
        """Return the configuration of `defaults`; parameters without a default get the midpoint of their range.

        Raises:
            ObjectiveError: `suggest` raised an error.
        """
        with wrap_user_errors(f"{type(self).__name__}.suggest"):
            return self.configure(FixedTrial(self.defaults))

    def set_metric(self, metric: str, direction: Literal["maximize", "minimize"]) -> None:
        """Set the metric that the study optimizes.

        Raises:
            MetricError: the objective does not report the metric.
            ObjectiveError: the direction is wrong for the metric.
        """
        check_metric_prefix(metric)
        self.metric, self.direction = metric, direction

    def set_reported_metrics(self, names: Collection[str]) -> None:
        """Set the additional metrics that every epoch must report: the metrics that the study optimizes or bounds.

        Call this method after `set_metric`. The record of each epoch contains these metrics. If this method cannot
        detect a missing metric, the first evaluation detects it before training.

        Raises:
            MetricError: the objective cannot report one of the metrics.
        """
        self.reported = tuple(name for name in dict.fromkeys(names) if name != self.metric)

    def prepare(self, folder: Path) -> None:  # noqa: B027 nothing unless overridden
        """Download data or compute slow features into `folder`, once per machine.

        hpsearch calls `prepare` before `data`, and again if the source file of the objective changes. Other processes
        wait until it returns. If the process is killed, the next call starts with an empty folder.
        """

    @property
    def prepared(self) -> Path:
        """Folder with the files that `prepare` wrote; the first access on a machine calls `prepare`.

        The folder is `prepared/NAME-HASH` in $HPSEARCH_HOME, or in the user's cache folder if this variable is not set.
        HASH depends on the source file.

        Raises:
            ObjectiveError: `prepare` raised an error, or the folder belongs to another user.
        """
        from filelock import FileLock

        folder = open_private_folder("prepared") / f"{self.name}-{_compute_source_digest(type(self))}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished = folder.with_name(f"{folder.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                with wrap_user_errors(f"{type(self).__name__}.prepare"):
                    self.prepare(unfinished)
                unfinished.rename(folder)
        return folder


def check_metric_prefix(metric: str) -> None:
    """Check that the name of a metric has no prefix that is reserved for MLflow.

    Raises:
        MetricError: the metric has a prefix.
    """
    for prefix, remedy in (("val_", f"use {metric[4:]!r}"), ("train_", "report it under another name")):
        if metric.startswith(prefix):
            raise MetricError(metric, f"has the prefix {prefix}, which is reserved for names in MLflow; {remedy}")


def _set_metric_from_directions(cls: type[BaseObjective]) -> None:
    directions = cls.directions
    if not isinstance(directions, Mapping) or not all(isinstance(name, str) and name for name in directions):
        raise ObjectiveError(f"{cls.__name__}.directions must be a dict such as {{'accuracy': 'maximize'}}")
    if bad := [name for name in directions if not name.isprintable()]:
        raise ObjectiveError(f"{cls.__name__}.directions: {bad[0]!r} contains control characters; use another name")
    for name, value in directions.items():
        if value not in ("maximize", "minimize"):
            raise ObjectiveError(f"{cls.__name__}.directions[{name!r}] must be 'maximize' or 'minimize', not {value!r}")
    first, direction = next(iter(directions.items()))
    for field, wanted in (("metric", first), ("direction", direction)):
        given = cls.__dict__.get(field, wanted)
        if given != wanted:
            raise ObjectiveError(
                f"{cls.__name__}.{field} is {given!r}, but the first entry of directions is {first!r}: {direction!r}; "
                f"remove {field}, or put the metric that selects the best epoch first"
            )
    cls.metric, cls.direction = first, direction
