"""Selection of the next trial of a study. The caller holds the study's lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.attributes import BUDGET_CUT, PRUNING, REASON
from hpsearch.storage.rungs.generations import decide_generation, find_next_member
from hpsearch.storage.rungs.last_phase import has_budget_to_continue, plan_next_step
from hpsearch.storage.rungs.rungs import PrunedTrial, Rungs, find_next_to_prune, has_waiting_trials
from hpsearch.storage.trials import claim_sql, finishing, report_sql
from hpsearch.storage.trials.budget import Spending, read_spending_in_transaction
from hpsearch.storage.trials.claim_results import NoTrialAvailable


@dataclass(frozen=True)
class NextTrial:
    """The trial that a claim takes.

    Attributes:
        trial_id: id of a waiting trial; None for a new trial.
        rung: rung at which the trial waits; None if it waits at no rung.
    """

    trial_id: int | None
    rung: int | None


@dataclass(frozen=True)
class TrialQueue:
    """The waiting and future trials of a study.

    Attributes:
        study_id: id of the study.
        rungs: rungs at which trials pause; None if the pruner has no rungs.
        metered_epochs: number of epochs of a full trial, if the study has a budget in epochs or seconds; else None.
    """

    study_id: int
    rungs: Rungs | None
    metered_epochs: int | None

    def lock_study(self, connection: sa.Connection) -> sa.Row[Any] | None:
        """Lock the study, and return its budget, retries and stop request; None if the study was deleted."""
        return connection.execute(claim_sql.LOCK_STUDY, {"study": self.study_id}).one_or_none()

    def choose_next(
        self, connection: sa.Connection, study: sa.Row[Any], *, open_new: bool
    ) -> NextTrial | PrunedTrial | NoTrialAvailable:
        """Return the next trial, a trial that this call has pruned, or that there is none.

        Args:
            connection: transaction that holds the lock of the study.
            study: result of `lock_study`.
            open_new: whether to take trials that were never started or wait at a rung.
        """
        row = self._read_candidates(connection, study.n_trials)
        spending = self._read_spending(connection)
        has_room = spending is None or spending.has_budget_for_epoch(row.running)
        reason = "timeout reached" if spending is None or not spending.is_exhausted else spending.exhausted_reason
        can_open = open_new and has_room and row.total - row.enqueued < row.opens
        trial_id, rung = row.given_back, None
        if trial_id is not None and not has_room and not self._is_trained(connection, trial_id):
            if row.running == 0 and spending is not None:
                return self._prune_out_of_budget(connection, trial_id, spending)
            trial_id = None  # the running trials may not use the whole rest of the budget
        is_over = not can_open and row.running == 0
        if trial_id is None and self.rungs is not None and self.rungs.decide is not None:
            trial_id, rung = self._find_member(connection, self.rungs, is_ended=is_over) or (None, None)
        elif trial_id is None and self.rungs is not None:
            if open_new and has_room:
                steps = {
                    "epochs_left": spending and spending.epochs_left,
                    "may_start": can_open,
                    "running": row.running,
                }
                step = plan_next_step(connection, self.study_id, self.rungs, **steps)
                can_open = step.can_start
                trial_id, rung = step.waiting or (None, None)
            if trial_id is None:
                limits = {"n_trials": study.n_trials, "over": is_over, "why": reason}
                if (retired := self._prune_at_rung(connection, self.rungs, **limits)) is not None:
                    return retired
        if trial_id is None and not can_open:
            return NoTrialAvailable(row.running)
        return NextTrial(trial_id or row.next_enqueued, rung)

    def has_trials_left(self, connection: sa.Connection, *, open_new: bool) -> bool:
        """Return whether a trial can be claimed or is running; lock the study.

        Args:
            connection: connection with a transaction.
            open_new: whether trials that were never started count, as in `choose_next`.
        """
        study = self.lock_study(connection)
        if study is None or study.stopped is not None:
            return False
        row = self._read_candidates(connection, study.n_trials)
        at_rung = self.rungs is not None and has_waiting_trials(connection, self.study_id)
        spending = self._read_spending(connection)
        has_room = spending is None or spending.has_budget_for_epoch(row.running)
        has_new_trials = open_new and has_room and row.total - row.enqueued < row.opens
        return bool(row.given_back or row.running or at_rung or has_new_trials)

    def has_budget_to_continue(self, connection: sa.Connection, trial_id: int, rung: int, n_trials: int) -> bool:
        """Return whether the remaining epochs suffice for a promoted trial in addition to the better waiting ones.

        Args:
            connection: transaction that holds the lock of the study.
            trial_id: id of the trial.
            rung: the rung, from 0.
            n_trials: the study's budget in trials.
        """
        spending = self._read_spending(connection)
        if self.rungs is None or spending is None or (left := spending.epochs_left) is None:
            return True
        row = self._read_candidates(connection, n_trials)
        arguments = {"rung": rung, "epochs_left": left, "running": row.running}
        return has_budget_to_continue(connection, self.study_id, trial_id, self.rungs, **arguments)

    def _read_candidates(self, connection: sa.Connection, n_trials: int) -> sa.Row[Any]:
        has_rungs = self.rungs is not None
        statement = claim_sql.SELECT_CANDIDATES_EXCEPT_PAUSED if has_rungs else claim_sql.SELECT_CANDIDATES
        return connection.execute(statement, {"study": self.study_id, "n_trials": n_trials}).one()

    def _read_spending(self, connection: sa.Connection) -> Spending | None:
        return None if self.metered_epochs is None else read_spending_in_transaction(connection, self.study_id)

    def _find_member(self, connection: sa.Connection, rungs: Rungs, *, is_ended: bool) -> tuple[int, int] | None:
        """Return the next member of the population to continue; if a generation has ended, first decide on it."""
        found = find_next_member(connection, self.study_id)
        if found is None and is_ended and rungs.decide is not None:
            decide_generation(connection, self.study_id, rungs.epochs, rungs.decide)
            found = find_next_member(connection, self.study_id)
        return found

    def _is_trained(self, connection: sa.Connection, trial_id: int) -> bool:
        """Return whether a trial has reported all epochs, so that only its outcome is missing."""
        arguments = {"trial": trial_id, "epochs": self.metered_epochs}
        return bool(connection.execute(report_sql.HAS_ALL_EPOCHS, arguments).scalar())

    def _prune_out_of_budget(self, connection: sa.Connection, trial_id: int, spending: Spending) -> PrunedTrial:
        """Prune a released trial because the budget is spent."""
        at = connection.execute(report_sql.SELECT_LAST_EPOCH, {"trial": trial_id}).one()
        epochs = 0 if at.step is None else at.step + 1
        reason = f"after epoch {epochs} of {self.metered_epochs}: {spending.exhausted_reason}"
        finishing.prune_waiting_trial(connection, trial_id, attrs={REASON: reason, BUDGET_CUT: True})
        return PrunedTrial(trial_id, at.number, at.attempt, reason, {}, is_out_of_budget=True)

    def _prune_at_rung(self, connection: sa.Connection, rungs: Rungs, **limits: Any) -> PrunedTrial | None:
        """Prune one trial that waits at a rung and cannot be promoted any more; None if there is no such trial.

        `limits` are those of `find_next_to_prune`.
        """
        retired = find_next_to_prune(connection, self.study_id, rungs, **limits)
        if retired is not None:
            attrs = {REASON: retired.reason, PRUNING: retired.decision}
            finishing.prune_waiting_trial(connection, retired.trial_id, attrs=attrs)
        return retired
