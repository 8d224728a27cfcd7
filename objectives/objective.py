"""`Objective`: search space, data, model and metrics of a learning problem."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import MetricError, ObjectiveError, suggest_names
from hpsearch.objectives.model_metric_names import MODEL_METRICS

if TYPE_CHECKING:
    from torch import nn

    from hpsearch.objectives.search_space import TrialProtocol
    from hpsearch.objectives.training.config import TrainConfig
    from hpsearch.objectives.training.data.dataset import Batch, Dataset
    from hpsearch.objectives.training.data.loader import Augment
    from hpsearch.objectives.training.data.samplers import Sampler
    from hpsearch.objectives.training.data.splits import Splits
    from hpsearch.objectives.training.data.tree import Tree
    from hpsearch.objectives.training.evaluation.metrics import Metrics
    from hpsearch.objectives.training.evaluation.step import Step


def overrides(objective: Objective, method: str) -> bool:
    """Return whether the objective's class overrides a method of `Objective`."""
    return getattr(type(objective), method) is not getattr(Objective, method)


class Objective(BaseObjective):
    """A learning problem. Subclass it and define `suggest`, `data` and `model`.

    Attributes:
        name: name in studies; the class name by default.
        metric: the validation metric to optimize: a metric of `metrics()`, `evaluate()` or `step`, or "loss".
        direction: "maximize" or "minimize".
        directions: direction by metric, for a multi-objective study. The first metric is also `metric`, which selects
            the best epoch. The further metrics are validation metrics, metrics of `model_metrics()`, or the built-in
            metrics `latency_ms`, `model_mb`, `parameters` and `peak_memory_mb`.
        constraints: bounds by metric, such as `{"model_mb": "<= 10"}`. A trial that violates a bound is infeasible.
        reported: metrics in addition to `metric` that every epoch must report; `set_reported_metrics` sets them.
        epochs: default number of epochs of a full trial.
        n_trials: default number of trials of a search.
        defaults: parameter values of the first trial of a search.
        loss_floor: the loss that a perfectly fitted batch approaches, for the smoke test; None if unknown, for example
            for the ELBO of a VAE.
        latency_batch: number of samples in the forward pass that `latency_ms` measures.
        bounds: smallest and largest possible value of `metric`, each None if there is none; they limit the prediction
            interval of finalists. The bounds of built-in metrics are known.
        ignored_leaks: signs of leakage that are intended: `shared_samples`, `near_duplicates`, `target_in_features`.

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
    bounds: ClassVar[tuple[float | None, float | None]] = (None, None)
    ignored_leaks: ClassVar[Collection[str]] = ()

    @abstractmethod
    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """Return the configuration of one trial, from values that `trial.suggest_*` returns."""

    @abstractmethod
    def data(self, seed: int) -> Splits:
        """Return training, validation and test data. The result must depend only on the data and the seed.

        torch computes with one thread meanwhile, so that the result does not depend on the number of workers. Do slow
        preprocessing in `prepare`, which runs once per machine.
        """

    @abstractmethod
    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return the network, which maps raw inputs [n, ...] to outputs [n, ...].

        Fit preprocessing statistics on `train` and store them as buffers, so that checkpoints and exported models
        contain them: `nn.Sequential(Standardize.fit(train.x), net)`. `torch.export` requires that no Python branch
        depends on the batch size.
        """

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return the training loss: a module from (output, target) to one loss per sample [n], or to the mean loss.

        The default depends on `metric`: squared error for rmse, mae and r2; binary cross entropy on one or two logits
        for auroc and average_precision; cross entropy on logits [n, classes] for class labels. Both cross entropies use
        `config.label_smoothing`.

        If the module returns a mean that is not over samples but, for example, over unmasked tokens, give it a method
        `weigh(target)` that returns the divisor of this mean, so that means of batches can be combined. PyTorch's cross
        entropy losses do not need this method.

        Checkpoints contain no state of the loss, so it must not change its buffers.
        """
        from hpsearch.objectives.training.evaluation.losses import build_default_loss

        return build_default_loss(self.metric, train.y, label_smoothing=config.label_smoothing)

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:
        """Compute the loss of a batch. Override it if the loss is not a function of outputs and targets.

        hpsearch calls `step` for training, and in evaluation mode without gradients for evaluation. It does not call
        `loss` if `step` is overridden. Gradient accumulation, mixed precision, clipping, SAM, weight averaging and
        checks for NaN work as usual.

        Args:
            model: the result of `model()`, or a copy with averaged weights; in training or evaluation mode.
            batch: `x` and `y` on the model's device, and the number of samples `size`.
            config: configuration of the trial.

        Example:
            >>> def step(self, model, batch, config):
            ...     decoded, mean, log_var = model(batch.x)
            ...     fit = functional.mse_loss(decoded, batch.x, reduction="none").flatten(1).sum(dim=1)
            ...     kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(dim=1)
            ...     return Step(fit + kl, metrics={"kl": kl.mean()})
        """
        raise NotImplementedError

    def parameter_groups(self, model: nn.Module, config: TrainConfig) -> list[dict[str, Any]] | None:  # noqa: ARG002 used by overrides
        """Return the parameter groups of the optimizer; None for the default groups.

        Each group is a dictionary with `params` and optionally `lr`, `weight_decay` and `name`, which override the
        configuration. Schedules scale the learning rates of all groups by the same factor.
        """
        return None

    def sampler(self, config: TrainConfig, train: Dataset) -> Sampler | None:  # noqa: ARG002 used by overrides
        """Return the sampler of the training data; None for a random permutation of the samples.

        The result is a PyTorch sampler of rows, such as `WeightedRandomSampler`, or of batches of rows, such as
        `LengthGroupedSampler`. The sampler must have a length and use PyTorch's global random generator, which is
        seeded for each epoch.
        """
        return None

    def on_epoch(self, model: nn.Module, epoch: int, config: TrainConfig) -> None:
        """Change the model before an epoch (0-based), for example to unfreeze layers.

        A resumed run repeats the calls for the earlier epochs on the initial weights.
        """

    def augment(self, config: TrainConfig) -> Augment | None:  # noqa: ARG002 used by overrides
        """Return a random augmentation of a batch of training inputs [n, ...]; None for no augmentation.

        Use the global random generators of PyTorch, NumPy or Python, which are seeded so that runs are reproducible. If
        `TrainConfig.num_workers` is set, the augmentation runs in loader processes on the CPU; otherwise on the device.
        """
        return None

    def metrics(self, train: Dataset) -> Metrics:
        """Return the validation metrics, including `metric`. The default is the built-in set that contains `metric`.

        The result is any object with `update`, `compute` and `reset`, such as a torchmetrics `Metric` or
        `MetricCollection`. The metrics that `step` returns are reported in addition.
        """
        from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS, NoMetrics, build_metrics

        is_own = overrides(self, "step") or overrides(self, "evaluate")
        if (self.metric not in DIRECTIONS and is_own) or (self.metric == "loss" and overrides(self, "step")):
            return NoMetrics()
        return build_metrics(self.metric, train)

    def evaluate(self, model: nn.Module, part: Dataset, config: TrainConfig) -> Mapping[str, float]:  # noqa: ARG002 used by overrides
        """Return custom metrics of the model on a whole split by name, for example the quality of generated samples.

        hpsearch calls `evaluate` before the first and after each epoch with the validation split, and in
        `evaluate-test` with the test split. The metrics are reported like those of `metrics()`, and one of them may be
        `metric`. Each call starts with the same random seed; draw random numbers on the CPU, because `serve-check`
        repeats them there. Do not change the model. On several devices, every rank calls `evaluate`, and hpsearch uses
        the result of rank 0.

        Args:
            model: the model that is validated, on its device, in evaluation mode, without gradients.
            part: the split; `part.batches(size, device)` iterates over it. In finalist runs, also halves of the
                validation split: two after each epoch, and random ones at the end.
            config: configuration of the trial.

        Example:
            >>> def evaluate(self, model, part, config):
            ...     device = next(model.parameters()).device
            ...     codes = torch.cat([model(batch.x) for batch in part.batches(256, device)])
            ...     return {"spread": float(codes.std(dim=0).mean())}
        """
        return {}

    def export(self, model: nn.Module, config: TrainConfig) -> tuple[nn.Module, Tree]:
        """Return the module to export and serve, and example inputs for it.

        By default, the model is exported with the inputs of the data. Override this method to serve something else: the
        encoder of an autoencoder, the sampler of a generative model, or a model with postprocessing. `serve-check`
        compares the outputs of the exported module with those of the same module on this machine.

        Args:
            model: the model with its best weights, on the CPU, in evaluation mode.
            config: configuration of the trial.

        Returns:
            The module, and its inputs: a tensor [n, ...], or a dictionary or tuple of tensors, with n of at least 2.
            The exported module accepts other n too.

        Example:
            >>> def export(self, model, config):
            ...     return model.encoder, torch.zeros(2, 64)
        """
        raise NotImplementedError

    def model_metrics(self, model: nn.Module, config: TrainConfig) -> Mapping[str, float]:  # noqa: ARG002 used by overrides
        """Return custom metrics of the model by name, after each epoch, for example its sparsity or robustness.

        The metrics are reported under these names, and a study can optimize or bound them. If a value is NaN or
        infinite, the trial ends as diverged. A call that changes the model is an error.

        Args:
            model: the model that is validated, on its device, in evaluation mode, without gradients.
            config: configuration of the trial.

        Example:
            >>> def model_metrics(self, model, config):
            ...     weights = torch.cat([weight.flatten() for weight in model.parameters()])
            ...     return {"sparsity": float((weights.abs() < 1e-3).float().mean())}
        """
        return {}

    def set_metric(self, metric: str, direction: Literal["maximize", "minimize"]) -> None:
        """Set the metric that the study optimizes.

        Raises:
            MetricError: the metric is unknown, and the objective overrides none of `metrics`, `evaluate` and `step`.
            ObjectiveError: the direction is wrong for the metric.
        """
        from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS, make_selection_metric_error

        is_own = overrides(self, "step") or overrides(self, "evaluate")
        if not overrides(self, "metrics") and not is_own and metric in MODEL_METRICS:
            raise make_selection_metric_error(metric)
        if not overrides(self, "metrics") and not (is_own and metric not in DIRECTIONS):
            if metric not in DIRECTIONS:
                raise MetricError(metric, f"is unknown; {suggest_names(metric, list(DIRECTIONS))}")
            if direction != DIRECTIONS[metric]:
                raise ObjectiveError(f"direction {direction!r} is wrong for {metric!r}; use {DIRECTIONS[metric]!r}")
        super().set_metric(metric, direction)

    def set_reported_metrics(self, names: Collection[str]) -> None:
        """Set the additional metrics that every epoch must report: the metrics that the study optimizes or bounds.

        Raises:
            MetricError: a name is neither in the built-in set of `metric` nor a model metric. If the class overrides
                `metrics`, `evaluate`, `step` or `model_metrics`, the first evaluation checks the names instead.
        """
        from hpsearch.objectives.training.evaluation.metrics import list_default_metrics

        super().set_reported_metrics(names)
        if any(overrides(self, method) for method in ("metrics", "evaluate", "step", "model_metrics")):
            return
        known = [*list_default_metrics(self.metric), *MODEL_METRICS]
        for name in self.reported:
            if name not in known:
                hint = suggest_names(name, known)
                raise MetricError(name, f"is not reported with metric {self.metric!r}; {hint}; or override metrics()")

    def default_config(self) -> TrainConfig:
        """Return the configuration of `defaults`; parameters without a default get the midpoint of their range.

        Raises:
            ObjectiveError: `suggest` raised an error.
        """
        config: TrainConfig = super().default_config()
        return config

    def configure(self, trial: TrialProtocol) -> TrainConfig:
        """Call `suggest` and check its result.

        Raises:
            ObjectiveError: `suggest` does not return a TrainConfig.
        """
        from hpsearch.objectives.training.config import TrainConfig

        config = self.suggest(trial)
        if not isinstance(config, TrainConfig):
            raise ObjectiveError(f"{type(self).__name__}.suggest must return TrainConfig, not {type(config).__name__}")
        return config
