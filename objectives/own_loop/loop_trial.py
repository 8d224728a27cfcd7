"""A trial as an own loop sees it: its configuration, its epochs, and where it reports them."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest
from hpsearch.objectives.measured import value_of
from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.own_loop.folder import listed, packed, place
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.tree import Tree, leaves, map_tensors
from hpsearch.objectives.training.loop.guards import NonFiniteError
from hpsearch.objectives.training.loop.measuring import plain_measures
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import set_seed
from hpsearch.objectives.training.session import Curve, Verdict
from hpsearch.objectives.training.trainer import BaseTrainer, shown

_GIVEN = {"latency_ms", "model_mb", "parameters"}  # what `LoopTrial.measure` gives of what is measured


class OwnLoop(BaseTrainer):
    """The part of an own loop's run that its trial uses; for the parameters see `BaseTrainer`.

    Attributes:
        folder: of the run, the same on all ranks; None if it has none.
        checkpoint: path of the trial's checkpoint folder.
        resolved: identity and environment of the run.
        logged: files that the loop gave to the session.
    """

    curve: Curve
    resolved: dict[str, Any]

    def __init__(self, objective: BaseObjective, config: Any, plan: RunPlan, **where: Any) -> None:
        super().__init__(config, plan, **where)
        self.objective, path = objective, self.files.path
        self.folder, self.checkpoint = self.ranks.told((path and path.resolve(), place(path)))
        self.curve = self.curve or Curve(objective.metric, maximize=objective.direction == "maximize")
        self.notes: list[str] = []
        self.logged: list[Path] = []

    def save_and_report(self, record: EpochRecord, state: dict[str, Any], *, best: bool) -> Verdict:
        """Save the state, then report, so that a death in between loses no reported epoch."""
        if self.session is not None:
            self.session.save({**self.resolved, "notes": self.notes, **state, **self.curve.state_dict()}, best=best)
        self.files.log.info("epoch %d%s %s", record.epoch + 1, " (best)" if best else "", shown(record.metrics))
        return self._report(record)


class LoopTrial:
    """What an own loop is given, on each of its ranks: the processes that train the trial together.

    Attributes:
        config: what `suggest` returned.
        seed: of the trial; finalists have fresh ones.
        split_seed: of the study's data: divide them by it, the same for every trial.
        device: to train on, of this rank.
        rank: this process's number, from 0.
        world: how many ranks there are.
        total_epochs: of a full trial, for schedules.
        resumed: whether epochs of it were trained before.
        state: what was reported as `state` with the last epoch, on the CPU, where the trial is resumed; else None.
        folder: of the trial, for files, the same on all ranks; None where a run keeps none.
        verdict: the answer to the last report.
    """

    def __init__(self, run: OwnLoop, state: Any) -> None:
        self.config, self.device, self.state = run.config, run.device, state
        self.seed, self.split_seed, self.total_epochs = run.plan.seed, run.plan.split_seed, run.plan.epochs
        self.folder, self.rank, self.world = run.folder, run.ranks.rank, run.ranks.world
        self.resumed = bool(run.curve.history)
        self._run, self._ranks, self._curve, self._checkpoint = run, run.ranks, run.curve, run.checkpoint
        self.verdict = Verdict.CONTINUE
        self._epoch: int | None = None  # that runs, until it is reported
        self._started = 0.0
        self._within = False  # the body of the loop over epochs
        self._checked = False
        self.failure: BaseException | None = None  # of a report, which ends the trial whatever the loop makes of it

    @property
    def checkpoint(self) -> Path:
        """A folder for what a library saves on all ranks together, the same on all ranks of a machine.

        It is empty at first, and after each report that keeps it; in a trial that is resumed it is as it was kept.
        """
        self._checkpoint.mkdir(parents=True, exist_ok=True)
        return self._checkpoint

    @property
    def ended(self) -> bool:
        """Whether no epoch is left: all are done, or the last report was answered by an end."""
        return self.verdict != Verdict.CONTINUE or self._curve.next_epoch >= self.total_epochs

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, 0-based, each with its generators seeded; it ends where the trial does.

        Raises:
            ObjectiveError: an epoch was not reported.
        """
        while not self.ended:
            epoch = self._curve.next_epoch
            set_seed(self.seed, "epoch", epoch, *self._ranks.purpose())
            self._epoch, self._started, self._within = epoch, time.perf_counter(), True
            yield epoch
            self._within = False
            if self._epoch is not None:
                raise ObjectiveError(f"epoch {epoch + 1} was not reported: call trial.report once in each epoch")

    def report(
        self, metrics: Mapping[str, float], *, state: Any = None, best: Any = None, folder: Path | str | None = None
    ) -> bool:
        """Reports the epoch that runs, once, on every rank: what rank 0 gives counts.

        Args:
            metrics: numbers by name: the study's metric, all else that it optimises or bounds, and what is of interest.
                They are logged as `val_NAME`; those that begin with `train_`, and `lr`, as they are.
            state: plain values and tensors, nested: what the next epoch goes on from, here or on another machine.
                Without it, or a folder, a resumed trial begins anew.
            best: likewise: what `test` and `export` take, kept of the best epoch; `state` unless given.
            folder: whose files are kept in the trial's checkpoint; `checkpoint` has them when the trial is resumed.
                All ranks may have written into it; they all have to see it. Where it is `checkpoint` it is emptied.

        Returns:
            Whether the epoch is the best so far.

        Raises:
            ObjectiveError: no epoch runs, the metric is missing, the state is not plain, or the ranks report different
                epochs.
            NonFiniteError: the metric, or another that the study asks for, is NaN or infinite: the configuration
                diverges.
        """
        if (epoch := self._epoch) is None:
            if self._within:
                raise ObjectiveError(f"epoch {self._curve.next_epoch} is reported already: report each epoch once")
            raise ObjectiveError("trial.report was called outside of trial.epochs(): report each epoch once, within it")
        saved = None if folder is None else Path(folder)
        try:
            self.meet(f"reports epoch {epoch + 1}" + ("" if saved is None else " with a folder"))
            files = {} if saved is None else self._packed(saved)
            record = self._ranks.led(lambda: self._recorded(epoch, metrics, state, best))
            tested = state if best is None else best
            kept = self._curve.add(record, lambda: _copied(None if self.rank else tested))
        except BaseException as error:
            if self.world > 1:  # the other ranks do not go on either
                self.failure = error
            raise
        self._epoch = None
        try:
            self.verdict = self._run.save_and_report(record, {"state": state, **files}, best=kept)
            if saved is not None and saved.resolve() == self._checkpoint.resolve():  # another is not ours to remove
                self._ranks.led(lambda: shutil.rmtree(saved, ignore_errors=True))
        except BaseException as error:  # also one that the loop would catch: a lost claim, a stop
            self.failure = error
            raise
        return kept

    def _recorded(self, epoch: int, metrics: Any, state: Any, best: Any) -> EpochRecord:
        """The epoch's record, of what was found to be right."""
        numbers, metric = _numbers(metrics), self._run.objective.metric
        if metric not in numbers:
            near = nearest(metric, list(numbers))
            raise MetricError(metric, f"is none that was reported: {near}; or set the objective's metric")
        record = {_named(name): number for name, number in numbers.items()}
        if not math.isfinite(value := numbers[metric]):
            raise NonFiniteError(f"{metric} is {value}", epoch=epoch)
        for name in self._run.objective.reported:
            try:
                value = value_of(record, name)
            except KeyError:
                near = "give what trial.measure(model, inputs) returns" if name in _GIVEN else nearest(name, [*numbers])
                raise MetricError(name, f"is asked for by the study, and none that was reported: {near}") from None
            if not math.isfinite(value):
                raise NonFiniteError(f"{name} is {value}", epoch=epoch)
        if not self._checked:
            check_plain(state, "state")
            check_plain(best, "best")
            self._checked = True
        return EpochRecord(epoch, time.time(), {**record, "epoch_seconds": time.perf_counter() - self._started})

    def measure(self, model: nn.Module, inputs: Tree) -> dict[str, float]:
        """How fast a model is, and how large: numbers for `report`. Call it on every rank, with a whole model.

        Once they were reported under these names they stay: later epochs, and a trial that is resumed, get the same.

        Args:
            model: on the trial's device; it is measured in evaluation mode, without gradients.
            inputs: a batch as the model takes it; of one sample, where a sample's time is what is wanted.

        Returns:
            `latency_ms`, the median time of a forward pass; `latency_load`, the machine's load over its cores
            meanwhile; `model_mb`, parameters and buffers in 10^6 bytes; `parameters`, their number.

        Raises:
            ObjectiveError: the model is spread over devices, or does not take the inputs.
        """
        history = self._curve.history
        before = history[-1].metrics if history else {}
        kept = {name: before[f"val_{name}"] for name in (*_GIVEN, "latency_load") if f"val_{name}" in before}
        if kept.keys() >= _GIVEN:
            return kept
        return self._ranks.led(lambda: plain_measures(model, inputs, self.device))

    def _packed(self, folder: Path) -> dict[str, Any]:
        """The files of a folder that all ranks see, on rank 0."""
        found = self._ranks.each(listed(folder))
        if not found[0]:
            raise ObjectiveError(f"trial.report: no file is in folder {folder}: save into it before the report")
        if others := [rank for rank, files in enumerate(found) if files != found[0]]:
            raise ObjectiveError(
                f"trial.report: rank {others[0]} sees other files in folder {folder} than rank 0: "
                "let all ranks give the same folder, on several machines one that they share"
            )
        return {} if self.rank else {"folder": packed(folder)}

    def meet(self, doing: str) -> None:
        """Waits for the other ranks, who have to be at the same place of their loops.

        Raises:
            ObjectiveError: one of them is elsewhere.
        """
        if self.world == 1:
            return
        found = self._ranks.each((doing, self._ranks.told_to_go()))
        if not self.rank and any(told for _, told in found):
            self._ranks.on_told_to_go()
        if others := [rank for rank, (did, _) in enumerate(found) if did != found[0][0]]:
            raise ObjectiveError(
                f"the ranks' loops went apart: rank 0 {found[0][0]}, rank {others[0]} {found[others[0]][0]}: "
                "let every rank call trial.report once in each epoch, alike"
            )

    def log_artifact(self, path: Path | str) -> None:
        """Keeps a file for the trial's run in MLflow; it is sent when the trial ends."""
        self._run.logged.append(Path(path))


def _named(name: str) -> str:
    return name if name == "lr" or name.startswith(("train_", "val_")) else f"val_{name}"


def _copied(tree: Any) -> Any:
    """The tree with its tensors on the CPU, apart from those that go on training."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), tree)


def _numbers(metrics: Any) -> dict[str, float]:
    """Metrics as floats.

    Raises:
        ObjectiveError: they are no dictionary, or one of them is no number.
    """
    if not isinstance(metrics, Mapping):
        raise ObjectiveError(f"trial.report takes a dictionary of numbers by name, not {type(metrics).__name__}")
    found = {}
    for name, value in metrics.items():
        size = value.numel() if isinstance(value, Tensor) else np.size(value)
        if not isinstance(value, (Real, Tensor, np.ndarray)) or size != 1:
            what = f"a {type(value).__name__} {list(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise ObjectiveError(f"trial.report: {name} must be one number, not {what}")
        found[str(name)] = float(value.detach() if isinstance(value, Tensor) else value)
    return found


def check_plain(tree: Any, what: str) -> None:
    """Refuses what a checkpoint cannot hold, at the first report and not at a resume.

    Raises:
        ObjectiveError: it says where something else stands, and what it is.
    """
    for name, value in leaves(tree, what):
        if not isinstance(value, (Tensor, bool, int, float, str, bytes, type(None))):
            remedy = "give its state_dict()" if hasattr(value, "state_dict") else "give tensors and plain values"
            kind = type(value).__name__
            raise ObjectiveError(f"trial.report: {name} is a {kind}, which no checkpoint holds: {remedy}")
