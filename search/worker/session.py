"""The session of a trial: what the training loop's reports do to the study and to the trial's MLflow run."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.session import Due, LocalSession, Verdict
from hpsearch.search.pruning import Decision
from hpsearch.search.worker.checkpoints import TrialCheckpoints
from hpsearch.search.worker.context import WorkerContext
from hpsearch.search.worker.epoch_values import EpochValues, violations
from hpsearch.storage.files import sync_folder
from hpsearch.storage.rungs.rungs import Standing
from hpsearch.storage.trials.claims import Claim, Reported

log = logging.getLogger(__name__)

Metrics = dict[str, float]

_ASKED = 0.05  # seconds between two looks at what is due: a step may take less than a tenth of a millisecond
_MARGIN = 2.0  # seconds that are kept free before a kill


def where(state: dict[str, Any]) -> str:
    """Return after which epoch, and step of the next, a state is."""
    within = state.get("within")
    return f"after epoch {len(state['history'])}" + (f" and {within['sums']['steps']} steps" if within else "")


class TrialSession(LocalSession):
    """Files as in :class:`LocalSession`; checkpoints go where any machine finds them, reports to Optuna and MLflow."""

    def __init__(
        self, context: WorkerContext, claim: Claim, run_dir: Path, *, log_epoch: Callable[[int, float, Metrics], None]
    ) -> None:
        # The store syncs what it takes, and from there it is resumed.
        super().__init__(run_dir, save_every=context.save_every, synced=False)
        self._context = context
        self._claim = claim
        self._log_epoch = log_epoch
        self.kept = TrialCheckpoints(context.checkpoints, self, claim)
        self.decision: Decision | None = None  # the last one
        self.standing: Standing | None = None  # at the last rung
        self.cut = False  # whether the study's budget in epochs or seconds has no room for the trial's next epoch
        self.saved = "at its beginning"  # after which epoch or step
        self.files: list[Path] = []  # what the run made, for whoever publishes it at the end
        self._ask_at = 0.0
        self._saving = 0.0  # seconds that the last epoch's took
        self._values = dict(context.storage.get_trial(claim.trial_id).intermediate_values)
        self.epochs = EpochValues(context.spec)

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
        with self.kept.saving(state, best=best):
            super().save(state, best=best)
        self.saved = where(state)
        self._saving = time.monotonic() - began

    def due(self, left: Callable[[], float]) -> Due:
        """Leave the epoch where it would not end before the worker is killed; else save as often as was asked for."""
        now = time.monotonic()
        if now < self._ask_at:
            return Due.NOTHING
        self._ask_at = now + _ASKED
        self._context.pulse.beat()
        if self._context.stopping() and left() + 2 * self._saving + _MARGIN > self._context.leaving.left():
            return Due.LEAVE
        return super().due(left)

    def save_within(self, state: dict[str, Any]) -> None:
        """Save, and let the state count: the trial goes on from there, on any machine.

        Raises:
            ClaimLostError: the trial is no longer this worker's.
        """
        with self.kept.saving_within(state):
            super().save_within(state)
        if (pending := self.kept.pending) is not None:  # else the store was away, and the trial goes on from before
            self._context.claims.keep(self._claim, pending.epoch, pending.stored)
            self.kept.committed()
            self.saved = where(state)

    def report(self, record: EpochRecord) -> Verdict:
        """Report an epoch to the study, once, and answer with the pruner's verdict or the order to stop.

        Raises:
            ClaimLostError: the trial is no longer this worker's; nothing was written.
        """
        # Before a run or a file of it is touched: a worker that lost its trial leaves no mark.
        metrics = self.epochs.add(record.epoch, record.metrics)
        vector = self.epochs.vector(record.epoch) if self._context.spec.several else None
        reported = self._report(record.epoch, metrics[self._context.spec.metric], vector)
        self._context.pulse.beat()
        if not reported.counted:
            self.cut = True
            return Verdict.PAUSE  # also after the last epoch: it is not written
        # Again after a crash: it may have been on its way from another machine, and MLflow keeps one copy.
        self._log_epoch(record.epoch, record.timestamp, record.metrics)
        stopped = reported.stopped or self._context.stopping()
        if record.epoch < max(self._values):
            return Verdict.STOP if stopped else Verdict.CONTINUE  # the pruner decided before the restart
        # The last epoch is paid for: a full curve tells the sampler more than a pruned one.
        if record.epoch < self._context.spec.epochs - 1:
            self.decision = self._context.pruner(
                self._frozen(), reported=metrics, vector=self.epochs.vector(self.epochs.best(record.epoch))
            )
            if self.decision.prune:
                return Verdict.PRUNE
            if not self._goes_on(record.epoch):
                return Verdict.PAUSE
            if not reported.room:
                self.cut = True
                return Verdict.PAUSE
        return Verdict.STOP if stopped else Verdict.CONTINUE

    def _goes_on(self, epoch: int) -> bool:
        """Whether the trial goes on after an epoch, which may be that of a rung at which others are better."""
        rungs = self._context.rungs
        if rungs is None or epoch + 1 not in rungs.epochs:
            return True
        best, spec = self.epochs.best(epoch), self._context.spec
        value = self.epochs.vector(best) if spec.several else self.epochs.of(best)[spec.metric]
        self.standing = self._context.claims.reach(
            self._claim, rungs.epochs.index(epoch + 1), value, system=violations(spec, self.epochs.of(best))
        )
        return self.standing.promoted

    def _report(self, epoch: int, value: float, vector: list[float] | None) -> Reported:
        pending = self.kept.pending
        stored = pending.stored if pending else None
        reported = self._context.claims.report(self._claim, epoch, value, stored, metrics=vector)
        if reported.counted:
            self.kept.committed()
            self._values.setdefault(epoch, value)
        return reported

    def _frozen(self) -> FrozenTrial:
        frozen = self._context.storage.get_trial(self._claim.trial_id)
        frozen.intermediate_values = dict(self._values)
        return frozen

    @property
    def last_value(self) -> float | list[float] | None:
        """What the last epoch reported, which is the value of a pruned trial; None before the first.

        Of several metrics also where this attempt, which began anew, has not come so far again.
        """
        if not self._values:
            return None
        last = max(self._values)
        if not self._context.spec.several:
            return self._values[last]
        return self.epochs.vector(last) if last in self.epochs and math.isfinite(self._values[last]) else None

    def log(self, path: Path) -> None:
        """Note a file that the run made; it is uploaded when the trial ends."""
        self.files.append(path)

    def keep_best(self) -> None:
        """Make the best checkpoint outlive a power cut: the trial is about to be settled, and relies on it."""
        if self.best_path.exists():
            with self.best_path.open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(self.run_dir)

    def forget(self, *, but_last: bool) -> None:
        """Remove what only a later attempt would need: the trial is settled, and its best checkpoint kept."""
        self.kept.forget(but_last=but_last)

    def report_non_finite(self, epoch: int) -> None:
        """Tell the sampler by a NaN at `epoch` that this region is infeasible."""
        ways = self._context.spec.ways
        self._report(epoch, math.nan, [math.nan] * len(ways) if len(ways) > 1 else None)
