"""Evaluate a model on a split. The sums over all samples stay on the device until the end and are read once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.loader import load_batches
from hpsearch.objectives.training.data.tree import index_rows, to_device, watch_changes
from hpsearch.objectives.training.evaluation.metrics import Metrics
from hpsearch.objectives.training.evaluation.step import LossStep, Step, StepFunction
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, seed_device_temporarily

_EVAL_BATCH_FACTOR = 4
EVALUATION_SEED = derive_seed("evaluation")  # seed of the random numbers in an evaluation


class HalvesEvaluator(Protocol):
    """Separate evaluation of the first `first_half_size` samples and of the rest. No batch contains samples of both.

    Attributes:
        metric: the only metric that is needed.
    """

    first_half_size: int
    metric: str

    def add(self, step: Step, rows: range) -> None:
        """Add the result for the samples at `rows`; the range is empty if they belong to another rank."""

    def mark_undefined(self, reason: str) -> None:
        """Record the reason for which the halves have no value of `metric`."""

    def add_values(self, values: Sequence[float]) -> None:
        """Add the value of `metric` for each half, if `Objective.evaluate` returns this metric."""


PartEvaluator = Callable[[nn.Module, Dataset], Mapping[str, float]]  # metrics of a whole split by name


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device, purpose: str) -> Iterator[None]:
    """Return a context for evaluation without gradients, which does not change the model.

    Its end restores the model's mode, its buffers and the random generators. The random generators are seeded by
    `purpose`, so that repeated evaluations are equal.
    """
    training = model.training
    model.eval()
    try:
        # Not `inference_mode`: training could not use tensors that the model keeps from here, such as a cache.
        with _keep_buffers(model), torch.no_grad(), seed_device_temporarily(device, purpose):
            yield
    finally:
        model.train(training)


_LARGE_BUFFERS_BYTES = 1 << 26  # copies of larger buffers would need too much memory of a GPU


@contextmanager
def _keep_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers that the model changes in this context, as observers of quantization do in evaluation mode too.

    Otherwise the stored weights would differ from those that were validated, and would depend on the validation data.
    """
    found = [
        (module, name, buffer)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, buffer in module._buffers.items()
        # Others are not stored, and may be caches that belong to other attributes.
        if buffer is not None and name not in module._non_persistent_buffers_set and not buffer.is_inference()
    ]
    on_cpu = sum(buffer.nbytes for *_, buffer in found) > _LARGE_BUFFERS_BYTES
    before = [
        (
            module,
            name,
            buffer,
            buffer._version,
            buffer.detach().to("cpu", copy=True) if on_cpu else buffer.detach().clone(),
        )
        for module, name, buffer in found
    ]
    try:
        yield
    finally:
        for module, name, buffer, version, copied in before:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.resize_as_(copied).copy_(copied)
            if name in module._buffers and module._buffers[name] is not buffer:
                module._buffers[name] = buffer


def evaluate(  # noqa: PLR0913 options by keyword
    model: nn.Module,
    dataset: Dataset,
    step: StepFunction | nn.Module,
    metrics: Metrics,
    *,
    batch_size: int,
    device: torch.device | str,
    num_workers: int = 0,
    ranks: Ranks = SINGLE_PROCESS,
    evaluate_part: PartEvaluator | None = None,
    halves: HalvesEvaluator | None = None,
) -> dict[str, float]:
    """Return the mean loss as "loss", and each metric, over a dataset.

    The model runs in evaluation mode and fp32, as when it is served. Its mode is restored afterwards.

    Args:
        model: model on `device`.
        dataset: dataset on any device.
        step: step function of the run; or a loss module from (output, target) to losses [n], or to an additive mean
            (see `as_additive_loss`).
        metrics: metrics on `device`; they are reset first.
        batch_size: rows per forward pass. The result depends on it only if the loss relates the samples of a batch.
        device: device of the model.
        num_workers: number of processes that load a dataset which is not in memory.
        ranks: ranks that evaluate together, each a share of the samples, without padding.
        evaluate_part: function that returns metrics of the whole dataset; every rank calls it.
        halves: evaluation of the two halves of the dataset, which receives the result of each batch; None for none.
    """
    stepping, device = LossStep(step) if isinstance(step, nn.Module) else step, torch.device(device)
    # A step may use random numbers. They are the same in each evaluation, so that results are comparable.
    with evaluation_mode(model, device, "evaluation"):
        metrics.reset()
        sums, cut = RunningMeans(device), None if halves is None else halves.first_half_size
        has_outputs = not ranks.is_single_process  # another rank may have outputs
        for batch, rows in iterate_batches(dataset, batch_size, device, num_workers, ranks, cut):
            # In-memory data: on a CPU, the batch is a view of them.
            is_changed = watch_changes(batch.x if dataset.in_memory else ())
            found = stepping(model, batch, nullcontext())
            if is_changed():
                raise ObjectiveError(
                    "the model or step() changes its input in place, which changes the validation data; create a new "
                    "tensor, for example x = x - mean"
                )
            sums.add(found, len(rows))
            if rows and found.outputs is not None:
                has_outputs = True
                metrics.update(found.outputs, found.targets)
            if halves is not None:
                halves.add(found, rows)
        # Without outputs, the metrics would be those of no samples, such as an accuracy of 0.
        values = as_floats({**sums.compute(ranks), **(metrics.compute() if has_outputs else {})})
        if evaluate_part is not None:
            values |= _evaluate_parts(model, dataset, evaluate_part, device, halves, taken=values)
        return ranks.broadcast_object(values)


def _evaluate_parts(
    model: nn.Module,
    dataset: Dataset,
    evaluate_part: PartEvaluator,
    device: torch.device,
    halves: HalvesEvaluator | None,
    *,
    taken: Container[str],
) -> Mapping[str, float]:
    """Return the result of `evaluate_part`; if needed, also evaluate the halves, with the same random numbers."""
    with seed_device_temporarily(device, "evaluation"):
        found = evaluate_part(model, dataset)
    if both := [name for name in found if name in taken]:
        raise ObjectiveError(f"evaluate() returns {both[0]!r}, which is already a metric; use another name")
    if halves is not None and halves.metric in found:
        cut, values = halves.first_half_size, []
        for rows in (torch.arange(cut), torch.arange(cut, len(dataset))):
            with seed_device_temporarily(device, "evaluation"):
                try:
                    values.append(evaluate_part(model, dataset.take(rows))[halves.metric])
                except (ObjectiveError, KeyError) as error:  # the metric may need more samples
                    halves.mark_undefined(str(error))
                    return found
        halves.add_values(values)
    return found


def get_eval_batch_size(config: TrainConfig) -> int:
    """Return the evaluation batch size; the default is above the training batch size: no activations are stored."""
    return config.eval_batch_size or _EVAL_BATCH_FACTOR * config.batch_size


class RunningMeans:
    """Running means of the loss and of the metrics that steps return, on the device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}
        self.weight: Tensor | float = 0
        self._has_batches = False

    def add(self, step: Step, size: int) -> None:
        """Add the result of a batch of `size` samples; if `size` is 0, add only the metric names.

        Raises:
            ObjectiveError: the metric names differ from those of earlier batches.
        """
        if not size:
            self._sums = {**{name: torch.zeros_like(self._loss) for name in step.metrics}, **self._sums}
            return
        if self._has_batches and (partial := self._sums.keys() ^ step.metrics.keys()):
            raise ObjectiveError(
                f"step() returns the metric {min(partial)!r} only for some batches, so its mean is undefined; "
                "return it for each batch, or compute it in metrics() or evaluate()"
            )
        self._has_batches = True
        weight = size if step.weight is None else step.weight
        self._loss += step.loss.detach() * weight
        for name, value in step.metrics.items():
            found = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach()
            self._sums[name] = self._sums.get(name, 0) + found * weight
        self.weight = self.weight + weight

    def compute(self, ranks: Ranks = SINGLE_PROCESS) -> dict[str, Tensor]:
        """Return the mean `loss` and the mean of each metric over the batches of all ranks."""
        weight = torch.as_tensor(self.weight, dtype=torch.float64, device=self._device)
        loss, weight, *sums = ranks.all_reduce_sum(torch.stack([self._loss, weight, *self._sums.values()])).unbind()
        return {"loss": loss / weight, **{name: sum_ / weight for name, sum_ in zip(self._sums, sums, strict=True)}}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {"loss": self._loss, "sums": dict(self._sums), "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        state = to_device(state, self._device)
        self._loss, self._sums, self.weight = state["loss"], state["sums"], state["weight"]
        self._has_batches = bool(self._sums)


def iterate_batches(
    dataset: Dataset, size: int, device: torch.device, num_workers: int, ranks: Ranks, cut: int | None
) -> Iterator[tuple[Batch, range]]:
    """Iterate over all batches in order: this rank's share of the batch, on the device, and the rows of the share.

    A rank without a sample in a batch gets a sample of another rank and an empty range of rows, because sharded models
    need all ranks to run.
    """
    samples = len(dataset)
    parts = [range(samples)] if cut is None else [range(cut), range(cut, samples)]
    spans = [part[start : start + size] for part in parts for start in range(0, len(part), size)]
    own = [ranks.select_own_rows(span) for span in spans]
    shares = [mine or span[:1] for mine, span in zip(own, spans, strict=True)]
    if dataset.in_memory:
        for mine, share in zip(own, shares, strict=True):
            rows = slice(share.start, share.stop, share.step)
            yield Batch(index_rows(dataset.x, rows), index_rows(dataset.y, rows), len(share)).to(device), mine
        return
    found = load_batches(dataset, [torch.tensor(share) for share in shares], device=device, num_workers=num_workers)
    for mine, batch in zip(own, found, strict=True):
        yield batch.to(device), mine


def is_metric_name(name: object) -> bool:
    """Return whether a name can be displayed in one line."""
    return isinstance(name, str) and name != "" and name.isprintable()


def as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert scalars to floats with one read from the device.

    Raises:
        ObjectiveError: a value is not a scalar, or a name is not a printable text.
    """
    if bad := [name for name in values if not is_metric_name(name)]:
        raise ObjectiveError(f"metric name {bad[0]!r} must be a text without control characters")
    if wrong := [name for name, value in values.items() if value is None or isinstance(value, str)]:
        raise ObjectiveError(f"metric {wrong[0]!r} must be a number, not {values[wrong[0]]!r}")
    if not values:
        return {}
    tensors = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ObjectiveError(f"metric {name!r} must be one number, not a tensor {list(tensor.shape)}")
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
    stacked = torch.stack([tensor.reshape(()).to(device) for tensor in tensors.values()])
    return dict(zip(tensors, stacked.tolist(), strict=True))
