"""Judging a model on a split: exact sums over samples, read from the device once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.loader import loaded
from hpsearch.objectives.training.data.tree import moved, taken
from hpsearch.objectives.training.evaluation.metrics import Metrics
from hpsearch.objectives.training.evaluation.step import LossStep, Step, Stepping
from hpsearch.objectives.training.ranks import ALONE, Ranks
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, seeded_on

_MORE = 4
EVALUATION_SEED = derive_seed("evaluation")  # of random draws in an evaluation


class InParts(Protocol):
    """An evaluation of the first `cut` samples of a dataset apart from the others: no batch has samples of both."""

    cut: int

    def add(self, step: Step, rows: range) -> None:
        """Add a batch of the samples at `rows`, which are none if the batch belongs to another rank."""


@contextmanager
def evaluating(model: nn.Module, device: torch.device, purpose: str) -> Iterator[None]:
    """Return a region in evaluation mode and without gradients, with generators seeded by `purpose`.

    The model's mode and the generators are restored at its end.
    """
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), seeded_on(device, purpose):
            yield
    finally:
        model.train(training)


def evaluate(  # noqa: PLR0913 all that an evaluation is made of, by keyword
    model: nn.Module,
    dataset: Dataset,
    step: Stepping | nn.Module,
    metrics: Metrics,
    *,
    batch_size: int,
    device: torch.device | str,
    num_workers: int = 0,
    ranks: Ranks = ALONE,
    also: InParts | None = None,
) -> dict[str, float]:
    """The mean loss, as "loss", and each metric, over a whole dataset.

    The model runs in evaluation mode and fp32, as it will when it is served; its mode is put back.

    Args:
        model: on `device`.
        dataset: on any device.
        step: of the run; or a loss, (output, target) -> losses [n] or their mean, of a form that adds up.
        metrics: reset before use, on `device`.
        batch_size: rows in one forward pass; the answer does not depend on it.
        device: where the model is.
        num_workers: processes that load a dataset which is not in memory.
        ranks: that judge it together: each a share of the samples, without padding.
        also: what sees each batch, too.
    """
    stepping, device = LossStep(step) if isinstance(step, nn.Module) else step, torch.device(device)
    # A step may draw at random: always the same, so that weights are judged alike in each epoch and afterwards.
    with evaluating(model, device, "evaluation"):
        metrics.reset()
        sums, cut = Means(device), None if also is None else also.cut
        for batch, rows in batches(dataset, batch_size, device, num_workers, ranks, cut):
            found = stepping(model, batch, nullcontext())
            sums.add(found, len(rows))
            if rows and found.outputs is not None:
                metrics.update(found.outputs, found.targets)
            if also is not None:
                also.add(found, rows)
        return ranks.told(as_floats({**sums.compute(ranks), **metrics.compute()}))


def evaluation_rows(config: TrainConfig) -> int:
    """Rows in one batch of an evaluation: it keeps no activations, so it takes more than training."""
    return config.eval_batch_size or _MORE * config.batch_size


class Means:
    """The mean loss and the means that steps measured, over all batches, on the device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}
        self.weight: Tensor | float = 0

    def add(self, step: Step, size: int) -> None:
        """Adds a batch of `size` samples; of none only the names of what it measures."""
        if not size:
            self._sums = {**{name: torch.zeros_like(self._loss) for name in step.metrics}, **self._sums}
            return
        weight = size if step.weight is None else step.weight
        self._loss += step.loss.detach() * weight
        for name, value in step.metrics.items():
            found = torch.as_tensor(value, dtype=torch.float64, device=self._device).detach()
            self._sums[name] = self._sums.get(name, 0) + found * weight
        self.weight = self.weight + weight

    def compute(self, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """The mean `loss`, and each other by its name, over the batches of all ranks."""
        weight = torch.as_tensor(self.weight, dtype=torch.float64, device=self._device)
        loss, weight, *sums = ranks.total(torch.stack([self._loss, weight, *self._sums.values()])).unbind()
        return {"loss": loss / weight, **{name: sum_ / weight for name, sum_ in zip(self._sums, sums, strict=True)}}

    def state_dict(self) -> dict[str, Any]:
        """What was added so far."""
        return {"loss": self._loss, "sums": dict(self._sums), "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        state = moved(state, self._device)
        self._loss, self._sums, self.weight = state["loss"], state["sums"], state["weight"]


def batches(
    dataset: Dataset,
    size: int,
    device: torch.device,
    num_workers: int,
    ranks: Ranks,
    cut: int | None,
) -> Iterator[tuple[Batch, range]]:
    """Iterate over all samples in their order on the device: this rank's share of each batch, and its own rows.

    A rank without a sample in a batch gets another rank's, because sharded models run on all ranks together.
    """
    samples = len(dataset)
    parts = [range(samples)] if cut is None else [range(cut), range(cut, samples)]
    spans = [part[start : start + size] for part in parts for start in range(0, len(part), size)]
    own = [span[ranks.rank :: ranks.world] for span in spans]
    shares = [mine or span[:1] for mine, span in zip(own, spans, strict=True)]
    if dataset.in_memory:
        for mine, share in zip(own, shares, strict=True):
            rows = slice(share.start, share.stop, share.step)
            yield Batch(taken(dataset.x, rows), taken(dataset.y, rows), len(share)).to(device), mine
        return
    found = loaded(dataset, [torch.tensor(share) for share in shares], device=device, num_workers=num_workers)
    for mine, batch in zip(own, found, strict=True):
        yield batch.to(device), mine


def as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Scalars as floats, read from the device in one go."""
    tensors = {name: torch.as_tensor(value).double() for name, value in values.items()}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ObjectiveError(f"metric {name!r} must be one number, not {list(tensor.shape)}")
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
    stacked = torch.stack([tensor.reshape(()).to(device) for tensor in tensors.values()])
    return dict(zip(tensors, stacked.tolist(), strict=True))
