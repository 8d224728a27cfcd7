"""Weight averages for evaluation: exponential over steps (EMA) or equal over the last epochs (SWA)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from hpsearch.objectives.errors import explain_copy_errors
from hpsearch.objectives.training.config import TrainConfig


class WeightAveraging:
    """Base class of weight averages. It averages nothing: the model itself is evaluated."""

    average: AveragedModel | None = None

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and saved."""
        return self._model if self.average is None else self.average.module

    @property
    def models(self) -> list[nn.Module]:
        """The averaged model as a list, which is empty without averaging."""
        return [] if self.average is None else [self.average.module]

    def after_step(self) -> None:
        """Update the average after an optimizer step."""

    def after_epoch(self, epoch: int, inputs: Callable[[], Any], call: Callable[[nn.Module, Any], Any]) -> None:
        """Update the average before the validation of an epoch (0-based); `call` runs a model on `inputs`."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the average; None without averaging."""
        return None if self.average is None else self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        if self.average is not None:
            self.average.load_state_dict(state)


class _EMA(WeightAveraging):
    """The exponential moving average of a model's weights, with the model's current buffers.

    The decay is min(decay, (1 + n) / (10 + n)) after n updates, so that the initial weights do not dominate a short
    run.
    """

    average: AveragedModel

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)

        @torch.no_grad()
        def update(averages: Sequence[Tensor], current: Sequence[Tensor], count: Tensor | int) -> None:
            steps = int(count)  # `count` is on the CPU, so that reading it does not synchronize with the GPU
            torch._foreach_lerp_(list(averages), list(current), 1 - min(decay, (1 + steps) / (10 + steps)))

        self.average = AveragedModel(model, multi_avg_fn=update)

    def after_step(self) -> None:
        self.average.update_parameters(self._model)


class _SWA(WeightAveraging):
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights at the ends of epochs.

    Before epoch `first` the model itself is evaluated. Batch norm statistics are recomputed for the averaged weights.
    """

    average: AveragedModel

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__(model)
        self.first = first
        self.average = AveragedModel(model)

    @property
    def eval_model(self) -> nn.Module:
        return self.average.module if int(self.average.n_averaged) else self._model

    def after_epoch(self, epoch: int, inputs: Callable[[], Any], call: Callable[[nn.Module, Any], Any]) -> None:
        if epoch >= self.first:
            self.average.update_parameters(self._model)
            update_bn(([x] for x in inputs()), _CallAdapter(self.average, call))


class _CallAdapter(nn.Module):
    """A module that passes a batch of any structure to a model."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: Any) -> Any:
        return self.call(self.model, x)


def build_average(model: nn.Module, config: TrainConfig, epochs: int) -> WeightAveraging:
    """Return the configured weight average for a run of `epochs` epochs.

    Raises:
        ObjectiveError: the model cannot be copied.
    """
    with explain_copy_errors("ema_decay" if config.ema_decay is not None else "swa_fraction"):
        if config.ema_decay is not None:
            return _EMA(model, config.ema_decay)
        if config.swa_fraction is not None:
            return _SWA(model, first=min(round(epochs * (1 - config.swa_fraction)), epochs - 1))
        return WeightAveraging(model)
