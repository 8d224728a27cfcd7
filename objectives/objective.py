"""`Objective`: the search space, the data, the model, and how a trial is judged."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest, users_code
from hpsearch.objectives.measured import MEASURED
from hpsearch.objectives.search_space import Given

if TYPE_CHECKING:
    from torch import nn

    from hpsearch.objectives.search_space import SearchSpace
    from hpsearch.objectives.training.config import TrainConfig
    from hpsearch.objectives.training.data.dataset import Batch, Dataset
    from hpsearch.objectives.training.data.loader import Augment
    from hpsearch.objectives.training.data.samplers import Sampler
    from hpsearch.objectives.training.data.splits import Splits
    from hpsearch.objectives.training.evaluation.metrics import Metrics
    from hpsearch.objectives.training.evaluation.step import Step


def _source_digest(cls: type) -> str:
    try:
        source = inspect.getsource(inspect.getmodule(cls) or cls)
    except (TypeError, OSError):  # a class made in a console has none
        source = cls.__qualname__
    return hashlib.sha256(source.encode()).hexdigest()[:12]


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
        """The folder that `prepare` filled on this machine; filled now, where it was not.

        It is in `prepared` of $HPSEARCH_HOME, else of the user's cache, by the objective's name and its source.

        Raises:
            ObjectiveError: `prepare` failed.
        """
        import platformdirs
        from filelock import FileLock

        home = os.environ.get("HPSEARCH_HOME") or platformdirs.user_cache_dir("hpsearch")
        folder = Path(home).expanduser() / "prepared" / f"{self.name}-{_source_digest(type(self))}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished = folder.with_name(f"{folder.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                with users_code(f"{type(self).__name__}.prepare"):
                    self.prepare(unfinished)
                unfinished.rename(folder)
        return folder


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


def overrides(objective: Objective, method: str) -> bool:
    """Return whether the objective's class overrides a method of `Objective`."""
    return getattr(type(objective), method) is not getattr(Objective, method)


class Objective(BaseObjective):
    """One learning problem: subclass it, fill in `suggest`, `data` and `model`, and search.

    Attributes:
        name: what it is called in studies; the class's name unless given.
        metric: the validation metric to optimise: a key of `metrics()`, or "loss".
        direction: whether the metric is better when it is higher or lower.
        directions: several metrics that a study is to optimise at once, each with its direction: the first of them is
            `metric`, and any other may be one of validation, of `objectives.measured.MEASURED`, or of `measures`.
        constraints: what a trial has to keep to, by metric, as `{"model_mb": "<= 10"}`.
        reported: what beside `metric` the study asks every epoch to report: see `also_report`.
        epochs: length of a full trial, the default of a search.
        n_trials: number of trials, the default of a search.
        defaults: values of parameters that `suggest` asks for, a fair start: what the first trial of a search runs.
        loss_floor: what the loss of a batch that is fitted comes close to, for the smoke test; None where nobody knows,
            as of a VAE's bound or of a density.
        latency_batch: samples in the forward pass whose time `latency_ms` is.

    Example:
        >>> class Wine(Objective):
        ...     def suggest(self, trial):
        ...         return TrainConfig(lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
        ...     def data(self, seed):
        ...         x, y = load_wine(return_X_y=True)
        ...         return Splits.make(x, y, seed=seed)
        ...     def model(self, config, train):
        ...         return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 3))
    """

    loss_floor: ClassVar[float | None] = 0.0
    latency_batch: ClassVar[int] = 1

    @abstractmethod
    def suggest(self, trial: SearchSpace) -> TrainConfig:
        """The configuration of one trial, from the values that the trial suggests."""

    @abstractmethod
    def data(self, seed: int) -> Splits:
        """Train, validation and test data: a pure function of the data and the study's seed."""

    @abstractmethod
    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """The network, from raw inputs [n, ...] to outputs [n, ...].

        It sees the training split only, so that statistics can be fitted nowhere else; as buffers they travel in
        checkpoints and exported models: `nn.Sequential(Standardize.fit(train.x), net)`. No Python branch may depend
        on the batch size, or the model does not export.
        """

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """The training loss: (output, target) -> a loss per sample [n], or their mean.

        Unless overridden it follows from `metric`: squared error for rmse, mae and r2; binary cross entropy, of one
        logit or two, for auroc and average_precision; cross entropy over logits [n, classes] where targets are
        classes; the configuration's label smoothing is in both of the latter.

        A mean that is not over samples (of the tokens that count, say) is one whose batches do not add up, unless the
        module says what it is over by a method `weigh(target)`; torch's cross entropies need none.
        """
        from hpsearch.objectives.training.evaluation.losses import usual_loss

        return usual_loss(self.metric, train.y, label_smoothing=config.label_smoothing)

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        """What a batch comes to; override it where that is not the loss of the outputs and the targets.

        It is called to train and, in evaluation mode and without gradients, to judge. Accumulation, mixed precision,
        clipping, SAM, averages and guards hold for it as for any other. `loss` is not called then.

        Args:
            model: what `model()` gave, or an average of its weights; in training or in evaluation mode.
            batch: `x` and `y` on the model's device, and their `size`.
            config: the trial's.

        Example:
            >>> def step(self, model, batch, config):
            ...     decoded, mean, log_var = model(batch.x)
            ...     fit = functional.mse_loss(decoded, batch.x, reduction="none").flatten(1).sum(dim=1)
            ...     kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(dim=1)
            ...     return Step(fit + kl, metrics={"kl": kl.mean()})
        """
        raise NotImplementedError

    def parameter_groups(self, model: nn.Module, config: TrainConfig) -> list[dict[str, Any]] | None:  # noqa: ARG002 for those who override it
        """The optimizer's parameter groups; None, unless overridden, for the usual ones.

        Each is a dictionary with `params` and, where they are not the configuration's, `lr`, `weight_decay` and a
        `name`. Schedules move all rates alike.
        """
        return None

    def sampler(self, config: TrainConfig, train: Dataset) -> Sampler | None:  # noqa: ARG002 for those who override it
        """What draws the order of an epoch: a torch sampler of rows, such as `WeightedRandomSampler`, or of batches of
        rows, such as `ByLength`; None, unless overridden, for each sample once, at random.

        It draws from torch's global generator, which is seeded for each epoch, and has a length.
        """
        return None

    def on_epoch(self, model: nn.Module, epoch: int, config: TrainConfig) -> None:
        """Before each epoch (0-based): to thaw layers, or to change what the model does as it goes on.

        A run that is resumed repeats the calls of the epochs before, on the initial weights.
        """

    def augment(self, config: TrainConfig) -> Augment | None:  # noqa: ARG002 - for those who override it
        """What changes a batch of training inputs [n, ...] at random; nothing unless overridden.

        Draw from torch's, numpy's or Python's global generators: they are seeded for it, so that runs repeat. With
        `TrainConfig.num_workers` it runs in processes of its own, on the CPU; else on the device.
        """
        return None

    def metrics(self, train: Dataset) -> Metrics:
        """The validation metrics, `metric` among them; by default the usual set that `metric` belongs to.

        Any object with `update`, `compute` and `reset` will do, such as a torchmetrics `Metric` or `MetricCollection`.
        What `step` measures needs none.
        """
        from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS, NoMetrics, metrics_for

        if overrides(self, "step") and (self.metric == "loss" or self.metric not in DIRECTIONS):
            return NoMetrics()
        return metrics_for(self.metric, train)

    def measures(self, model: nn.Module, config: TrainConfig) -> Mapping[str, float]:  # noqa: ARG002 for those who override it
        """Numbers of your own about a model, by name, after each epoch: operations, sparsity, robustness.

        They are reported under these names, and a study may optimise or bound them. One that is not finite ends the
        trial as a loss does that is not.

        Args:
            model: the one that is judged, on its device, in evaluation mode; no gradients are kept.
            config: the trial's.

        Example:
            >>> def measures(self, model, config):
            ...     weights = torch.cat([weight.flatten() for weight in model.parameters()])
            ...     return {"sparsity": float((weights.abs() < 1e-3).float().mean())}
        """
        return {}

    def judge_by(self, metric: str, direction: Literal["maximize", "minimize"]) -> None:
        """Optimise another metric than the class names, as a study may say.

        Raises:
            MetricError: the built-in sets have no such metric.
            ObjectiveError: it is better the other way round.
        """
        from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS, chooses_none

        if not overrides(self, "metrics") and not overrides(self, "step") and metric in MEASURED:
            raise chooses_none(metric)
        if not overrides(self, "metrics") and not (overrides(self, "step") and metric not in DIRECTIONS):
            if metric not in DIRECTIONS:
                raise MetricError(metric, f"is not known: {nearest(metric, list(DIRECTIONS))}")
            if direction != DIRECTIONS[metric]:
                raise ObjectiveError(f"direction {direction!r} is wrong for {metric}: use {DIRECTIONS[metric]!r}")
        super().judge_by(metric, direction)

    def also_report(self, names: Collection[str]) -> None:
        """Report in every epoch, beside `metric`, what a study asks for: what it optimises, and what it bounds.

        Raises:
            MetricError: a name is none of the built-in set that `metric` brings, and nothing that is measured. Of
                metrics, steps and measures of one's own the first evaluation tells.
        """
        from hpsearch.objectives.training.evaluation.metrics import brought_with

        super().also_report(names)
        if overrides(self, "metrics") or overrides(self, "step") or overrides(self, "measures"):
            return
        known = [*brought_with(self.metric), *MEASURED]
        for name in self.reported:
            if name not in known:
                why = f"is none that comes with {self.metric}, nor measured: {nearest(name, known)}"
                raise MetricError(name, f"{why}; or give it by metrics()")

    def default_config(self) -> TrainConfig:
        """A configuration that is a fair start without any search: `defaults`, else the middle of the search space.

        Raises:
            ObjectiveError: `suggest` failed.
        """
        config: TrainConfig = super().default_config()
        return config

    def configure(self, trial: SearchSpace) -> TrainConfig:
        """`suggest`, with its answer checked.

        Raises:
            ObjectiveError: `suggest` returned something else than a TrainConfig.
        """
        from hpsearch.objectives.training.config import TrainConfig

        config = self.suggest(trial)
        if not isinstance(config, TrainConfig):
            raise ObjectiveError(
                f"{type(self).__name__}.suggest must return a TrainConfig, not {type(config).__name__}"
            )
        return config
