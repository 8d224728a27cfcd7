"""The session of a trial: checkpoints any machine finds, reports with the verdict after each epoch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpsearch.objectives.errors import ObjectiveError, nearest
from hpsearch.objectives.training.reproducibility.checkpoint import RunFiles
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import Curve, Due, Verdict
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.worker.checkpoints import TrialCheckpoints
from hpsearch.search.worker.context import WorkerContext
from hpsearch.storage.rungs.rungs import Standing
from hpsearch.storage.trials.claims import Claim, Reported

log = logging.getLogger(__name__)

Metrics = dict[str, float]

_ASKED = 0.05  # seconds between two looks at what is due: a step may take less than a tenth of a millisecond
_MARGIN = 2.0  # seconds that are kept free before a kill


NO_ROOM = "the budget has no room for its next epoch"


def where(state: dict[str, Any]) -> str:
    """Return after which epoch, and step of the next, a state is."""
    within = state.get("within")
    return f"after epoch {len(state['history'])}" + (f" and {within['sums']['steps']} steps" if within else "")


class TrialSession:
    """The session of a trial: checkpoints go where any machine finds them, reports to Optuna and MLflow."""

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
        """Return the newest state whose epoch the study has, wherever it was trained; None to start anew."""
        state = self.kept.restore()
        if state is not None:
            self.saved = where(state)
            log.info("trial %d: goes on %s", self._claim.number, self.saved)
        return state

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        """Save, and keep the state where another machine finds it; the report of its epoch makes it count."""
        began = time.monotonic()
        self.kept.save(state, best=best)
        self.saved = where(state)
        self._saving = time.monotonic() - began

    def due(self, left: Callable[[], float]) -> Due:
        """Leave the epoch where it would not end before the worker is killed; else save as often as was asked for."""
        now = time.monotonic()
        if now < self._ask_at:
            return Due.NOTHING
        self._ask_at = now + _ASKED
        self._context.pulse.beat()
        if self._context.is_stopping() and left() + 2 * self._saving + _MARGIN > self._context.shutdown.seconds_left():
            return Due.LEAVE
        return Due.SAVE if self._files.is_due(self._context.save_every_seconds) else Due.NOTHING

    def save_within(self, state: dict[str, Any]) -> None:
        """Save, and let the state count: the trial goes on from there, on any machine.

        Raises:
            ClaimLostError: the trial is no longer this worker's.
        """
        self.kept.save_within(state)
        if self.kept.pending is not None:  # else the store was away, and the trial would resume from before
            epoch = len(state["history"]) - 1
            self._context.claims.keep(self._claim, epoch, self.kept.pending)
            self.kept.committed(epoch)
            self.saved = where(state)

    def report(self, record: EpochRecord) -> Verdict:
        """Report an epoch to the study, once, and answer with the pruner's verdict or the order to stop.

        Raises:
            ClaimLostError: the trial is no longer this worker's; nothing was written.
        """
        # Before a run or a file of it is touched: a worker that lost its trial leaves no mark.
        spec = self._context.spec
        metrics = self._asked(record)
        vector = [metrics[name] for name in spec.ways] if spec.several else None
        reported = self._report(record.epoch, metrics[spec.metric], vector)
        self._context.pulse.beat()
        if not reported.counted:
            return Verdict.PAUSE.because(NO_ROOM)  # also after the last epoch: it is not written
        # Again after a crash: it may have been on its way from another machine, and MLflow keeps one copy.
        self._log_epoch(record.epoch, record.timestamp, record.metrics)
        stopped = reported.stopped or self._context.is_stopping()
        if record.epoch < max(self.curve.values):
            return Verdict.STOP if stopped else Verdict.CONTINUE  # the pruner decided before the restart
        # The last epoch is paid for: a full curve tells the sampler more than a pruned one.
        if record.epoch < spec.epochs - 1:
            best = self._asked(self.curve.best_until(record.epoch))
            trial = self._context.storage.get_trial(self._claim.trial_id)
            decision = self._context.pruner(
                trial, self.curve.values, reported=metrics, vector=[best[name] for name in spec.ways]
            )
            if decision.prune:
                return Verdict.PRUNE.because(decision)
            standing = self._reach_rung(record.epoch, best)
            if standing is not None and not standing.promoted:
                return Verdict.PAUSE.because(standing)
            if not reported.room:
                return Verdict.PAUSE.because(NO_ROOM)
        return Verdict.STOP if stopped else Verdict.CONTINUE

    def _asked(self, record: EpochRecord) -> dict[str, float]:
        """Return the metrics of a record that the study optimises or bounds, by name.

        Raises:
            ObjectiveError: one is missing; one line names it and the ones that were reported.
        """
        try:
            return self._context.spec.asked(record.metrics)
        except KeyError as missing:
            there = sorted({key.removeprefix("val_") for key in record.metrics if not key.startswith("train_")})
            raise ObjectiveError(f"metric {missing} is not reported{nearest(str(missing.args[0]), there)}") from None

    def _reach_rung(self, epoch: int, best: Mapping[str, float]) -> Standing | None:
        """Return where the trial stands if `epoch` is that of a rung; `best` are the metrics of its best epoch."""
        rungs, spec = self._context.rungs, self._context.spec
        if rungs is None or epoch + 1 not in rungs.epochs:
            return None
        value = [best[name] for name in spec.ways] if spec.several else best[spec.metric]
        rung = rungs.epochs.index(epoch + 1)
        return self._context.claims.reach(self._claim, rung, value, system=violations(spec, best))

    def _report(self, epoch: int, value: float, vector: list[float] | None) -> Reported:
        reported = self._context.claims.report(self._claim, epoch, value, self.kept.pending, metrics=vector)
        if reported.counted:
            self.kept.committed(epoch)
            self.curve.values.setdefault(epoch, value)
        return reported

    @property
    def last_value(self) -> float | list[float] | None:
        """What the last epoch reported, which is the value of a pruned trial; None before the first.

        Of several metrics also where this attempt, which began anew, has not come so far again.
        """
        values, spec = self.curve.values, self._context.spec
        if not values:
            return None
        last = max(values)
        if not spec.several:
            return values[last]
        if last >= self.curve.next_epoch or not math.isfinite(values[last]):
            return None
        metrics = self._asked(self.curve.history[last])
        return [metrics[name] for name in spec.ways]

    def log(self, path: Path) -> None:
        """Note a file that the run made; it is uploaded when the trial ends."""
        self.files.append(path)

    def keep_best(self) -> None:
        """Make the best checkpoint outlive a power cut: the trial is about to be settled, and relies on it."""
        self._files.sync_best()

    def report_non_finite(self, epoch: int) -> None:
        """Tell the sampler by a NaN at `epoch` that this region is infeasible."""
        ways = self._context.spec.ways
        self._report(epoch, math.nan, [math.nan] * len(ways) if len(ways) > 1 else None)


def violations(spec: StudySpec, reported: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each bound is broken, as system attributes that Optuna's samplers and dashboard read."""
    return {f"constraints:{bound.metric}": bound.violation(reported[bound.metric]) for bound in spec.bounds}
