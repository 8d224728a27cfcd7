"""An attempt: one execution of a trial by a worker, with training, epoch reports and the end of the trial."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import optuna
from sqlalchemy.exc import SQLAlchemyError

from hpsearch.objectives.errors import ObjectiveError, format_traceback, get_message
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
from hpsearch.objectives.training.rank_errors import RankLostError
from hpsearch.objectives.training.reproducibility.seeds import keep_torch_defaults
from hpsearch.objectives.training.result import FitResult, RunResult
from hpsearch.search.console import pluralize
from hpsearch.search.process.children import end_if_forked
from hpsearch.search.pruners.study_pruner import Decision
from hpsearch.search.samplers.suggest import derive_training_seed, get_resplit_seed, suggest
from hpsearch.search.study.device_summary import summarize_throughput
from hpsearch.search.study.folders import open_attempt_dir, remove_earlier_attempts
from hpsearch.search.study.ranking import get_schedule
from hpsearch.search.tracking.trial_run import TrialTracking
from hpsearch.search.worker.context import WorkerContext
from hpsearch.search.worker.rank_jobs import Job, fit_on_all_ranks
from hpsearch.search.worker.trial_session import TrialSession, measure_violations
from hpsearch.storage.attributes import (
    DATA_SHA256,
    FOLDS_ERROR,
    INFEASIBLE,
    PRUNING,
    REASON,
    REFIT,
    RESPLIT_SCORE,
    TRACKING,
    VIOLATIONS,
)
from hpsearch.storage.errors import CheckpointStoreError, ClaimLostError, find_full_disk
from hpsearch.storage.rungs.rungs import RungRank
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.finishing import Outcome, TrialEnd

log = logging.getLogger(__name__)

SERVICE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)


class Attempt:
    """One execution of a claimed trial in this process.

    Raises:
        CheckpointStoreError: the run directory cannot be created. The trial was released.
    """

    def __init__(self, context: WorkerContext, claim: Claim) -> None:
        self._context = context
        self._claim = claim
        self._tracked = TrialTracking(context.tracker, context.study, claim)
        self._session: TrialSession | None = None  # set when the trial is configured
        try:
            self._run_dir = open_attempt_dir(context.runs_dir, claim)
        except OSError as error:  # a full disk does not count as a failed attempt
            context.claims.finish_attempt(claim, Outcome.RELEASED)
            raise CheckpointStoreError(f"{context.runs_dir}: run directory not created: {error.strerror}") from error

    def run(self) -> TrialEnd | None:
        """Run the trial; return how it ended, or None if it has not ended and another attempt will continue it.

        Raises:
            CheckpointStoreError: the checkpoint store is unavailable, or the objective cannot write because the disk is
                full. The trial was released.
            RankLostError: a rank ended or does not answer. Other workers can claim the trial.
            Exception: the database is unavailable; the exception is one of `SERVICE_ERRORS`.
        """
        log.info("trial %d: starting attempt %d", self._claim.number, self._claim.attempt)
        context = self._context
        try:
            with (
                keep_torch_defaults(),
                context.lease.renew_periodically(self._claim),
                context.storage.hold_trial(self._claim.trial_id, self._claim.attempt),
                self._watch_startup(),
            ):
                context.watchdog.watch(partial(context.claims.expire_lease, self._claim))
                return self._run()
        except ClaimLostError as lost:
            self._abandon(lost)
            return None
        except RankLostError:  # handled like the death of this process: another worker resumes, and the attempt counts
            context.claims.expire_lease(self._claim)
            self._tracked.leave_open()
            raise
        finally:
            context.watchdog.stop_watching()

    def _watch_startup(self) -> AbstractContextManager[None]:
        """Return a context in which a stop request before the training ends the process."""
        startup, claims = self._context.startup, self._context.claims
        release = partial(claims.finish_attempt, self._claim, Outcome.RELEASED)
        return contextlib.nullcontext() if startup is None else startup.watch(release)

    def _run(self) -> TrialEnd | None:
        try:
            result = self._train()
        except NonFiniteError as error:
            assert self._session is not None
            self._session.report_non_finite(error.epoch)
            return self._end_infeasible(error)
        except DeviceMemoryError as error:
            return None if self._retry("memory", str(error)) else self._end_infeasible(error)
        except CheckpointStoreError:
            self._release(Outcome.RELEASED)
            raise
        except (ClaimLostError, RankLostError, *SERVICE_ERRORS):
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # errors of the user's code, of any kind, end the trial, not the worker
            if full := find_full_disk(error):
                self._release(Outcome.RELEASED)
                file = "" if full.filename is None else f" for {str(full.filename)!r}"
                raise CheckpointStoreError(f"no disk space left{file} ({full.strerror}); free disk space") from error
            return self._fail(error)
        if result.status != "stopped":
            return self._finish(result)
        assert self._session is not None
        for path in dict.fromkeys(self._session.files):  # the next attempt removes the folder with them
            self._tracked.log_file(path)
        if isinstance(rank := result.verdict.reason, RungRank):  # the report at the rung has ended the attempt
            self._tracked.leave_open()
            place = (rank.rung, rank.rank, rank.reached_count)
            log.info("trial %d: paused at rung %d, rank %d of %d", self._claim.number, *place)
            return None
        self._release(Outcome.RELEASED)
        reason = "" if result.verdict.reason is None else f": {result.verdict.reason}"
        log.info("trial %d: released %s%s", self._claim.number, self._session.saved, reason)
        return None

    def _train(self) -> RunResult:
        context, spec = self._context, self._context.spec
        self._tracked.open()
        config, params = suggest(context.objective, context.sampled, self._claim, spec)
        self._tracked.log_params(params)
        self._session = TrialSession(context, self._claim, self._run_dir, log_epoch=self._tracked.log_epoch)
        plan = RunPlan(
            epochs=spec.epochs,
            seed=derive_training_seed(spec, self._claim.number),
            split_seed=spec.seed,
            resplit_seed=get_resplit_seed(spec, self._claim.number),
            refit=spec.refit,
            folds=spec.folds,
        )
        if (schedule := get_schedule(context.storage.get_trial(self._claim.trial_id))) is not None:
            configs = {part["epoch"]: context.objective.configure(FixedTrial(part["params"])) for part in schedule}
            config, plan = configs[0], replace(plan, config_by_epoch=configs)
            # Without its checkpoint, the trial trains like the trials that it copied.
            if spec.pruner.shares_checkpoints:
                seeds = {part["epoch"]: derive_training_seed(spec, part["trial"]) for part in schedule}
                plan = replace(plan, seed_by_epoch=seeds)
        job = Job(self._claim.number, self._claim.attempt, spec, config, plan)
        pid = os.getpid()
        try:
            return fit_on_all_ranks(context.objective, job, session=self._session, device=context.options.device)
        finally:
            end_if_forked(pid)

    def _finish(self, result: RunResult) -> TrialEnd:
        """Publish the result of a training that completed or was pruned, and end the trial."""
        session = self._session
        assert session is not None
        session.keep_best()
        with self._context.watchdog.limit("publishing the results"):
            kept = self._tracked.publish(result, session.files)
        spec = self._context.spec
        common = {
            **summarize_throughput([record.metrics for record in result.history]),
            **self._note_changed_data(result),
        }
        if isinstance(decision := result.verdict.reason, Decision):
            record = decision.to_record()
            self._tracked.tag_pruning(record)
            last = spec.select_metrics(result.history[-1].metrics)
            value, attrs = session.last_value, {PRUNING: record, **common}
            end = self._end(Outcome.PRUNED, decision.reason, value=value, attrs=attrs, kept=kept, metrics=last)
        else:
            value, attrs = result.best_value, common
            reason = f"best {spec.metric} {value:.6g} at epoch {result.best_epoch + 1}"
            if result.resplit_score is not None:
                value, reason = result.resplit_score.value, f"{result.resplit_score.describe(spec.metric)}; {reason}"
                attrs = {**common, RESPLIT_SCORE: result.resplit_score.to_record()}
            elif spec.folds is not None:
                attrs = {**common, FOLDS_ERROR: result.best_metrics[f"val_{spec.metric}_se"]}
            if spec.refit is not None:
                loss = result.history[-1].metrics["train_loss"]
                attrs = {**common, REFIT: {"train_loss": loss}}
                reason = f"train loss {loss:.6g} after {pluralize(len(result.history), 'epoch')} on train and val"
            best = {**spec.select_metrics(result.best_metrics), spec.metric: value}
            vector = [best[name] for name in spec.direction_by_metric]
            end = self._end(Outcome.COMPLETE, reason, value=vector, attrs=attrs, kept=kept, metrics=best)
        session.checkpoints.delete(keep_stored=kept)
        remove_earlier_attempts(self._context.runs_dir, self._claim)
        return end

    def _note_changed_data(self, result: RunResult) -> dict[str, str]:
        """Return the hash of the trial's data as an attribute if they are not those of the study's creation."""
        spec, expected = self._context.spec, self._context.data_sha256
        is_own_split = spec.refit is not None or get_resplit_seed(spec, self._claim.number) is not None
        if is_own_split or not isinstance(result, FitResult) or expected in {None, result.split_hash}:
            return {}
        log.warning("trial %d: data() returned other samples than at the creation of the study", self._claim.number)
        return {DATA_SHA256: result.split_hash}

    def _end_infeasible(self, error: Exception) -> TrialEnd:
        """End a trial that diverged or ran out of memory as infeasible. Samplers use infeasible trials."""
        value = self._session.last_value if self._session else None
        return self._end(Outcome.INFEASIBLE, str(error), value=value, attrs={INFEASIBLE: True})

    def _fail(self, error: BaseException) -> TrialEnd | None:
        reason = " ".join(_as_text(f"{type(error).__name__}: {get_message(error)}").split())
        if not isinstance(error, ObjectiveError) or hasattr(error, "__notes__"):  # a note is another rank's traceback
            trace = _as_text(format_traceback(error))
            log.error("trial %d failed\n%s", self._claim.number, trace)
            with contextlib.suppress(OSError):  # a full disk must not hide why the trial failed
                report = self._run_dir / "error.txt"
                report.write_text(trace, encoding="utf-8")
                self._tracked.log_file(report)
        return None if self._retry("error", reason) else self._end(Outcome.FAILED, reason)

    def _retry(self, kind: str, reason: str) -> bool:
        """Release the trial for another attempt if the spec allows a retry after this error; return whether it does."""
        spec = self._context.spec
        if kind not in spec.retry_on or self._context.claims.count_failures(self._claim) >= spec.retries:
            return False
        self._release(Outcome.FAILED, {REASON: reason})
        log.warning("trial %d: released for a retry after %s", self._claim.number, reason)
        return True

    def _release(self, outcome: Outcome, attrs: dict[str, object] | None = None) -> None:
        self._context.claims.finish_attempt(self._claim, outcome, retry=True, attrs=attrs)
        self._tracked.leave_open()

    def _end(
        self,
        outcome: Outcome,
        reason: str,
        *,
        value: float | Sequence[float] | None = None,
        attrs: Mapping[str, object] | None = None,
        kept: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> TrialEnd:
        # This replaces `study.tell`. It writes the constraints, because the sampler's `after_trial` is not called.
        spec = self._context.spec
        violations = [] if metrics is None else spec.list_violations(metrics)
        if violations:
            missing = [line for line in violations if line not in reason]
            reason += f"; out of bounds: {', '.join(missing)}" if missing else ""
            self._tracked.tag_violations(violations)
        attrs = {REASON: reason, TRACKING: self._tracked.get_state(), VIOLATIONS: violations or None, **(attrs or {})}
        attrs = {key: attr for key, attr in attrs.items() if attr is not None}
        system = {} if metrics is None else measure_violations(spec, metrics)
        self._context.claims.finish_attempt(self._claim, outcome, value=value, attrs=attrs, system=system)
        log.info("trial %d: %s, %s", self._claim.number, outcome.trial_state, reason)
        with self._context.watchdog.limit("closing the run"):
            self._tracked.finish(outcome, reason, is_checkpoint_kept=kept)
        return TrialEnd(outcome, reason)

    def _abandon(self, lost: ClaimLostError) -> None:
        """Stop working on a trial that another attempt owns, and remove the files of this attempt."""
        log.warning("%s; this worker stops working on it", lost)
        self._context.claims.release(self._claim)
        if self._session is not None:
            self._session.checkpoints.abandon()
        self._tracked.abandon(str(lost))


def _as_text(message: str) -> str:
    """Return the text without NUL characters and surrogates, which files and the database reject."""
    return message.replace("\0", "").encode("utf-8", "backslashreplace").decode()
