"""Signs of faults that a model shows in evaluation mode: its outputs are random, mixed, leaked or wrong."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import Tree, index_rows, map_tensors, tensors
from hpsearch.objectives.training.evaluation.evaluate import evaluation_mode
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.step_functions import get_forward_call
from hpsearch.objectives.training.reproducibility.seeds import set_seed

_TOLERANCE = 1e-3  # relative difference of outputs from which they count as different; kernels depend on the batch size
_MIN_POSITIONS = 3  # of a sequence
_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
}


def find_dependence_on_inputs(run: Run, batch: Batch) -> str:
    """Return a sign if the outputs depend on no input, or on the other samples of the batch; empty otherwise."""
    half, x = batch.size // 2, batch.x
    flipped = torch.arange(batch.size - 1, -1, -1)
    if half < 1:
        return ""
    try:
        outputs, repeated = _predict(run, x), _predict(run, x, purpose="again")
        of_half, of_flipped = _predict(run, index_rows(x, slice(half))), _predict(run, index_rows(x, flipped))
    except Exception:  # of the user's model: a custom step may call it with other inputs
        return ""
    if any(len(output) != batch.size for output in (outputs, repeated, of_flipped)):
        return ""
    if torch.equal(outputs, of_flipped) and not torch.equal(outputs[0], outputs[-1]):
        return "the outputs of the model do not depend on its inputs"
    if _differ(outputs, repeated):
        return ""  # random outputs
    if _differ(outputs[:half], of_half):
        return "in evaluation mode, the output of a sample depends on the other samples of its batch"
    return ""


def find_active_dropout(run: Run, batch: Batch) -> str:
    """Return a sign if dropout is active in evaluation mode; empty otherwise."""
    with _DropoutDetector() as detector:
        compute_evaluation_loss(run, batch)
    if detector.found is None:
        return ""
    remedy = "dropout_p=p if self.training else 0.0" if detector.found == _ATTENTION else "training=self.training"
    return f"in evaluation mode, {detector.found}() drops values at random; pass {remedy}"


def find_visible_targets(run: Run, batch: Batch) -> str:
    """Return a sign if a model that predicts the next element of a sequence depends on this element.

    The targets are the inputs one position later, and the last input changes the outputs of earlier positions.
    """
    y = batch.y
    if not isinstance(y, Tensor) or y.ndim < 2 or y.shape[1] < _MIN_POSITIONS or not _has_later_inputs(batch):
        return ""
    first_changed = torch.cat([y[:, :1].roll(1, 0), y[:, 1:]], dim=1)
    if compute_evaluation_loss(run, batch) == compute_evaluation_loss(run, batch._replace(y=first_changed)):
        return ""  # the loss does not use the targets of earlier positions
    changed = map_tensors(lambda tensor: _change_last(tensor) if _is_earlier(tensor, y) else tensor, batch.x)
    try:
        outputs, repeated, of_changed = _predict(run, batch.x), _predict(run, batch.x), _predict(run, changed)
    except Exception:  # of the user's model: a custom step may call it with other inputs
        return ""
    axes = [axis for axis in range(1, min(outputs.ndim, 3)) if outputs.shape[axis] == y.shape[1]]
    if len(axes) != 1 or _differ(outputs, repeated) or outputs.shape != of_changed.shape:
        return ""
    earlier = [output.narrow(axes[0], 0, y.shape[1] - 1) for output in (outputs, of_changed)]
    if not _differ(*earlier):
        return ""
    return "the outputs depend on later inputs, which are the targets: use a causal mask"


@torch.no_grad()
def find_evaluation_gap(run: Run, batch: Batch, before: float, floor: float | None) -> str:
    """Return a sign if the loss of the fitted batch has not fallen in evaluation mode; empty otherwise.

    It must fall by half of its excess over `floor`, or below `before` if the floor is unknown.

    The function changes the running statistics of batch norm to those of the batch, because few steps do not suffice.

    Args:
        run: the run, after the batch was fitted in training mode.
        batch: the batch.
        before: loss of the batch in evaluation mode, before the first step.
        floor: the loss that a perfectly fitted batch approaches; None if unknown.
    """
    for module in run.model.modules():
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            return ""  # the statistics of the samples differ from their mean
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
    run.model.train()
    one, other = (_compute_training_loss(run, batch, purpose) for purpose in ("step", "other step"))
    if one != other or not math.isfinite(before):
        return ""  # a random loss, whose numbers the model may have learned
    after = compute_evaluation_loss(run, batch)
    if after < (before if floor is None or before <= floor else (before + floor) / 2):
        return ""
    return (
        f"in evaluation mode, the loss of the batch was {before:.4g} and is {after:.4g}, although it fell to {one:.4g} "
        "in training mode"
    )


def compute_evaluation_loss(run: Run, batch: Batch) -> float:
    """Return the loss of the batch in evaluation mode; NaN if the step accepts training samples in training only."""
    try:
        with evaluation_mode(run.model, run.device, "evaluation"):
            return float(run.step_function(run.model, batch, nullcontext()).loss)
    except Exception:  # of the user's step, which may use other samples for the evaluation
        return math.nan


def _compute_training_loss(run: Run, batch: Batch, purpose: str) -> float:
    set_seed(run.plan.seed, "smoke", purpose)
    return float(run.step_function(run.model, batch, nullcontext()).loss)


_ATTENTION = "scaled_dot_product_attention"
_DROPOUT_P = 4  # position of dropout_p among its arguments


class _DropoutDetector(TorchFunctionMode):
    """Detector of calls that drop values at random.

    Attributes:
        found: name of the last function that dropped values; None if there was none.
    """

    found: str | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _drops_values(func, args, kwargs or {}):
            self.found = func.__name__
        return func(*args, **(kwargs or {}))


def _drops_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if func is functional.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[_DROPOUT_P] if len(args) > _DROPOUT_P else 0.0))
    if func not in _DROPOUTS:
        return False
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    return bool(given.arguments["training"]) and given.arguments["p"] > 0


def _has_later_inputs(batch: Batch) -> bool:
    return any(_is_earlier(tensor, batch.y) for _, tensor in tensors(batch.x))


def _is_earlier(tensor: Tensor, y: Any) -> bool:
    """Return whether the targets `y` [n, positions, ...] are the inputs [n, positions, ...] one position later."""
    if tensor.shape != y.shape or tensor.dtype != y.dtype:
        return False
    later, targets = tensor[:, 1:], y[:, :-1]
    is_ignored = targets < 0 if not y.dtype.is_floating_point else torch.zeros_like(targets, dtype=torch.bool)
    return bool((is_ignored | (later == targets)).all()) and not bool((is_ignored | (targets == targets[:1])).all())


def _change_last(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:, :-1], tensor[:, -1:].roll(1, 0)], dim=1)


def _predict(run: Run, x: Tree, purpose: str = "evaluation") -> Tensor:
    with evaluation_mode(run.model, run.device, purpose):
        found = [tensor for _, tensor in tensors(get_forward_call(run.step_function)(run.model, x))]
    return found[0].float()


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = max(float(one.abs().max()), 1e-12)
    return float((one - other).abs().max()) > _TOLERANCE * scale
