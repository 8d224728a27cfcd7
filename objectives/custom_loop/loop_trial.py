"""`LoopTrial`: configuration, epochs and reports of a trial with a custom training loop."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.folder import (
    choose_checkpoint_folder,
    empty_folder,
    list_files,
    pack_folder,
)
from hpsearch.objectives.errors import MetricError, ObjectiveError, suggest_names
from hpsearch.objectives.model_metric_names import get_metric_value
from hpsearch.objectives.training.base_trainer import BaseTrainer, format_metrics
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.tree import Tree, leaves, map_tensors, to_python_scalars
from hpsearch.objectives.training.evaluation.evaluate import is_metric_name
from hpsearch.objectives.training.loop.guards import NonFiniteError
from hpsearch.objectives.training.loop.measure_model import measure_model
from hpsearch.objectives.training.reproducibility.checkpoint import is_readable
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import set_seed
from hpsearch.objectives.training.session import Curve, Verdict

_MEASURABLE = {"latency_ms", "model_mb", "parameters"}  # the model metrics that `LoopTrial.measure` returns


class BaseLoopRun(BaseTrainer):
    """Base class of `LoopRun` with the members that `LoopTrial` uses; see `BaseTrainer` for the parameters.

    Attributes:
        folder: folder of the run, the same on all ranks; None if the run has no folder.
        checkpoint: path of the trial's checkpoint folder.
        settings: configuration, epochs, seeds and environment of the run, as stored in its checkpoints.
        logged: files that the loop passed to `LoopTrial.log_artifact`.
    """

    curve: Curve
    settings: dict[str, Any]

    def __init__(self, objective: BaseObjective, config: Any, plan: RunPlan, **where: Any) -> None:
        super().__init__(config, plan, **where)
        self.objective, path = objective, self.files.path
        folders = path and path.resolve(), choose_checkpoint_folder(path)
        self.folder, self.checkpoint = self.ranks.broadcast_object(folders)
        self.curve = self.curve or Curve(objective.metric, maximize=objective.direction == "maximize")
        self.resume_notes: list[str] = []
        self.logged: list[Path] = []

    def save_and_report(self, record: EpochRecord, state: dict[str, Any], *, best: bool) -> Verdict:
        """Save the state and then report the epoch, so that a checkpoint exists for every reported epoch."""
        if self.session is not None:
            notes = {"notes": self.resume_notes}
            self.session.save({**self.settings, **notes, **state, **self.curve.state_dict()}, best=best)
        mark = " (best)" if best else ""
        self.files.log.info("epoch %d%s %s", record.epoch + 1, mark, format_metrics(record.metrics))
        return self._report(record)


class LoopTrial:
    """Trial of a custom training loop. With several ranks, each rank has its own object.

    Attributes:
        config: the result of the objective's `suggest`.
        seed: seed of the trial; each finalist run has a new one.
        split_seed: seed for splitting the data, the same for all trials of a study.
        device: device of this rank.
        rank: number of this process, from 0.
        world: number of ranks.
        total_epochs: number of epochs of a full trial, for schedules.
        resumed: whether the trial has epochs from an earlier attempt.
        state: the `state` that was reported with the last epoch, on the CPU; None if the trial is not resumed.
        folder: folder for files of the trial, the same on all ranks; None if the run has no folder.
        verdict: result of the last report: whether the trial continues.
    """

    def __init__(self, run: BaseLoopRun, state: Any) -> None:
        self.config, self.device, self.state = run.config, run.device, state
        self.seed, self.split_seed, self.total_epochs = run.plan.seed, run.plan.split_seed, run.plan.epochs
        self.folder, self.rank, self.world = run.folder, run.ranks.rank, run.ranks.world_size
        self.resumed = bool(run.curve.history)
        self._run, self._ranks, self._curve, self._checkpoint = run, run.ranks, run.curve, run.checkpoint
        self.verdict = Verdict.CONTINUE
        self._epoch: int | None = None  # the current epoch, until it is reported
        self._started = 0.0
        self._is_in_epoch = False
        self._report_lock = threading.RLock()  # several threads may report the same epoch; only the first succeeds
        self.failure: BaseException | None = None  # ends the trial even if the loop catches the error of `report`

    @property
    def checkpoint(self) -> Path:
        """Folder for checkpoints that a library writes from all ranks, the same on all ranks of a machine.

        The folder exists. It is empty at the start of a new trial and after each report with `folder=trial.checkpoint`.
        In a resumed trial it contains the files of the last report.
        """
        self._checkpoint.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may be in the temporary folder
        return self._checkpoint

    @property
    def should_stop(self) -> bool:
        """Whether the trial has no further epoch, because all epochs are trained or the last report ended the trial."""
        return self.verdict != Verdict.CONTINUE or self._curve.next_epoch >= self.total_epochs

    def epochs(self) -> Iterator[int]:
        """Iterate over the remaining epochs (0-based) until the trial ends; seed the random generators for each epoch.

        Raises:
            ObjectiveError: the loop did not report an epoch before it requested the next one.
        """
        while not self.should_stop:
            epoch = self._curve.next_epoch
            set_seed(self.seed, "epoch", epoch, *self._ranks.seed_suffix())
            self._epoch, self._started, self._is_in_epoch = epoch, time.perf_counter(), True
            yield epoch
            self._is_in_epoch = False
            if self._epoch is not None:
                raise ObjectiveError(f"epoch {epoch + 1} was not reported; call trial.report once in each epoch")

    def report(
        self, metrics: Mapping[str, float], *, state: Any = None, best: Any = None, folder: Path | str | None = None
    ) -> bool:
        """Report the current epoch. Call it once per epoch on every rank; the values of rank 0 are used.

        Args:
            metrics: numbers by name: the study's metric, all other metrics that the study optimizes or bounds, and any
                further metrics. They are logged as `val_NAME`; `lr` and names that begin with `train_` get no prefix.
            state: nested plain values and tensors from which the next epoch continues, also on another machine. Without
                `state` and `folder`, a resumed trial starts from the first epoch again.
            best: nested plain values and tensors that are stored for the best epoch and passed to `test` and `export`;
                None uses `state`.
            folder: folder whose files are stored in the trial's checkpoint. After a resume, the folder
                `trial.checkpoint` contains them. All ranks may write into `folder`, and all must see the same files.
                If `folder` is `trial.checkpoint`, its files are deleted after the report.

        Returns:
            Whether the epoch is the best so far.

        Raises:
            ObjectiveError: no epoch is running, the metric is missing, the state contains objects that a checkpoint
                cannot hold, or the ranks report different epochs.
            NonFiniteError: a metric that the study optimizes or bounds is NaN or infinite.
        """
        with self._report_lock:
            return self._report(metrics, state=state, best=best, folder=folder)

    def _report(self, metrics: Mapping[str, float], *, state: Any, best: Any, folder: Path | str | None) -> bool:
        if (epoch := self._epoch) is None:
            if self._is_in_epoch:
                raise ObjectiveError(f"epoch {self._curve.next_epoch} is already reported; report each epoch once")
            raise ObjectiveError("trial.report was called outside trial.epochs(); call it once in each iteration")
        saved = None if folder is None else Path(folder)
        state, best = to_python_scalars(state), to_python_scalars(best)
        try:
            self.barrier(f"reports epoch {epoch + 1}" + ("" if saved is None else " with a folder"))
            files = {} if saved is None else self._packed(saved)
            record = self._ranks.run_on_rank_zero(lambda: self._make_record(epoch, metrics, state, best))
            self._ranks.begin_steps()
            best_state = state if best is None else best
            kept = self._curve.add(record, lambda: _copy_to_cpu(None if self.rank else best_state))
        except BaseException as error:
            if self.world > 1:  # the other ranks cannot continue
                self.failure = error
            raise
        self._epoch = None
        try:
            self.verdict = self._run.save_and_report(record, {"state": state, **files}, best=kept)
            if saved is not None and saved.resolve() == self._checkpoint.resolve():  # other folders are the user's
                self._ranks.run_on_rank_zero(lambda: empty_folder(saved))
        except BaseException as error:  # includes errors that the loop may catch: a lost claim, a stop
            self.failure = error
            raise
        return kept

    def _make_record(self, epoch: int, metrics: Any, state: Any, best: Any) -> EpochRecord:
        """Check the arguments of a report and return the record of the epoch."""
        numbers, metric = _to_floats(metrics), self._run.objective.metric
        if metric not in numbers:
            hint = suggest_names(metric, list(numbers))
            raise MetricError(metric, f"is not reported; {hint}; or change the objective's metric")
        record = {_add_val_prefix(name): number for name, number in numbers.items()}
        if len(record) < len(numbers):
            duplicate = next(name for name in numbers if f"val_{name}" in numbers)
            raise ObjectiveError(
                f"trial.report: {duplicate!r} and 'val_{duplicate}' are the same metric; report one of them"
            )
        if not math.isfinite(value := numbers[metric]):
            raise NonFiniteError(f"{metric} is {value}", epoch=epoch)
        for name in self._run.objective.reported:
            try:
                value = get_metric_value(record, name)
            except KeyError:
                remedy = "report the result of trial.measure(model, inputs)"
                hint = remedy if name in _MEASURABLE else suggest_names(name, [*numbers])
                raise MetricError(name, f"is required by the study but not reported; {hint}") from None
            if not math.isfinite(value):
                raise NonFiniteError(f"{name} is {value}", epoch=epoch)
        check_serializable(state, "state")
        check_serializable(best, "best")
        return EpochRecord(epoch, time.time(), {**record, "epoch_seconds": time.perf_counter() - self._started})

    def measure(self, model: nn.Module, inputs: Tree) -> dict[str, float]:
        """Measure latency and size of a model, for `report`. Call it on every rank, with an unsharded model.

        After the values are reported under these names, later epochs and resumed trials get the same values.

        Args:
            model: model on the trial's device; it is measured in evaluation mode, without gradients.
            inputs: a batch of the model's inputs; use one sample to get the latency per sample.

        Returns:
            `latency_ms`, the median time of a forward pass; `latency_load`, the load of the machine per core during the
            measurement; `model_mb`, the size of parameters and buffers in 10^6 bytes; `parameters`, the number of
            parameters.

        Raises:
            ObjectiveError: the model is sharded over devices, or cannot be called with the inputs.
        """
        history = self._curve.history
        last = history[-1].metrics if history else {}
        reported = {name: last[f"val_{name}"] for name in (*_MEASURABLE, "latency_load") if f"val_{name}" in last}
        if reported.keys() >= _MEASURABLE:
            return reported
        return self._ranks.run_on_rank_zero(lambda: measure_model(model, inputs, self.device))

    def _packed(self, folder: Path) -> dict[str, Any]:
        """Return the files of a folder on rank 0, after a check that all ranks see the same files."""
        found = self._ranks.all_gather_object(list_files(folder))
        if not found[0]:
            raise ObjectiveError(f"trial.report: folder {folder} has no files; save files there before trial.report")
        if others := [rank for rank, files in enumerate(found) if files != found[0]]:
            raise ObjectiveError(
                f"trial.report: rank {others[0]} sees other files in folder {folder} than rank 0; pass the same folder "
                "on all ranks, on a shared file system if the ranks are on several machines"
            )
        return {} if self.rank else {"folder": pack_folder(folder)}

    def barrier(self, doing: str) -> None:
        """Wait for the other ranks, and check that they are at the same point of their loops.

        Args:
            doing: description of the point, such as "reports epoch 3"; it must be equal on all ranks.

        Raises:
            ObjectiveError: a rank is at another point.
        """
        if self.world == 1:
            return
        found = self._ranks.all_gather_object((doing, self._ranks.should_stop()))
        if not self.rank and any(should_stop for _, should_stop in found):
            self._ranks.on_stop_request()
        if others := [rank for rank, (other, _) in enumerate(found) if other != found[0][0]]:
            raise ObjectiveError(
                f"the loops of the ranks differ: rank 0 {found[0][0]}, rank {others[0]} {found[others[0]][0]}; "
                "call trial.report once per epoch on every rank"
            )

    def log_artifact(self, path: Path | str) -> None:
        """Log a file to the trial's MLflow run. hpsearch sends the file when the attempt ends.

        In its name, `_` replaces characters that MLflow does not support, such as `#`, `?` and `%`.

        Raises:
            ObjectiveError: the path is that of a folder, a pipe or a device.
        """
        if (file := Path(path)).exists() and not file.is_file():
            raise ObjectiveError(f"trial.log_artifact({str(path)!r}) needs a file; pack a folder into an archive")
        self._run.logged.append(file)


def _add_val_prefix(name: str) -> str:
    return name if name == "lr" or name.startswith(("train_", "val_")) else f"val_{name}"


def remove_prefixes(metrics: Mapping[str, float], part: str) -> dict[str, float]:
    """Remove the prefixes `PART_` and `PART/`, such as `val_`, from metric names; replace any other `/` by `_`."""
    plain = [(name.replace("/", "_"), value) for name, value in metrics.items()]
    return {name.removeprefix(f"{part}_") or name: value for name, value in plain}


def _copy_to_cpu(tree: Any) -> Any:
    """Copy the tensors of a tree to the CPU, so that further training does not change the copies."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), tree)


def _to_floats(metrics: Any) -> dict[str, float]:
    """Convert metrics to floats.

    Raises:
        ObjectiveError: `metrics` is not a dictionary, or a value is not one number.
    """
    if not isinstance(metrics, Mapping):
        raise ObjectiveError(f"trial.report needs a dict such as {{'accuracy': 0.9}}, not {type(metrics).__name__}")
    found = {}
    for name, value in metrics.items():
        if not is_metric_name(name):
            raise ObjectiveError(f"trial.report: metric name {name!r} must be a text without control characters")
        size = value.numel() if isinstance(value, Tensor) else np.size(value)
        if not isinstance(value, (Real, Tensor, np.ndarray, np.bool_)) or size != 1:
            what = f"a {type(value).__name__} {list(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise ObjectiveError(f"trial.report: {name!r} must be one number, not {what}")
        found[name] = float(value.detach() if isinstance(value, Tensor) else value)
    return found


def _iterate_keys(tree: Any) -> Iterator[Any]:
    """Iterate over the keys of all dictionaries in a tree, and over the parts of tuples among them."""
    if isinstance(tree, Mapping):
        yield from (part for key in tree for _, part in leaves(key))
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _iterate_keys(value)


def _iterate_containers(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (Mapping, tuple, list)):
        yield tree
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _iterate_containers(value)


_CONTAINERS = (dict, list, tuple, OrderedDict, Counter, torch.Size)  # that torch.load accepts with weights_only=True
_MAX_BITS = 1024  # torch.load reads integers with up to about 2,040 bits
_PLAIN_TYPES = (bool, int, float, str, bytes, type(None))  # not their subclasses, such as enumerations


def _can_store(value: Any) -> bool:
    """Return whether a checkpoint can hold a leaf or a key; unusual tensors and large integers are tested."""
    if isinstance(value, Tensor):
        is_usual = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.__dict__
        return is_usual or is_readable(value)
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return is_readable(value)
    return type(value) in _PLAIN_TYPES


def check_serializable(tree: Any, what: str) -> None:
    """Check that a checkpoint can hold a state, so that a fault appears at the first report instead of at a resume.

    Raises:
        ObjectiveError: the state contains an object other than tensors and plain values; the message has its position
            and type.
    """
    for name, value in leaves(tree, what):
        if not _can_store(value):
            remedy = "pass its state_dict()" if hasattr(value, "state_dict") else "pass tensors and plain values"
            if type(value) is int:
                remedy = f"it has {value.bit_length()} bits, so pass it as a text"
            kind = type(value).__name__
            raise ObjectiveError(f"trial.report: {name!r} is of type {kind}, which a checkpoint cannot store; {remedy}")
    for container in _iterate_containers(tree):
        if type(container) not in _CONTAINERS:
            kind = type(container).__name__
            raise ObjectiveError(
                f"trial.report: {what!r} contains a {kind}, which a checkpoint cannot store; convert it to a dict, "
                "list or tuple"
            )
    for key in _iterate_keys(tree):
        if isinstance(key, Tensor) or not _can_store(key):
            kind = type(key).__name__
            raise ObjectiveError(
                f"trial.report: a key in {what!r} is of type {kind}, which a checkpoint cannot store; use plain texts "
                "and numbers as keys"
            )
