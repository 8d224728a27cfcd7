"""Train one model per fold of a cross-validation; the run reports the means of their metrics."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.evaluation.ensemble import Ensemble
from hpsearch.objectives.training.loop.epoch import require_same_run
from hpsearch.objectives.training.loop.guards import translate_torch_errors
from hpsearch.objectives.training.loop.measure_model import get_peak_memory, unwrap_model
from hpsearch.objectives.training.loop.prepare import combine_hashes
from hpsearch.objectives.training.loop.run import CHECKPOINT_FORMAT, MID_EPOCH_FORMAT, Run
from hpsearch.objectives.training.loop.step_functions import bind_export, get_forward_call
from hpsearch.objectives.training.reports.report import write_sections
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, make_reproducible
from hpsearch.objectives.training.result import FitResult, ResplitScore
from hpsearch.objectives.training.serving_module import build_example
from hpsearch.objectives.training.session import Curve, MidEpochAction, Session, Verdict
from hpsearch.objectives.training.trainer import BaseTrainer, Trainer, format_metrics

_SUMMED = frozenset({"epoch_seconds"})  # metrics that are summed over the folds; the others are averaged
_LARGEST = frozenset({"peak_memory_bytes"})


class _FoldCurve(Curve):
    """Learning curve of a fold, which keeps no weights: the mean over the folds selects the best epoch."""

    def add(self, record: EpochRecord, weights: Callable[[], Any]) -> bool:  # noqa: ARG002 as in the base class
        self._append(record)
        return False


class _FoldSession:
    """Session of a fold, which belongs to the session of the run.

    Args:
        owner: trainer of the run.
        index: index of the fold.
        curve: learning curve of the fold.
    """

    run_dir: Path | None = None
    shards: Path | None = None

    def __init__(self, owner: FoldsTrainer, index: int, curve: Curve) -> None:
        self._owner, self._index, self.curve = owner, index, curve
        self.restored: dict[str, Any] | None = None

    def restore(self) -> dict[str, Any] | None:
        state, self.restored = self.restored, None
        return state

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Do nothing: the run saves all folds together after each epoch."""

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        return self._owner.choose_mid_epoch_action(self._index, left)

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        self._owner.save_mid_epoch(self._index, state)

    def report(self, record: EpochRecord) -> Verdict:  # noqa: ARG002 part of the protocol
        return Verdict.CONTINUE

    def log(self, path: Path) -> None:
        """Do nothing: a fold writes no files."""


@dataclass
class _FoldRun:
    """Trainer and training state of one fold."""

    trainer: Trainer
    run: Run


class FoldsTrainer(BaseTrainer):
    """Cross-validation of one configuration: one model per fold, trained in turns, one epoch each.

    An epoch of this run is an epoch of all folds. Its metrics are the means over the folds. The best
    epoch and the patience are computed from the mean of the metric. A checkpoint contains all folds, and a run
    resumes within any epoch of any fold.

    The split seed determines the fold of each training and validation sample. The test split is the same for all folds.
    The model of the run is the `Ensemble` of the models of the folds.

    Args:
        objective: objective to train.
        config: configuration to train.
        plan: epochs, seeds and folds of the run.
        session: session that saves the run and may end it; None uses `LocalSession(run_dir)`.
        run_dir: directory for configuration, log and metrics; None uses the directory of the session.
        device: device name, such as "cpu" or "cuda:1"; None uses a GPU if available.

    Raises:
        ObjectiveError: the objective or the process cannot train folds.
    """

    def __init__(
        self,
        objective: BaseObjective,
        config: Any,
        plan: RunPlan,
        *,
        session: Session | None = None,
        run_dir: Path | None = None,
        device: str | None = None,
    ) -> None:
        assert plan.folds is not None
        super().__init__(config, plan, session=session, run_dir=run_dir, device=device)
        self.objective = check_folds(objective)
        if not self.ranks.is_single_process:
            raise ObjectiveError("--folds trains each trial on one device; remove --devices and --nodes, or --folds")
        maximize = self.objective.direction == "maximize"
        metric = self.objective.metric
        self._curve = self.curve or Curve(metric, maximize=maximize)
        self._sessions = [
            _FoldSession(self, index, _FoldCurve(metric, maximize=maximize)) for index in range(plan.folds)
        ]
        self._folds: list[_FoldRun] = []
        self._identity: dict[str, Any] = {}
        self._last_seconds = 0.0  # duration of the last epoch of a fold

    def fit(self) -> FitResult:
        """Train until all epochs are trained, the patience is exhausted, or the session ends the run.

        Raises:
            ObjectiveError, NonFiniteError, DeviceMemoryError: as in `Trainer.fit`.
        """
        switches = make_reproducible(
            deterministic=self.config.deterministic, matmul_precision=self.config.matmul_precision
        )
        with switches, self.files.logging(), translate_torch_errors(self.config, self.device):
            verdict = self._start()
            while verdict == Verdict.CONTINUE and not self._is_finished:
                verdict = self._epoch()
            return self._finish(verdict)

    @property
    def _is_finished(self) -> bool:
        patience = self.config.patience
        out_of_patience = patience is not None and self._curve.epochs_since_best >= patience
        return out_of_patience or self._curve.next_epoch >= self.plan.epochs

    def _start(self) -> Verdict:
        """Build the folds, and restore the last checkpoint, if there is one."""
        state = None if self.session is None else self.session.restore()
        states = [None] * len(self._sessions) if state is None else state.get("fold_states", [])
        if len(states) != len(self._sessions):
            raise ObjectiveError(f"the checkpoint belongs to another run: it has {len(states)} folds; use a new folder")
        for session, restored in zip(self._sessions, states, strict=True):
            session.restored = restored
            trainer = self._make_trainer(session)
            run = trainer.build()
            trainer.start(run)
            self._folds.append(_FoldRun(trainer, run))
        first = self._folds[0].run
        self._identity = {
            "format": CHECKPOINT_FORMAT,
            "objective": self.objective.name,
            "config": self.config.to_dict(),
            **self.plan.identity,
            "split_hash": combine_hashes([fold.run.identity["split_hash"] for fold in self._folds]),
        }
        if state is not None:
            require_same_run({**state, "format": CHECKPOINT_FORMAT}, self._identity)
            self._curve.load_state_dict(state)
            self.files.log.info("resumed after epoch %d", self._curve.next_epoch)
        resolved = {**self._identity, "environment": first.environment}
        return self._open(self._curve, resolved, first.git_diff, resumed_at=self._step if state else None)

    def _make_trainer(self, session: _FoldSession) -> Trainer:
        plan = self.plan
        assert plan.folds is not None
        index = self._sessions.index(session)
        trainer = Trainer(
            self.objective,
            self.config,
            epochs=plan.epochs,
            seed=derive_seed(plan.seed, "fold", index),
            split_seed=plan.split_seed,
            resplit_seed=plan.resplit_seed,
            fold=Fold(index, plan.folds),
            session=session,
            device=str(self.device),
        )
        trainer.files.log.parent = self.files.log
        trainer.files.log.setLevel(logging.WARNING)
        return trainer

    def _epoch(self) -> Verdict:
        """Train an epoch of each fold, then save and report the run."""
        epoch = self._curve.next_epoch
        for fold in self._folds:
            if fold.run.curve.next_epoch > epoch:  # trained before the run was interrupted within the epoch
                continue
            began = time.perf_counter()
            if (verdict := fold.trainer.run_epoch(fold.run)) != Verdict.CONTINUE:
                return verdict
            self._last_seconds = time.perf_counter() - began
        records = [fold.run.curve.history[epoch] for fold in self._folds]
        metrics = merge_metrics([record.metrics for record in records], f"val_{self.objective.metric}")
        record = EpochRecord(epoch, time.time(), metrics)
        best = self._curve.add(record, self._copy_weights)
        if self.session is not None:
            self.session.save(self._state_dict(), best=best)
        self.files.log.info("epoch %d%s %s", epoch + 1, " (best)" if best else "", format_metrics(metrics))
        return self._report(record)

    def choose_mid_epoch_action(self, index: int, left: Callable[[], float]) -> MidEpochAction:
        """Return the action of the run's session within an epoch of the fold at `index`."""
        if self.session is None:
            return MidEpochAction.NONE
        later = len(self._folds) - index - 1
        return self.session.mid_epoch_action(lambda: left() + later * max(self._last_seconds, left()))

    def save_mid_epoch(self, index: int, state: dict[str, Any]) -> None:
        """Save all folds; `state` is that of the fold at `index`, which is within an epoch."""
        assert self.session is not None
        folds = [fold.run.state_dict() for fold in self._folds]
        folds[index] = state
        self.session.save_mid_epoch(
            {**self._state_dict(folds), "format": MID_EPOCH_FORMAT, "within": {"sums": {"steps": self._step}}}
        )

    @property
    def _step(self) -> int:
        return sum(fold.run.step for fold in self._folds)

    @property
    def _notes(self) -> list[str]:
        return list(dict.fromkeys(note for fold in self._folds for note in fold.run.resume_notes))

    def _copy_weights(self) -> dict[str, Any]:
        """Return a copy of the weights of the ensemble."""
        weights = [fold.run.copy_weights() for fold in self._folds]
        return {f"models.{index}.{name}": tensor for index, own in enumerate(weights) for name, tensor in own.items()}

    def _state_dict(self, folds: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {
            **self._identity,
            "environment": self._folds[0].run.environment,
            "notes": self._notes,
            "fold_states": [fold.run.state_dict() for fold in self._folds] if folds is None else folds,
            "step": self._step,
            **self._curve.state_dict(),
        }

    def _finish(self, verdict: Verdict) -> FitResult:
        """Return the result; a run that will not be resumed also passes its files to the session."""
        runs = [fold.run for fold in self._folds]
        models = [unwrap_model(run.eval_model).cpu().eval() for run in runs]
        ensemble, best = Ensemble(models), self._curve.best
        if best:
            ensemble.load_state_dict(best["model"])
        first = runs[0]
        shared = self._shared_result(self._curve, verdict, self._notes, finished=self._is_finished)
        is_scored = self.plan.resplit_seed is not None and shared["status"] == "completed"
        result = FitResult(
            **shared,
            model=ensemble,
            example=build_example(first.splits.val),
            call=get_forward_call(first.step_function),
            export=bind_export(self.objective, self.config),
            split_hash=self._identity["split_hash"],
            val=first.splits.val,
            memory=get_peak_memory(first.device),
            resplit_score=self._score() if is_scored else None,
        )
        self.files.log.info("%s: best epoch %d, %.6g", result.status, result.best_epoch + 1, result.best_value)
        if result.status != "stopped":
            names = list(dict.fromkeys(("loss", self.objective.metric)))
            self._log_files(self.files.finish(result, names, partial(self._write_report, result)))
        return result

    def _score(self) -> ResplitScore:
        """Return the score of a run on a new division, without the optimism of the choice of its best epoch."""
        curves = [[record.metrics[self._curve.metric_key] for record in fold.run.curve.history] for fold in self._folds]
        splits = self._folds[0].run.splits
        sizes = len(splits.train), sum(len(fold.run.splits.val) for fold in self._folds), len(splits.test)
        is_by_time = splits.blocks is not None and splits.blocks.ordered  # the windows do not depend on a seed
        return score_folds(curves, maximize=self._curve.maximize, sizes=sizes, has_new_split=not is_by_time)

    def _write_report(self, result: FitResult, path: Path, steps: list[dict[str, Any]]) -> None:  # noqa: ARG002
        metric, best = self.objective.metric, result.best_epoch
        rows = [
            f"| {number} | {len(fold.run.splits.train)} | {len(fold.run.splits.val)} | "
            f"{fold.run.curve.history[best].metrics[self._curve.metric_key]:.6g} |"
            for number, fold in enumerate(self._folds, start=1)
        ]
        title = f"{self.objective.name}: {result.status}, best {metric} {result.best_value:.6g}"
        write_sections(
            path,
            {
                title: [f"- best epoch {best + 1} of {len(result.history)} trained, {self.plan.epochs} planned"],
                f"{len(rows)} folds": [f"| fold | train | validation | {metric} |", "|---|---|---|---|", *rows],
            },
        )


def check_folds(objective: BaseObjective) -> Objective:
    """Return the objective if its models can be trained on folds and averaged.

    Raises:
        ObjectiveError: the objective has a custom loop, or overrides `step` or `evaluate`.
    """
    if not isinstance(objective, Objective):
        raise ObjectiveError(
            f"--folds is not available for {objective.name}, because its custom loop splits the data; remove --folds"
        )
    for method in ("step", "evaluate"):
        if overrides(objective, method):
            raise ObjectiveError(
                f"--folds is not available for {type(objective).__name__}, because its {method}() may call more than "
                "the forward() of the model, and the models of the folds are averaged; remove --folds"
            )
    return objective


def merge_metrics(folds: list[Mapping[str, float]], key: str) -> dict[str, float]:
    """Return the metrics of a run from those of its folds: means, and for the metric `key` also each fold's value.

    The result also contains the standard error of the mean of `key`, as ``{key}_se``. Folds share training samples, so
    it is too small by an unknown factor (Bengio and Grandvalet 2004, *Journal of Machine Learning Research* 5).
    """
    merged = {name: _merge(name, [fold[name] for fold in folds if name in fold]) for name in folds[0]}
    values = [fold[key] for fold in folds]
    merged[f"{key}_se"] = _compute_standard_error(values)
    return merged | {_get_fold_key(key, number): value for number, value in enumerate(values, start=1)}


def select_fold_metrics(metrics: Mapping[str, float], key: str, folds: int) -> list[float]:
    """Return the values of the metric `key` in each fold, from the metrics of a run with folds."""
    return [metrics[_get_fold_key(key, number)] for number in range(1, folds + 1)]


def _get_fold_key(key: str, number: int) -> str:
    return f"{key}_fold_{number}"


def _compute_standard_error(values: list[float]) -> float:
    """Return the standard error of the mean; NaN if a value is not finite, which `stdev` rejects."""
    return stdev(values) / math.sqrt(len(values)) if all(map(math.isfinite, values)) else math.nan


def _merge(name: str, values: list[float]) -> float:
    if name in _SUMMED:
        return math.fsum(values)
    return max(values) if name in _LARGEST else fmean(values)


def score_folds(
    curves: list[list[float]], *, maximize: bool, sizes: tuple[int, int, int], has_new_split: bool = True
) -> ResplitScore:
    """Return the score of a cross-validation: each fold is scored at the epoch that the other folds select.

    Args:
        curves: metric by fold and epoch [folds, epochs].
        maximize: whether higher values are better.
        sizes: numbers of training samples of a fold, of validation samples of all folds, and of test samples.
        has_new_split: whether the division into folds differs from that of the study.
    """
    sign = 1.0 if maximize else -1.0
    epochs = range(len(curves[0]))

    def find_best(chosen: list[list[float]]) -> int:
        return max(epochs, key=lambda epoch: (sign * math.fsum(curve[epoch] for curve in chosen), -epoch))

    selected = [find_best(curves[:index] + curves[index + 1 :]) for index in range(len(curves))]
    values = [curve[epoch] for curve, epoch in zip(curves, selected, strict=True)]
    best = find_best(curves)
    return ResplitScore(
        value=fmean(values),
        optimism=fmean(curve[best] for curve in curves) - fmean(values),
        error=_compute_standard_error(values),
        epochs=tuple(selected),
        has_new_split=has_new_split,
        sizes=sizes,
    )
