"""The training loop, read from top to bottom; its parts stand in the modules beside it."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from objectives.errors import ObjectiveError
from objectives.training.config import TrainConfig
from objectives.training.data import Dataset
from objectives.training.environment import differences, environment
from objectives.training.epoch import train_epoch
from objectives.training.guards import NonFiniteError, telling_out_of_memory
from objectives.training.progress import Progress
from objectives.training.reproducibility import reproducible, set_seed
from objectives.training.run import Run, build
from objectives.training.run_dir import RunDir
from objectives.training.session import EpochRecord, LocalSession, Session, Verdict

if TYPE_CHECKING:
    from objectives.objective import Objective

FORMAT = 1  # of a checkpoint's state
_IDENTITY = ("format", "objective", "config", "epochs", "seed", "split_seed", "split_hash")


@dataclass
class FitResult:
    """What a run came to.

    Attributes:
        status: "completed" (also by patience), "pruned", or "stopped" to be resumed later.
        best_epoch: 0-based, by the validation metric.
        best_value: the objective's metric at the best epoch.
        best_metrics: all numbers of the best epoch.
        history: one record an epoch, those before a resume included.
        model: with the weights of the best epoch, in evaluation mode, on the CPU.
        example: four validation inputs, raw, as the model takes them, on the CPU.
        val: the validation split, on the CPU: what `best_value` was measured on.
        best_path, last_path: checkpoints in the run's directory, where there are any.
        split_hash: SHA-256 of the data as it was split.
        resume_note: how this machine differs from the one resumed from, so that the run is not exact; else None.
    """

    status: Literal["completed", "pruned", "stopped"]
    best_epoch: int
    best_value: float
    best_metrics: dict[str, float]
    history: list[EpochRecord]
    model: nn.Module
    example: Tensor
    val: Dataset
    best_path: Path | None
    last_path: Path | None
    split_hash: str
    resume_note: str | None = None


class Trainer:
    """Trains one configuration of an objective.

    Args:
        objective: what to train.
        config: how.
        epochs: length of the run; schedules are laid out over it.
        seed: of initial weights, order and dropout.
        split_seed: of the data's split, the same for a whole study; `seed` unless given.
        session: where the run is kept and who may end it; `LocalSession(run_dir)` unless given.
        run_dir: where configuration, log, numbers and plots go; none are written without it.
        device: such as "cpu" or "cuda:1"; an accelerator where there is one, unless given.

    Example:
        >>> result = Trainer(Digits(), TrainConfig(lr=3e-3), epochs=20, seed=0).fit()
        >>> result.best_value
    """

    def __init__(
        self,
        objective: Objective,
        config: TrainConfig,
        *,
        epochs: int,
        seed: int,
        split_seed: int | None = None,
        session: Session | None = None,
        run_dir: Path | None = None,
        device: str | None = None,
    ) -> None:
        if not isinstance(config, TrainConfig):
            raise ObjectiveError(f"the configuration must be a TrainConfig, not {type(config).__name__}")
        if epochs < 1:
            raise ObjectiveError(f"epochs must be at least 1, not {epochs}")
        if run_dir is None and isinstance(session, LocalSession):
            run_dir = session.run_dir
        self.objective, self.config, self.epochs = objective, config, epochs
        self.seed, self.split_seed = seed, seed if split_seed is None else split_seed
        self.session: Session | None = session or (LocalSession(run_dir) if run_dir else None)
        self.files = RunDir(run_dir)
        self.device = _device(device)
        self.progress = Progress(f"val_{objective.metric}", objective.direction == "maximize")

    def fit(self) -> FitResult:
        """Trains until the budget or the patience is spent, or the session ends it.

        Raises:
            ObjectiveError: the objective or its data are wrong: found before training.
            NonFiniteError: the loss, its gradient or a validation number is NaN or infinite.
            DeviceMemoryError: the configuration does not fit the device.
        """
        deterministic = reproducible(deterministic=self.config.deterministic)
        with deterministic, self.files.logging(), telling_out_of_memory(self.config, self.device):
            self.progress = Progress(self.progress.key, self.progress.maximize)
            run, untrained = build(
                self.objective,
                self.config,
                epochs=self.epochs,
                seed=self.seed,
                split_seed=self.split_seed,
                device=self.device,
            )
            verdict, note = self._resume(run, untrained)
            while verdict is Verdict.CONTINUE and not self._finished():
                verdict = self._epoch(run)
            return self._finish(run, verdict, note)

    def _epoch(self, run: Run) -> Verdict:
        """Train, validate, keep, report: in this order, so that a death at any point loses no reported epoch."""
        epoch, started = self.progress.next_epoch, time.perf_counter()
        set_seed(self.seed, "epoch", epoch)
        train = train_epoch(run, epoch)
        trained = time.perf_counter()
        val = run.validate()
        self._require_finite(val, run, epoch)
        speed = {
            "lr": train.pop("lr"),
            "grad_norm": train.pop("grad_norm"),
            "samples_per_second": train.pop("samples") / (trained - started),
            "epoch_seconds": time.perf_counter() - started,
        }
        sides = {f"train_{name}": v for name, v in train.items()} | {f"val_{name}": v for name, v in val.items()}
        record = EpochRecord(epoch, time.time(), sides | speed)
        best = self.progress.add(record, run.weights)
        if self.session is not None:
            self.session.save(self._state(run), best=best)
        return self._report(record, best=best)

    def _report(self, record: EpochRecord, *, best: bool) -> Verdict:
        shown = " ".join(f"{name}={value:.5g}" for name, value in record.metrics.items())
        self.files.log.info("epoch %d %s%s", record.epoch, shown, " (best)" if best else "")
        self.files.record(record)
        return Verdict.CONTINUE if self.session is None else self.session.report(record)

    def _finished(self) -> bool:
        patience = self.config.patience
        out_of_patience = patience is not None and self.progress.stale >= patience
        return out_of_patience or self.progress.next_epoch >= self.epochs

    def _require_finite(self, val: dict[str, float], run: Run, epoch: int) -> None:
        for name in ("loss", self.objective.metric):
            if not math.isfinite(val[name]):
                lr = float(run.optimizer.param_groups[0]["lr"])
                raise NonFiniteError(
                    f"val_{name} is {val[name]}", epoch=epoch, step=run.step, lr=lr, grad_norm=None, batch=None
                )

    def _identity(self, run: Run) -> dict[str, Any]:
        """What makes a run this run: a checkpoint of another is refused."""
        name, config = self.objective.name, self.config.to_dict()
        values = (FORMAT, name, config, self.epochs, self.seed, self.split_seed, run.split_hash)
        return dict(zip(_IDENTITY, values, strict=True))

    def _state(self, run: Run) -> dict[str, Any]:
        return {**self._about, **run.state_dict(), **self.progress.state_dict()}

    def _resume(self, run: Run, untrained: dict[str, float]) -> tuple[Verdict, str | None]:
        """Starts anew, or restores the last checkpoint and reports its epochs again."""
        state = self.session.restore() if self.session is not None else None
        if state is None:
            self.files.start(self._about, resumed=False)
            shown = " ".join(f"val_{name}={value:.5g}" for name, value in untrained.items())
            self.files.log.info("start %s on %s, untrained %s", self.objective.name, self.device, shown)
            return Verdict.CONTINUE, None
        _same_run({key: state.get(key) for key in self._about}, {**self._about, "environment": state["environment"]})
        try:
            run.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            detail = str(error).splitlines()[0]
            raise ObjectiveError(f"the checkpoint does not fit the objective's code of today: {detail}") from error
        self.progress.load_state_dict(state)
        self.files.start(self._about, resumed=True)
        note = differences(state["environment"], self._about["environment"]) or None
        self.files.log.info(
            "resume after epoch %d%s", self.progress.next_epoch - 1, f", not exact: {note}" if note else ""
        )
        for record in self.progress.history:
            self.files.record(record)
            verdict = self.session.report(record) if self.session is not None else Verdict.CONTINUE
            if verdict is not Verdict.CONTINUE:
                return verdict, note
        return Verdict.CONTINUE, note

    def _finish(self, run: Run, verdict: Verdict, note: str | None) -> FitResult:
        """The best weights, and the run's files handed over; a stopped run hands over nothing yet."""
        status: Literal["completed", "pruned", "stopped"] = "completed"
        if verdict is Verdict.PRUNE:
            status = "pruned"
        elif not self._finished():
            status = "stopped"
        best, val = self.progress.best, run.splits.val
        run.judged.load_state_dict(best["model"])
        model = run.judged.cpu().eval()
        self.files.log.info("%s: best epoch %d, %s=%.6g", status, best["epoch"], self.progress.key, best["value"])
        if status != "stopped":
            for path in self.files.finish(self.progress.history, self.objective.metric, best["epoch"]):
                if self.session is not None:
                    self.session.log(path)
        return FitResult(
            status=status,
            best_epoch=best["epoch"],
            best_value=best["value"],
            best_metrics=dict(best["metrics"]),
            history=list(self.progress.history),
            model=model,
            example=val.x[torch.arange(4) % len(val)],
            val=val,
            best_path=self._existing("best.pt"),
            last_path=self._existing("last.pt"),
            split_hash=run.split_hash,
            resume_note=note,
        )

    def _existing(self, name: str) -> Path | None:
        path = self.files.path / name if self.files.path else None
        return path if path and path.exists() else None


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        detail = str(error).strip().splitlines()[0]
        raise ObjectiveError(f"device {name!r} cannot be used: {detail}") from error
    return device


def _same_run(state: dict[str, Any], identity: dict[str, Any]) -> None:
    for key, value in identity.items():
        then = state.get(key)
        if then == value:
            continue
        if key == "config":
            _same_run(then, value)
        raise ObjectiveError(f"the checkpoint is of another run: {key} is {then!r} there and {value!r} here")
