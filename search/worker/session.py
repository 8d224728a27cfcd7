"""The session of a trial: stored checkpoints, and a report with a verdict after each epoch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpsearch.objectives.errors import ObjectiveError, suggest_names
from hpsearch.objectives.training.reproducibility.checkpoint import RunFiles
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import Curve, MidEpochAction, Verdict
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.worker.checkpoints import TrialCheckpoints
from hpsearch.search.worker.context import WorkerContext
from hpsearch.storage.rungs.rungs import RungRank
from hpsearch.storage.trials.claims import Claim, ReportResult

log = logging.getLogger(__name__)

Metrics = dict[str, float]

_CHECK_INTERVAL_SECONDS = 0.05  # a step may take less than 0.1 ms
_KILL_MARGIN_SECONDS = 2.0  # reserve before the process is killed


BUDGET_EXHAUSTED = "the budget has no room for its next epoch"


def describe_position(state: dict[str, Any]) -> str:
    """Return the epoch and step of a state, as text."""
    within = state.get("within")
    return f"after epoch {len(state['history'])}" + (f" and {within['sums']['steps']} steps" if within else "")


class TrialSession:
    """Session of a trial, with checkpoints in the study's store, and reports to Optuna and MLflow."""

    def __init__(
        self, context: WorkerContext, claim: Claim, run_dir: Path, *, log_epoch: Callable[[int, float, Metrics], None]
    ) -> None:
        files = RunFiles(run_dir, synced=False)  # the trial is resumed from the store, which syncs
        self.run_dir = files.run_dir
        self.shards = files.shards
        self._files = files
        self._context = context
        self._claim = claim
        self._log_epoch = log_epoch
        self.kept = TrialCheckpoints(context.checkpoints, files, claim)
        spec = context.spec
        known = context.storage.get_trial(claim.trial_id).intermediate_values
        self.curve = Curve(spec.metric, maximize=spec.maximize, keep_last=spec.refit is not None, known=known)
        self.saved = "at its beginning"  # after which epoch or step
        self.files: list[Path] = []  # what the run made, for whoever publishes it at the end
        self._ask_at = 0.0
        self._saving = 0.0  # seconds that the last epoch's took

    def restore(self) -> dict[str, Any] | None:
        """Return the newest state whose epoch the study has, from any machine; None to start from scratch."""
        state = self.kept.restore()
        if state is not None:
            self.saved = describe_position(state)
            log.info("trial %d: goes on %s", self._claim.number, self.saved)
        return state

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Save the state and store it; it counts once its epoch is reported."""
        began = time.monotonic()
        self.kept.save(state, best=best)
        self.saved = describe_position(state)
        self._saving = time.monotonic() - began

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        """Leave the epoch where it would not end before the worker is killed; else save as often as was asked for."""
        now = time.monotonic()
        if now < self._ask_at:
            return MidEpochAction.NONE
        self._ask_at = now + _CHECK_INTERVAL_SECONDS
        self._context.watchdog.beat()
        if (
            self._context.is_stopping()
            and left() + 2 * self._saving + _KILL_MARGIN_SECONDS > self._context.shutdown.seconds_left()
        ):
            return MidEpochAction.SAVE_AND_STOP
        return MidEpochAction.SAVE if self._files.is_due(self._context.save_every_seconds) else MidEpochAction.NONE

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Save, and let the state count: the trial goes on from there, on any machine.

        Raises:
            ClaimLostError: the trial is no longer this worker's.
        """
        self.kept.save_mid_epoch(state)
        if self.kept.pending is not None:  # else the store was away, and the trial would resume from before
            epoch = len(state["history"]) - 1
            self._context.claims.record_mid_epoch_checkpoint(self._claim, epoch, self.kept.pending)
            self.kept.committed(epoch)
            self.saved = describe_position(state)

    def report(self, record: EpochRecord) -> Verdict:
        """Report an epoch once; return the verdict of the pruner, the rungs, the budget or the stop signal.

        Raises:
            ClaimLostError: another attempt owns the trial; nothing was written.
        """
        # First of all, because a worker that lost its trial must not change runs or files.
        spec = self._context.spec
        metrics = self._asked(record)
        vector = [metrics[name] for name in spec.direction_by_metric] if spec.is_multi_objective else None
        reported = self._report(record.epoch, metrics[spec.metric], vector)
        self._context.watchdog.beat()
        if not reported.is_counted:
            return Verdict.PAUSE.with_reason(BUDGET_EXHAUSTED)  # also after the last epoch: it is not written
        # Again after a crash: it may have been on its way from another machine, and MLflow keeps one copy.
        self._log_epoch(record.epoch, record.timestamp, record.metrics)
        stopped = reported.is_stopped or self._context.is_stopping()
        if record.epoch < max(self.curve.values):
            return Verdict.STOP if stopped else Verdict.CONTINUE  # the pruner decided before the restart
        # A trial is not pruned after its last epoch: a full curve is worth more to the sampler.
        if record.epoch < spec.epochs - 1:
            best = self._asked(self.curve.best_up_to(record.epoch))
            trial = self._context.storage.get_trial(self._claim.trial_id)
            decision = self._context.pruner(
                trial, self.curve.values, reported=metrics, vector=[best[name] for name in spec.direction_by_metric]
            )
            if decision.prune:
                return Verdict.PRUNE.with_reason(decision)
            standing = self._reach_rung(record.epoch, best)
            if standing is not None and not standing.is_promoted:
                return Verdict.PAUSE.with_reason(standing)
            if not reported.has_room:
                return Verdict.PAUSE.with_reason(BUDGET_EXHAUSTED)
        return Verdict.STOP if stopped else Verdict.CONTINUE

    def _asked(self, record: EpochRecord) -> dict[str, float]:
        """Return the metrics of a record that the study optimises or bounds, by name.

        Raises:
            ObjectiveError: one is missing; one line names it and the ones that were reported.
        """
        try:
            return self._context.spec.select_metrics(record.metrics)
        except KeyError as missing:
            there = sorted({key.removeprefix("val_") for key in record.metrics if not key.startswith("train_")})
            raise ObjectiveError(
                f"metric {missing} is not reported{suggest_names(str(missing.args[0]), there)}"
            ) from None

    def _reach_rung(self, epoch: int, best: Mapping[str, float]) -> RungRank | None:
        """Return where the trial stands if `epoch` is that of a rung; `best` are the metrics of its best epoch."""
        rungs, spec = self._context.rungs, self._context.spec
        if rungs is None or epoch + 1 not in rungs.epochs:
            return None
        value = [best[name] for name in spec.direction_by_metric] if spec.is_multi_objective else best[spec.metric]
        rung = rungs.epochs.index(epoch + 1)
        return self._context.claims.report_rung(self._claim, rung, value, system=measure_violations(spec, best))

    def _report(self, epoch: int, value: float, vector: list[float] | None) -> ReportResult:
        reported = self._context.claims.report(self._claim, epoch, value, self.kept.pending, metrics=vector)
        if reported.is_counted:
            self.kept.committed(epoch)
            self.curve.values.setdefault(epoch, value)
        return reported

    @property
    def last_value(self) -> float | list[float] | None:
        """The value of the last epoch, which is the value of a pruned trial; None before the first.

        With several metrics, also None if this attempt restarted and has not reached that epoch again.
        """
        values, spec = self.curve.values, self._context.spec
        if not values:
            return None
        last = max(values)
        if not spec.is_multi_objective:
            return values[last]
        if last >= self.curve.next_epoch or not math.isfinite(values[last]):
            return None
        metrics = self._asked(self.curve.history[last])
        return [metrics[name] for name in spec.direction_by_metric]

    def log(self, path: Path) -> None:
        """Record a file of the run; it is uploaded when the trial ends."""
        self.files.append(path)

    def keep_best(self) -> None:
        """Sync the best checkpoint to disk, so that it survives a power failure after the trial is finished."""
        self._files.sync_best()

    def report_non_finite(self, epoch: int) -> None:
        """Report NaN at `epoch`, so that the sampler learns that the configuration is infeasible."""
        ways = self._context.spec.direction_by_metric
        self._report(epoch, math.nan, [math.nan] * len(ways) if len(ways) > 1 else None)


def measure_violations(spec: StudySpec, reported: Mapping[str, float]) -> dict[str, float]:
    """Return the violation of each bound, as the system attributes that Optuna's samplers and dashboard read."""
    return {f"constraints:{bound.metric}": bound.violation(reported[bound.metric]) for bound in spec.bounds}
