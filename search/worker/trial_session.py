"""The session of a trial, which stores checkpoints and reports epochs; each report returns a verdict."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpsearch.objectives.errors import ObjectiveError, suggest_names
from hpsearch.objectives.training.fold_metrics import select_fold_metrics
from hpsearch.objectives.training.reproducibility.checkpoint import RunFiles
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import Curve, MidEpochAction, Verdict
from hpsearch.search.process.children import end_if_forked
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.worker.checkpoints import TrialCheckpoints
from hpsearch.search.worker.context import WorkerContext
from hpsearch.storage.rungs.rungs import RungRank
from hpsearch.storage.trials.claim_results import Claim, ReportResult

log = logging.getLogger(__name__)

Metrics = dict[str, float]

_CHECK_INTERVAL_SECONDS = 0.05  # a step may take less than 0.1 ms
_KILL_MARGIN_SECONDS = 2.0  # safety margin before the process is killed


BUDGET_EXHAUSTED = "no budget left for another epoch"


def describe_position(state: dict[str, Any]) -> str:
    """Return the epoch and step of a training state as text."""
    within = state.get("within")
    return f"after epoch {len(state['history'])}" + (f" and {within['sums']['steps']} steps" if within else "")


class TrialSession:
    """Training session of a trial, with checkpoints in the study's store, and reports to Optuna and MLflow."""

    def __init__(
        self, context: WorkerContext, claim: Claim, run_dir: Path, *, log_epoch: Callable[[int, float, Metrics], None]
    ) -> None:
        files = RunFiles(run_dir, synced=False)  # a trial resumes from the store, which syncs its files
        self.run_dir = files.run_dir
        self.shards = files.shards
        self._files = files
        self._context = context
        self._pid = os.getpid()
        self._claim = claim
        self._log_epoch = log_epoch
        self.checkpoints = TrialCheckpoints(context.checkpoints, files, claim)
        spec = context.spec
        known = context.storage.get_trial(claim.trial_id).intermediate_values
        self.curve = Curve(spec.metric, maximize=spec.maximize, keep_last=spec.refit is not None, known=known)
        self.saved = "before the first epoch"  # position of the last checkpoint, as text
        self.files: list[Path] = []  # files of the run, to be uploaded at its end
        self._next_check = 0.0
        self._save_seconds = 0.0  # duration of the last save at the end of an epoch

    def restore(self) -> dict[str, Any] | None:
        """Return the newest state, from any machine, whose epoch was reported; None to start from scratch."""
        state = self.checkpoints.restore()
        if state is not None:
            self.saved = describe_position(state)
            log.info("trial %d: resuming %s", self._claim.number, self.saved)
        if self._context.startup is not None:
            self._context.startup.end()  # from here on, the training ends within the grace period
        self._context.claims.begin_training(self._claim)
        return state

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Save the state to the run directory and the store. The state becomes valid when its epoch is reported."""
        end_if_forked(self._pid)
        began = time.monotonic()
        self.checkpoints.save(state, best=best)
        self.saved = describe_position(state)
        self._save_seconds = time.monotonic() - began

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        """Return whether to save a mid-epoch checkpoint now, and whether to stop after saving.

        Args:
            left: function that returns the seconds until the end of the epoch. If the worker is shutting down and would
                be killed before the end of the epoch, the method returns SAVE_AND_STOP.
        """
        now = time.monotonic()
        if now < self._next_check:
            return MidEpochAction.NONE
        self._next_check = now + _CHECK_INTERVAL_SECONDS
        self._context.watchdog.beat()
        if (
            self._context.is_stopping()
            and left() + 2 * self._save_seconds + _KILL_MARGIN_SECONDS > self._context.shutdown.seconds_left()
        ):
            return MidEpochAction.SAVE_AND_STOP
        return MidEpochAction.SAVE if self._files.is_due(self._context.save_every_seconds) else MidEpochAction.NONE

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Save a mid-epoch state and write its pointer, so that any machine can resume from this state.

        Raises:
            ClaimLostError: another attempt owns the trial.
        """
        self.checkpoints.save_mid_epoch(state)
        if self.checkpoints.pending is not None:  # None if the store was unavailable
            epoch = len(state["history"]) - 1
            self._context.claims.record_mid_epoch_checkpoint(self._claim, epoch, self.checkpoints.pending)
            self.checkpoints.mark_committed(epoch)
            self.saved = describe_position(state)

    def report(self, record: EpochRecord) -> Verdict:
        """Report an epoch and return the verdict: continue, prune, pause or stop. An epoch is reported only once.

        Raises:
            ClaimLostError: another attempt owns the trial; nothing was written.
        """
        end_if_forked(self._pid)
        # The report comes first, because a worker that lost its trial must not change runs or files.
        spec = self._context.spec
        metrics = self._select_metrics(record)
        vector = [metrics[name] for name in spec.direction_by_metric] if spec.is_multi_objective else None
        key, count = self.curve.metric_key, spec.folds
        folds = None if count is None else select_fold_metrics(record.metrics, key, count)
        reported = self._report(record.epoch, metrics[spec.metric], vector, folds)
        self._context.watchdog.beat()
        if not reported.is_counted:
            return Verdict.PAUSE.with_reason(BUDGET_EXHAUSTED)  # also after the last epoch, which was not written
        # Epochs before a crash are logged again, because the other machine may not have sent them; MLflow removes
        # duplicates. The epochs of a copied checkpoint have other values than those that this trial has reported.
        if not spec.pruner.shares_checkpoints or self.curve.values[record.epoch] == metrics[spec.metric]:
            self._log_epoch(record.epoch, record.timestamp, record.metrics)
        stopped = reported.is_stopped or self._context.is_stopping()
        if record.epoch < max(self.curve.values):
            return Verdict.STOP if stopped else Verdict.CONTINUE  # the pruner decided before the restart
        # A trial is not pruned after its last epoch, because samplers learn more from a complete curve.
        if record.epoch < spec.epochs - 1:
            best = self._select_metrics(self.curve.find_best_up_to(record.epoch))
            trial = self._context.storage.get_trial(self._claim.trial_id)
            objectives = [best[name] for name in spec.direction_by_metric]
            decision = self._context.pruner(trial, self.curve.values, reported=metrics, objective_values=objectives)
            if decision.prune:
                return Verdict.PRUNE.with_reason(decision)
            rank = self._report_rung(record.epoch, metrics if spec.pruner.shares_checkpoints else best)
            if rank is not None and not rank.is_promoted:
                return Verdict.PAUSE.with_reason(rank)
            if not reported.has_budget:
                return Verdict.PAUSE.with_reason(BUDGET_EXHAUSTED)
        return Verdict.STOP if stopped else Verdict.CONTINUE

    def _select_metrics(self, record: EpochRecord) -> dict[str, float]:
        """Select, from the metrics of a record, those that the study optimizes or constrains, and return them by name.

        Raises:
            ObjectiveError: a metric is missing; the message has the reported metrics.
        """
        try:
            return self._context.spec.select_metrics(record.metrics)
        except KeyError as missing:
            names = sorted({key.removeprefix("val_") for key in record.metrics if not key.startswith("train_")})
            hint = suggest_names(str(missing.args[0]), names)
            raise ObjectiveError(f"metric {missing} is not reported{hint}") from None

    def _report_rung(self, epoch: int, best: Mapping[str, float]) -> RungRank | None:
        """If `epoch` is a rung, report the metrics `best` and return the trial's rank; else return None."""
        rungs, spec = self._context.rungs, self._context.spec
        if rungs is None or epoch + 1 not in rungs.epochs:
            return None
        value = [best[name] for name in spec.direction_by_metric] if spec.is_multi_objective else best[spec.metric]
        rung = rungs.epochs.index(epoch + 1)
        return self._context.claims.report_rung(self._claim, rung, value, system=measure_violations(spec, best))

    def _report(
        self, epoch: int, value: float, vector: list[float] | None, folds: list[float] | None = None
    ) -> ReportResult:
        stored = self.checkpoints.pending
        reported = self._context.claims.report(self._claim, epoch, value, stored, metrics=vector, folds=folds)
        if reported.is_counted:
            self.checkpoints.mark_committed(epoch)
            self.curve.values.setdefault(epoch, value)
        return reported

    @property
    def last_value(self) -> float | list[float] | None:
        """The value of the last epoch, which becomes the value of a pruned trial; None before the first epoch.

        In a multi-objective study, also None if the last reported epoch is of an earlier attempt and this attempt has
        not trained it again.
        """
        values, spec = self.curve.values, self._context.spec
        if not values:
            return None
        last = max(values)
        if not spec.is_multi_objective:
            return values[last]
        if last >= self.curve.next_epoch or not math.isfinite(values[last]):
            return None
        metrics = self._select_metrics(self.curve.history[last])
        return [metrics[name] for name in spec.direction_by_metric]

    def log(self, path: Path) -> None:
        """Record a file of the run. It is uploaded when the trial ends."""
        self.files.append(path)

    def keep_best(self) -> None:
        """Sync the best checkpoint to disk, so that the file survives a power failure after the end of the trial."""
        self._files.sync_best()

    def report_non_finite(self, epoch: int) -> None:
        """Report NaN at `epoch`, so that the sampler treats the configuration as infeasible."""
        n_metrics = len(self._context.spec.direction_by_metric)
        self._report(epoch, math.nan, [math.nan] * n_metrics if n_metrics > 1 else None)


def measure_violations(spec: StudySpec, reported: Mapping[str, float]) -> dict[str, float]:
    """Return the violation of each constraint as system attributes, which Optuna's samplers and dashboard read."""
    return {f"constraints:{bound.metric}": bound.violation(reported[bound.metric]) for bound in spec.constraint_bounds}
