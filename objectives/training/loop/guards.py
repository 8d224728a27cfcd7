"""Errors that end a run: non-finite losses or gradients, and insufficient device memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError, get_first_line, is_out_of_memory
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks

if TYPE_CHECKING:
    from hpsearch.objectives.training.config import TrainConfig


class NonFiniteError(RuntimeError):
    """Error for a loss, gradient or metric that is NaN or infinite, mostly because the configuration diverges.

    Attributes:
        epoch: epoch (0-based).
        step: optimizer step (0-based) since the start of the run; None in a custom loop.
        batch: optimizer step (0-based) within the epoch; None for a value of the validation.
        lr: learning rate of the step; None in a custom loop.
        grad_norm: gradient norm of the step before clipping; None for a value of the validation.
        val_loss: validation loss, if it is finite although a metric is not, so that the training has not diverged.
    """

    def __init__(
        self,
        what: str,
        *,
        epoch: int,
        step: int | None = None,
        lr: float | None = None,
        grad_norm: float | None = None,
        batch: int | None = None,
        val_loss: float | None = None,
    ) -> None:
        self.epoch, self.step, self.batch, self.lr, self.grad_norm = epoch, step, batch, lr, grad_norm
        counts = {"step": step, "batch": batch}
        sizes = {"learning rate": lr, "gradient norm": grad_norm}
        where = [f"epoch {epoch + 1}", *(f"{name} {count}" for name, count in counts.items() if count is not None)]
        by = ", ".join(f"{name} {size:.4g}" for name, size in sizes.items() if size is not None)
        finite = "" if val_loss is None else f", although val_loss is {val_loss:.4g}"
        super().__init__(f"{what} at {', '.join(where)}" + (f": {by}" if by else "") + finite)


class DeviceMemoryError(RuntimeError):
    """Error for a device with too little memory for the configuration.

    Attributes:
        config: the configuration that does not fit; None in a custom loop.
        device: the device's name.
    """

    def __init__(self, config: TrainConfig | None, device: torch.device, detail: str) -> None:
        self.config, self.device = config, str(device)
        setting = "" if config is None else f" with batch_size {config.batch_size} and model {config.model}"
        super().__init__(f"out of memory on {device}{setting}: {detail}")


@contextmanager
def translate_torch_errors(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Convert general errors of PyTorch to errors about the configuration.

    Raises:
        DeviceMemoryError: the memory of the device is exhausted.
        ObjectiveError: an operation has no deterministic kernel, which the configuration requires; a gradient is
            sparse; the loss depends on no trainable parameter, or on tensors of an earlier step; an operation changes
            a tensor that the backward pass needs; or a batch is too small for batch norm.
    """
    try:
        yield
    except (RuntimeError, ValueError, MemoryError) as error:
        first = get_first_line(error)
        if is_out_of_memory(error):
            raise DeviceMemoryError(config, device, first) from error
        operation, found, _ = first.partition(" does not have a deterministic implementation")
        if found:
            raise ObjectiveError(f"{operation}{found}; set deterministic=False in the TrainConfig") from error
        if "with arguments from the 'Sparse" in first:
            raise ObjectiveError(
                "the model has sparse gradients, which are not supported; set sparse=False in its embeddings"
            ) from error
        if "does not require grad and does not have a grad_fn" in first:
            raise ObjectiveError(
                "the loss depends on no trainable parameter: it is detached, computed without gradients, or all "
                "parameters are frozen"
            ) from error
        if "backward through the graph a second time" in first:
            raise ObjectiveError(
                "the loss depends on tensors of an earlier step, or step() has called backward(); call detach() on "
                "tensors that the model stores, such as a hidden state, or remove the call of backward()"
            ) from error
        if "has been modified by an inplace operation" in first:
            raise ObjectiveError(
                "an in-place operation changes a tensor that the backward pass needs; replace operations such as "
                "h += 1 by h = h + 1, and ReLU(inplace=True) by ReLU()"
            ) from error
        if "Expected more than 1 value per channel when training" in first:
            raise ObjectiveError(
                "a training batch has one value per channel, which batch norm cannot normalize; use a batch_size of 2 "
                "or more with drop_last=True, or another kind of norm"
            ) from error
        raise


class StepPosition(NamedTuple):
    """Position of an optimizer step in the run (`step`) and in the epoch (`batch`), with its learning rate."""

    epoch: int
    step: int
    batch: int
    lr: float


class FiniteGuard:
    """Check that ends a run at the first step whose loss or gradient norm is not finite.

    On a CPU every step is checked before the optimizer runs. On an accelerator, reading a value waits for the device,
    so steps are checked in groups of `every` and at the end of the epoch, before anything is validated, saved or
    reported. The error contains the position of the first step that is not finite, and the ranks that caused it.
    """

    def __init__(
        self, device: torch.device, ranks: Ranks = SINGLE_PROCESS, *, every: int = 16, max_skipped: int = 10
    ) -> None:
        self._ranks = ranks
        self._every = 1 if device.type == "cpu" else every
        self._max_skipped = max_skipped
        self._pending: list[tuple[StepPosition, Tensor, Tensor, Tensor]] = []
        self.skipped = 0  # consecutive steps that loss scaling skipped; saved in checkpoints
        self.skipped_in_all = 0

    def check(
        self, point: StepPosition, loss: Tensor, grad_norm: Tensor, own_loss: Tensor | None = None, *, scaled: bool
    ) -> None:
        """Check a step, or store it for a later check.

        Args:
            point: position of the step.
            loss: loss of the step, a scalar on the device.
            grad_norm: gradient norm before clipping, a scalar on the device.
            own_loss: this rank's part of the loss, a scalar on the device; None if it is the loss.
            scaled: whether loss scaling is used; then an infinite gradient only skips the step.

        Raises:
            NonFiniteError: the loss or the gradient norm of this or an earlier step is not finite.
        """
        if self._every == 1 and math.isfinite(loss) and (scaled or math.isfinite(grad_norm)):
            return
        norm = torch.zeros_like(grad_norm) if scaled else grad_norm.detach()
        self._pending.append((point, loss.detach(), norm, (loss if own_loss is None else own_loss).detach()))
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Check the stored steps.

        Raises:
            NonFiniteError: the loss or the gradient norm of a step is not finite.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        values = torch.stack([torch.stack([v.double() for v in scalars]) for _, *scalars in pending]).tolist()
        for (point, *_), (loss, norm, own_loss) in zip(pending, values, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
                raise NonFiniteError(what + self._describe_ranks(own_loss), grad_norm=norm, **point._asdict())

    def _describe_ranks(self, own_loss: float) -> str:
        """Return the ranks whose part of the loss is not finite, as text. All ranks call this at the same step."""
        is_finite = self._ranks.all_gather_object(math.isfinite(own_loss))
        bad = [str(rank) for rank, finite in enumerate(is_finite) if not finite]
        if not 0 < len(bad) < self._ranks.world_size:
            return ""
        return f" on rank{'s' if len(bad) > 1 else ''} {', '.join(bad)}"

    def count(self, point: StepPosition, grad_norm: Tensor, *, stepped: bool) -> None:
        """Count consecutive steps that loss scaling skipped.

        Raises:
            NonFiniteError: `max_skipped` consecutive steps were skipped.
        """
        self.skipped = 0 if stepped else self.skipped + 1
        self.skipped_in_all += not stepped
        if self.skipped >= self._max_skipped:
            what = f"{self.skipped} consecutive steps had an infinite gradient"
            raise NonFiniteError(what, grad_norm=float(grad_norm), **point._asdict())
