"""One attempt of a worker at a trial: training session, epoch reports and the verdict after each epoch."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from sqlalchemy.exc import SQLAlchemyError

from hpsearch.objectives.errors import ObjectiveError, nearest
from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
from hpsearch.objectives.training.ranks import RankLostError, current
from hpsearch.objectives.training.reproducibility.checkpoint import RunFiles
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import RunResult
from hpsearch.objectives.training.session import Curve, Due, Verdict
from hpsearch.search.console import counted
from hpsearch.search.process import GracefulShutdown
from hpsearch.search.pruners.study_pruner import Decision, StudyPruner
from hpsearch.search.samplers.suggest import division_seed, suggest, training_seed
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.devices import pace_of
from hpsearch.search.study.study import StoredStudy, open_attempt_dir, remove_earlier
from hpsearch.search.tracking.tracker import Tracker
from hpsearch.search.tracking.trial_run import TrialTracking
from hpsearch.search.worker.checkpoints import TrialCheckpoints
from hpsearch.search.worker.ranks import Job, fit_together
from hpsearch.search.worker.watchdog import Pulse
from hpsearch.storage.attributes import BROKEN, FRESH, INFEASIBLE, PRUNING, REASON, REFIT, TRACKING
from hpsearch.storage.errors import CheckpointStoreError, ClaimLostError
from hpsearch.storage.rungs.rungs import Rungs, Standing
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claims import Claim, Claims, Reported
from hpsearch.storage.trials.lease import LeaseKeeper
from hpsearch.storage.trials.settle import Ended, Outcome


def violations(spec: StudySpec, reported: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each bound is broken, as system attributes that Optuna's samplers and dashboard read."""
    return {f"constraints:{bound.metric}": bound.violation(reported[bound.metric]) for bound in spec.bounds}


@dataclass(frozen=True)
class WorkerContext:
    """What all attempts of a worker share.

    Attributes:
        study: the study.
        sampled: the same, opened by Optuna for its sampler.
        objective: what is trained.
        claims: the worker's way to trials.
        lease: renews the lease of the trial that runs.
        pruner: decides on pruning.
        rungs: at which trials wait; None where they do not.
        tracker: takes what goes to MLflow.
        checkpoints: of the study.
        runs_dir: folder of the study's run directories on this machine.
        stopping: whether the worker was told to stop.
        shutdown: the seconds that are left then.
        pulse: beats while the worker gets on.
        save_every: seconds after which an epoch is saved in its midst; None for never.
        device: to train on; a GPU where there is one, unless given.
    """

    study: StoredStudy
    sampled: optuna.Study
    objective: BaseObjective
    claims: Claims
    lease: LeaseKeeper
    pruner: StudyPruner
    rungs: Rungs | None
    tracker: Tracker
    checkpoints: StudyCheckpoints
    runs_dir: Path
    stopping: Callable[[], bool]
    shutdown: GracefulShutdown
    pulse: Pulse
    save_every: float | None
    device: str | None

    @property
    def spec(self) -> StudySpec:
        """The study's spec."""
        return self.study.spec

    @property
    def storage(self) -> PostgresStorage:
        """The study's storage."""
        return self.study.storage


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
        if self._context.stopping() and left() + 2 * self._saving + _MARGIN > self._context.shutdown.seconds_left():
            return Due.LEAVE
        return Due.SAVE if self._files.is_due(self._context.save_every) else Due.NOTHING

    def save_within(self, state: dict[str, Any]) -> None:
        """Save, and let the state count: the trial goes on from there, on any machine.

        Raises:
            ClaimLostError: the trial is no longer this worker's.
        """
        self.kept.save_within(state)
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
        spec = self._context.spec
        metrics = self._asked(record)
        vector = [metrics[name] for name in spec.ways] if spec.several else None
        reported = self._report(record.epoch, metrics[spec.metric], vector)
        self._context.pulse.beat()
        if not reported.counted:
            return Verdict.PAUSE.because(NO_ROOM)  # also after the last epoch: it is not written
        # Again after a crash: it may have been on its way from another machine, and MLflow keeps one copy.
        self._log_epoch(record.epoch, record.timestamp, record.metrics)
        stopped = reported.stopped or self._context.stopping()
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
        pending = self.kept.pending
        stored = pending.stored if pending else None
        reported = self._context.claims.report(self._claim, epoch, value, stored, metrics=vector)
        if reported.counted:
            self.kept.committed()
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

    def forget(self, *, but_last: bool) -> None:
        """Remove what only a later attempt would need: the trial is settled, and its best checkpoint kept."""
        self.kept.forget(but_last=but_last)

    def report_non_finite(self, epoch: int) -> None:
        """Tell the sampler by a NaN at `epoch` that this region is infeasible."""
        ways = self._context.spec.ways
        self._report(epoch, math.nan, [math.nan] * len(ways) if len(ways) > 1 else None)


SERVICE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)


class Attempt:
    """Runs the trial of a claim in this process.

    Raises:
        CheckpointStoreError: the run directory cannot be made, and the trial was given back.
    """

    def __init__(self, context: WorkerContext, claim: Claim) -> None:
        self._context = context
        self._claim = claim
        self._tracked = TrialTracking(context.tracker, context.study, claim)
        self._session: TrialSession | None = None  # once the trial is configured
        try:
            self._run_dir = open_attempt_dir(context.runs_dir, claim)
        except OSError as error:  # a full disk costs no attempt
            context.claims.settle(claim, Outcome.RELEASED)
            raise CheckpointStoreError(f"{context.runs_dir}: no run directory can be made: {error.strerror}") from error

    def run(self) -> Ended | None:
        """Run the trial; return how it ended, or None where that is left to another attempt.

        Raises:
            CheckpointStoreError: the store is away; the trial was given back.
            RankLostError: a process that trains with this one is gone; the trial was left to others.
            Exception: one of `SERVICE_ERRORS`: the database is away.
        """
        log.info("trial %d: attempt %d", self._claim.number, self._claim.attempt)
        context = self._context
        try:
            with context.lease.renewing(self._claim), context.storage.owned(self._claim.trial_id, self._claim.attempt):
                context.pulse.attempt(partial(context.claims.expire, self._claim))
                return self._run()
        except ClaimLostError as lost:
            self._abandon(lost)
            return None
        except RankLostError:  # as if this process had died: others go on, and it counts as an attempt
            context.claims.expire(self._claim)
            self._tracked.leave()
            raise
        finally:
            context.pulse.rest()

    def _run(self) -> Ended | None:
        try:
            result = self._train()
        except NonFiniteError as error:
            assert self._session is not None
            self._session.report_non_finite(error.epoch)
            return self._infeasible(error)
        except DeviceMemoryError as error:
            return None if self._retry("memory", str(error)) else self._infeasible(error)
        except CheckpointStoreError:
            self._give_back(Outcome.RELEASED)
            raise
        except (ClaimLostError, RankLostError, *SERVICE_ERRORS):
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises ends its trial, not the worker
            return self._fail(error)
        if result.status != "stopped":
            return self._settle(result)
        if isinstance(standing := result.verdict.reason, Standing):  # this attempt has ended with that
            self._tracked.leave()
            place = (standing.rung, standing.rank, standing.reached)
            log.info("trial %d: paused at rung %d, rank %d of %d", self._claim.number, *place)
            return None
        self._give_back(Outcome.RELEASED)
        assert self._session is not None
        why = "" if result.verdict.reason is None else f": {result.verdict.reason}"
        log.info("trial %d: given back %s%s", self._claim.number, self._session.saved, why)
        return None

    def _train(self) -> RunResult:
        context, spec = self._context, self._context.spec
        self._tracked.open()
        config = suggest(context.objective, context.sampled, self._claim, spec)
        self._tracked.log_params()
        self._session = TrialSession(context, self._claim, self._run_dir, log_epoch=self._tracked.log_epoch)
        job = Job(
            trial=self._claim.number,
            attempt=self._claim.attempt,
            objective=spec.objective,
            metric=spec.metric,
            direction=spec.direction,
            also=spec.also_reported,
            config=config,
            epochs=spec.epochs,
            seed=training_seed(spec, self._claim.number),
            split_seed=spec.seed,
            division=division_seed(spec, self._claim.number),
            refit=spec.refit,
        )
        return fit_together(current(), context.objective, job, session=self._session, device=context.device)

    def _settle(self, result: RunResult) -> Ended:
        """Publish what was trained to its end, or pruned, and end the trial."""
        session = self._session
        assert session is not None
        session.keep_best()
        kept = self._tracked.publish(result, session.files)
        pace = pace_of([record.metrics for record in result.history])
        spec = self._context.spec
        if isinstance(decision := result.verdict.reason, Decision):
            grounds = decision.record()
            self._tracked.tag_pruning(grounds)
            last = spec.asked(result.history[-1].metrics)
            attrs = {PRUNING: grounds, **pace}
            ended = self._end(
                Outcome.PRUNED, decision.reason, value=session.last_value, attrs=attrs, kept=kept, metrics=last
            )
        else:
            value, told = result.best_value, pace
            reason = f"best {spec.metric} {value:.6g} at epoch {result.best_epoch + 1}"
            if result.fresh is not None:
                value, reason = result.fresh.value, f"{result.fresh.told(spec.metric)}; {reason}"
                told = {**pace, FRESH: result.fresh.record()}
            if spec.refit is not None:
                loss = result.history[-1].metrics["train_loss"]
                told = {**pace, REFIT: {"train_loss": loss}}
                reason = f"train loss {loss:.6g} after {counted(len(result.history), 'epoch')} on train and validation"
            best = {**spec.asked(result.best_metrics), spec.metric: value}
            vector = [best[name] for name in spec.ways]
            ended = self._end(Outcome.COMPLETE, reason, value=vector, attrs=told, kept=kept, metrics=best)
        session.forget(but_last=kept)
        remove_earlier(self._context.runs_dir, self._claim)
        return ended

    def _infeasible(self, error: Exception) -> Ended:
        """End a configuration that diverged or does not fit: the sampler learns from it."""
        value = self._session.last_value if self._session else None
        return self._end(Outcome.INFEASIBLE, str(error), value=value, attrs={INFEASIBLE: True})

    def _fail(self, error: BaseException) -> Ended | None:
        reason = " ".join(_as_text(f"{type(error).__name__}: {error}").split())
        if not isinstance(error, ObjectiveError):
            log.error("trial %d failed\n%s", self._claim.number, traceback.format_exc())
            with contextlib.suppress(OSError):  # a full disk must not hide why the trial failed
                report = self._run_dir / "error.txt"
                report.write_text(_as_text(traceback.format_exc()), encoding="utf-8")
                self._tracked.log_file(report)
        return None if self._retry("error", reason) else self._end(Outcome.FAILED, reason)

    def _retry(self, kind: str, reason: str) -> bool:
        """Give the trial back for another attempt, where the spec allows one after such an end."""
        spec = self._context.spec
        if kind not in spec.retry_on or self._context.claims.failures(self._claim) >= spec.retries:
            return False
        self._give_back(Outcome.FAILED, {REASON: reason})
        log.warning("trial %d: given back after %s", self._claim.number, reason)
        return True

    def _give_back(self, outcome: Outcome, attrs: dict[str, object] | None = None) -> None:
        self._context.claims.settle(self._claim, outcome, retry=True, attrs=attrs)
        self._tracked.leave()

    def _end(
        self,
        outcome: Outcome,
        reason: str,
        *,
        value: float | Sequence[float] | None = None,
        attrs: Mapping[str, object] | None = None,
        kept: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> Ended:
        # What `study.tell` does, but for the sampler's `after_trial`: constraints are written here.
        spec = self._context.spec
        out_of_bounds = [] if metrics is None else spec.out_of_bounds(metrics)
        if out_of_bounds:
            untold = [line for line in out_of_bounds if line not in reason]
            reason += f"; out of bounds: {', '.join(untold)}" if untold else ""
            self._tracked.tag_bounds(out_of_bounds)
        attrs = {REASON: reason, TRACKING: self._tracked.pending(), BROKEN: out_of_bounds or None, **(attrs or {})}
        attrs = {key: attr for key, attr in attrs.items() if attr is not None}
        system = {} if metrics is None else violations(spec, metrics)
        self._context.claims.settle(self._claim, outcome, value=value, attrs=attrs, system=system)
        log.info("trial %d: %s, %s", self._claim.number, outcome.trial_state, reason)
        self._tracked.finish(outcome, reason, kept=kept)
        return Ended(outcome, reason)

    def _abandon(self, lost: ClaimLostError) -> None:
        """Leave the trial, which is somebody else's by now, without a trace of this attempt."""
        log.warning("%s: letting go of it", lost)
        self._context.claims.let_go(self._claim)
        if self._session is not None:
            self._session.kept.abandon()
        self._tracked.abandon(str(lost))


def _as_text(message: str) -> str:
    """Return what an exception says without what neither a file nor a database takes: NUL, and halves of characters."""
    return message.replace("\0", "").encode("utf-8", "backslashreplace").decode()
