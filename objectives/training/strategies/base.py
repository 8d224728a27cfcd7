"""How a model is distributed over ranks: the interface, one device, and DDP."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.evaluation.step import Step, StepFunction
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.seeds import restore_rng_state, rng_state


class Strategy:
    """The strategy of one process, and the base of the others; `name` is the value of `TrainConfig.strategy`."""

    name: ClassVar[str] = "one process"

    def __init__(self, ranks: Ranks, config: TrainConfig) -> None:
        self._ranks, self._config = ranks, config

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:
        """Before the optimizer is made: gives each rank its part of a model, and of averages of its weights."""

    def set_model(self, model: nn.Module, step_function: StepFunction) -> None:
        """Before the first step, and after all that changes the model's parameters."""
        self._model, self._stepping = model, step_function

    def begin_epoch(self) -> None:
        """Before an epoch: the objective may have frozen layers, or thawed some."""

    def step(self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False) -> Step:  # noqa: ARG002 of several
        """Return the training step of a micro-batch; `more` micro-batches add gradients before the optimizer steps."""
        return self._stepping(self._model, batch, autocast)

    def explain_sharding_errors(self) -> AbstractContextManager[None]:
        """Around code of the objective's that uses the model: says what it may not do with one on several ranks."""
        return nullcontext()

    def sync_buffers(self, *models: nn.Module) -> None:
        """After an epoch: running statistics of norms become the mean of all ranks; other buffers those of rank 0."""
        if self._ranks.is_single_process:
            return
        for module in (module for model in models for module in model.modules()):
            statistics = ("running_mean", "running_var") if hasattr(module, "running_mean") else ()
            for name, buffer in module._buffers.items():
                if buffer is not None and name in statistics:
                    self._ranks.all_reduce_mean([buffer])
                elif buffer is not None:
                    self._ranks.broadcast_tensors([buffer])

    def full_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict whose tensors are whole, on every rank together; of use on rank 0."""
        return state

    def local_state_dict(self, state: dict[str, Any], like: Mapping[Any, Any]) -> dict[str, Any]:  # noqa: ARG002 of a sharded one
        """What this rank has of a state dict with whole tensors; `like` has this rank's weights by the keys in it."""
        return state

    def checkpoint_state(self, parts: dict[str, Any], place: Path | None) -> dict[str, Any]:  # noqa: ARG002 of a sharded one
        """What a checkpoint has of a state: whole tensors, or a manifest beside of what ranks wrote to `place`."""
        return self.full_state_dict(parts)

    def load_checkpoint_state(
        self, kept: dict[str, Any], like: Mapping[Any, Any], folder: Path | None
    ) -> dict[str, Any]:
        """Return this rank's part of a state of `kept`; `like` as for `own`, `folder` if ranks wrote parts to it."""
        if folder is None:
            return self.local_state_dict(kept, like)
        from hpsearch.objectives.training.strategies import shards  # a sixth of a second, for those who need it

        return self.local_state_dict(shards.read_shards(kept, folder), like)

    def scaling_efficiency(self) -> float | None:
        """What share of a step's time is not spent waiting for other ranks, lately; None where nobody measures it."""
        return None

    def gradient_norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of each gradient [n], over all ranks."""
        return torch.stack(torch._foreach_norm(list(gradients))).float()

    def clip_gradients(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scales the gradient down to a norm of `limit`; its norm before that."""
        return nn.utils.clip_grad_norm_(parameters, limit, error_if_nonfinite=False)

    def gather_model(self, model: nn.Module) -> nn.Module:
        """The model with whole weights on the CPU, of use on rank 0."""
        return model.cpu()


class DDPStrategy(Strategy):
    """Torch's DistributedDataParallel (Li et al. 2020) around the step of a batch.

    It wraps the step and not the model, so that it covers every method of the model that the step calls.
    """

    name = "ddp"
    _wrapped: DistributedDataParallel | None = None
    _trained: list[bool]

    def setup_model(self, model: nn.Module, *averages: nn.Module) -> None:  # noqa: ARG002 averages are not trained
        """Let batch norm take its statistics from all ranks' shares, where torch can: on GPUs."""
        if any(parameter.is_cuda for parameter in model.parameters()):
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch names no types

    def begin_epoch(self) -> None:
        """Wrap anew where other layers are trained than before: DDP takes note of them once."""
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        if self._wrapped is not None and trained != self._trained:
            self._wrapped = None
        self._trained = trained

    def step(self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False) -> Step:
        """The step of a micro-batch in training; gradients are summed over ranks unless there are `more`."""
        if self._wrapped is None:
            self._wrapped = self._wrap(batch, autocast)
        with self._wrapped.no_sync() if more else nullcontext():
            step: Step = self._wrapped(batch, autocast)
        return step

    def _wrap(self, batch: Batch, autocast: AbstractContextManager[None]) -> DistributedDataParallel:
        unused = self._has_unused_parameters(batch, autocast)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name, which 2.11 does not know
            return DistributedDataParallel(
                _StepModule(self._model, self._stepping),
                broadcast_buffers=False,  # see `agree`
                find_unused_parameters=unused,  # it costs a look at the graph in each step
                gradient_as_bucket_view=True,
            )

    def _has_unused_parameters(self, batch: Batch, autocast: AbstractContextManager[None]) -> bool:
        """Whether a step uses only some of the parameters, on any rank: tried, without a trace, on the first batch."""
        model, device = self._model, next(self._model.parameters()).device
        kept, drawn = {name: buffer.clone() for name, buffer in model.named_buffers()}, rng_state(device)
        self._stepping(model, batch, autocast).loss.backward()  # type: ignore[no-untyped-call]  # as above
        unused = [p.requires_grad and p.grad is None for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        restore_rng_state(drawn, device)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        return any(self._ranks.all_gather_object(any(unused)))

    def scaling_efficiency(self) -> float | None:
        """Forward and backward pass, as a share of these and of the sums over ranks that they do not hide.

        Torch measures some steps: the 10th, 20th and so on, ever more rarely.
        """
        if self._wrapped is None:
            return None
        found = self._wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # as above
        compute = found.get("avg_forward_compute_time", 0) + found.get("avg_backward_compute_time", 0)
        exposed = found.get("avg_backward_comm_time", 0) - found.get("avg_backward_compute_comm_overlap_time", 0)
        return compute / (compute + max(exposed, 0)) if compute > 0 else None


class _StepModule(nn.Module):
    """The step of a batch as a module, which DDP can wrap."""

    def __init__(self, model: nn.Module, step_function: StepFunction) -> None:
        super().__init__()
        self.model, self._stepping = model, step_function

    def forward(self, batch: Batch, autocast: AbstractContextManager[None]) -> Step:
        return self._stepping(self.model, batch, autocast)
