"""What is measured of a run's model after an epoch, beside what validation gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest, users_code
from hpsearch.objectives.measured import MEASURED
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import moved
from hpsearch.objectives.training.evaluation.calling import Call
from hpsearch.objectives.training.loop.measurements import latency_ms, machine_load, sizes
from hpsearch.objectives.training.loop.performance import as_served, peak_memory
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility.seeds import seeded_on
from hpsearch.objectives.training.strategies.base import Strategy

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective

_TAKEN = {"lr", "grad_norm", "epoch_seconds", "peak_memory_bytes", "scaling_efficiency", "latency_load"}
_BEGINNINGS = ("train_", "val_", "samples_per_second")


@dataclass
class Measuring:
    """What a study asks for that no validation gives, and the objective's own measures.

    What is the same in every epoch is measured once, after the first, and kept in checkpoints: a trial that is resumed
    has the same numbers. Nothing is measured that nobody asks for.

    Attributes:
        objective: whose `reported` says what is asked for.
        config: of the run.
        call: how its model is called.
        val: the validation split; its first samples are what latency is measured on.
        names: what is measured, of `MEASURED`; known after `rehearse`.
        known: what was measured once.
        peak: most bytes of a device that any attempt at the trial held, so far.
    """

    objective: Objective
    config: TrainConfig
    call: Call
    val: Dataset
    device: torch.device
    ranks: Ranks
    strategy: Strategy
    names: tuple[str, ...] = ()
    known: dict[str, float] = field(default_factory=dict)
    peak: int = 0

    def rehearse(self, model: nn.Module, scores: Mapping[str, float]) -> None:
        """Tries, before training, all that is asked for.

        Args:
            model: that is judged.
            scores: of a validation.

        Raises:
            ObjectiveError: something that is asked for is reported by nobody, or cannot be measured; or the
                objective's measures are no numbers.
        """
        who, asked = type(self.objective).__name__, self.objective.reported
        own = self._own(model, scores)
        known = {*scores, *own, *MEASURED}
        for name in asked:
            if name not in known:
                raise MetricError(name, f"is none that {who} gives, nor measured: {nearest(name, sorted(known))}")
        self.names = tuple(name for name in asked if name in MEASURED and name not in scores)
        if "latency_ms" in self.names:
            self._try_forward(model)

    def require_device(self) -> None:
        """Refuses to measure memory where it is not the trial's own.

        Raises:
            ObjectiveError: on a CPU the process's memory is that of all its trials, their data and libraries.
        """
        if "peak_memory_mb" in self.names and peak_memory(self.device) is None:
            raise ObjectiveError(
                f"peak_memory_mb is measured on CUDA devices, and this trial runs on {self.device}: its memory there "
                "cannot be told from that of the process and of earlier trials; model_mb and parameters can be measured"
            )

    def after_epoch(self, model: nn.Module, scores: Mapping[str, float]) -> dict[str, float]:
        """All that is measured of the model that was judged, by name; the same on all ranks, who call it together.

        Raises:
            ObjectiveError: the objective's measures are no numbers, or have names that are taken.
        """
        found = {}
        if "peak_memory_mb" in self.names:  # before anything else is measured, which would count
            self.peak = max(self.peak, *self.ranks.each(peak_memory(self.device) or 0))
            found["peak_memory_mb"] = self.peak / 1e6
        lacking = {*self.names} - {*self.known, "peak_memory_mb"}
        if lacking & {"model_mb", "parameters"}:
            self.known.update({name: value for name, value in sizes(model).items() if name in lacking})
        if "latency_ms" in lacking:
            self.known.update(self.ranks.led(lambda: self._latency(model)))
        return {**self.known, **found, **self._own(model, scores)}

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far, as plain values; empty where nothing is kept."""
        if not self.names:
            return {}
        held = peak_memory(self.device) if "peak_memory_mb" in self.names else None  # of an epoch that is left, too
        return {"known": dict(self.known), "peak": max(self.peak, held or 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.known, self.peak = dict(state.get("known", {})), state.get("peak", 0)

    def _latency(self, model: nn.Module) -> dict[str, float]:
        with as_served(model, self.config), self._evaluation(model):
            x = self._inputs()
            return {"latency_ms": latency_ms(lambda: self.call(model, x), self.device), **machine_load()}

    def _inputs(self) -> Any:
        rows = torch.arange(self.objective.latency_batch) % len(self.val)
        return moved(self.val.inputs(rows), self.device)

    def _try_forward(self, model: nn.Module) -> None:
        who, size = type(self.objective).__name__, self.objective.latency_batch
        if not isinstance(size, int) or size < 1:
            raise ObjectiveError(f"{who}.latency_batch must be a whole number of at least 1, not {size!r}")
        if self.strategy.name == "fsdp":
            raise ObjectiveError(
                "latency_ms cannot be measured with strategy 'fsdp', where each device has a part of the model: set "
                "strategy='ddp', or judge by model_mb or parameters"
            )
        of = "sample" if size == 1 else "samples"
        with self._evaluation(model), users_code(f"{who}.model, called with {size} {of} to measure latency_ms"):
            self.call(model, self._inputs())

    def _own(self, model: nn.Module, scores: Mapping[str, float]) -> dict[str, float]:
        """The objective's own measures, rank 0's."""
        if not self.objective.has_measures:
            return {}
        who = f"{type(self.objective).__name__}.measures"
        with self._evaluation(model), self.strategy.explained(), users_code(who):
            found = self.objective.measures(model, self.config)
            return self.ranks.told(_floats(found, who, {*scores, *MEASURED, *_TAKEN}))

    @contextmanager
    def _evaluation(self, model: nn.Module) -> Iterator[None]:
        """A region in evaluation mode, without gradients, that draws nothing of what the training draws."""
        training = model.training
        model.eval()
        try:
            with torch.inference_mode(), seeded_on(self.device, "measures"):
                yield
        finally:
            model.train(training)


def _floats(found: Any, who: str, taken: set[str]) -> dict[str, float]:
    """Measures as floats.

    Raises:
        ObjectiveError: they are no dictionary of numbers, or a name is taken.
    """
    if not isinstance(found, Mapping):
        raise ObjectiveError(f"{who} must return a dictionary of numbers by name, not {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not name or name in taken or name.startswith(_BEGINNINGS):
            raise ObjectiveError(f"{who}: the name {name!r} is taken, or none: choose another")
        if not isinstance(value, Real):
            raise ObjectiveError(f"{who}: {name} must be a float, not a {type(value).__name__}: give float(...)")
    return {name: float(value) for name, value in found.items()}
