"""Steer a study: stop, start, extend, and retry trials."""

from __future__ import annotations

import datetime
import getpass
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpsearch.host_name import get_host_name
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.pruners.study_pruner import make_rungs
from hpsearch.search.spec.spec import MAX_TRIALS, get_option_name, parse_stored_spec
from hpsearch.search.study.enqueue import enqueue_in
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE, REASON, STOPPED
from hpsearch.storage.trials.budget import change_budgets, change_spec, read_spending_in_transaction
from hpsearch.storage.trials.early_stop import cancel_early_stop
from hpsearch.storage.trials.lost_attempts import count_running_trials
from hpsearch.storage.trials.reopening import reopen_trial, requeue_pruned_at_rungs, requeue_trials_stopped_by_budget


def stop_study(study: StoredStudy) -> str | None:
    """Stop a study: workers claim no more trials, and release their trials after the current epoch.

    Returns:
        User and time of an earlier stop; None if the study was not stopped before.
    """
    if earlier := study.stopped:
        return earlier
    study.set_attr(STOPPED, f"by {get_user_and_host()} at {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC")
    return None


def start_study(study: StoredStudy) -> str | None:
    """Start a study that was stopped or terminated early.

    The study may terminate early again after some more trials.

    Returns:
        User and time of the stop, the reason of the early termination, or both; None if the study was not stopped.
    """
    stopped, early_stop = study.stopped, study.early_stop
    if stopped:
        study.set_attr(STOPPED, None)
    if early_stop is not None:
        change_spec(study.engine, study.study_id, lambda spec, _started: spec, then=partial(_restore_budget, study))
    reasons = [stopped] if stopped else []
    reasons += [f"as {early_stop.reason}"] if early_stop is not None else []
    return " and ".join(reasons) or None


def _restore_budget(study: StoredStudy, connection: sa.Connection, values: dict[str, Any]) -> None:
    """Cancel an early termination, and requeue the trials that the termination pruned at a rung."""
    spec = parse_stored_spec(values)
    if cancel_early_stop(connection, study.study_id) and (rungs := make_rungs(spec)) is not None:
        requeue_pruned_at_rungs(connection, study.study_id, rungs, n_trials=spec.n_trials)


def count_running(study: StoredStudy) -> int:
    """Return the number of running trials with a valid lease."""
    return count_running_trials(study.engine, study.study_id)


def get_user_and_host() -> str:
    """Return ``USER@HOST``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        user = "unknown"
    return f"{user}@{get_host_name()}"


@dataclass(frozen=True)
class BudgetChange:
    """A change of a study's budget.

    Attributes:
        old_budget, new_budget: the budget before and after the change, in `unit`.
        started_trials: number of trials that had already started.
        unit: unit of the budget: trials, epochs or seconds.
        enqueued_trials: number of trials that were enqueued with the change.
    """

    old_budget: float
    new_budget: float
    started_trials: int
    unit: str = "trials"
    enqueued_trials: int = 0


_UNITS = {"n_trials": "trials", "budget_epochs": "epochs", "budget_seconds": "seconds"}


def extend_study(
    study: StoredStudy, more: str, enqueued: Sequence[FrozenTrial] = (), *, setting: str = "n_trials"
) -> BudgetChange:
    """Change a budget of a study. The study may be running.

    Args:
        study: the study.
        more: ``+50`` for fifty more, or the new budget as a number.
        enqueued: trials to enqueue in the same transaction.
        setting: the budget to change: ``n_trials``, ``budget_epochs`` or ``budget_seconds``.

    Raises:
        SearchError: `more` is not a number, too large, or not larger than the used part of the budget; the study has no
            budget of this kind; the budget does not suffice for the enqueued trials; or the study is a finalist or
            refit study.
    """
    flag, unit = get_option_name(setting), _UNITS[setting]
    if (of := study.spec.finalists_of) is not None:
        again = format_command("finalists", of.study, "--new-set")
        instead = f"; select other finalists with {again}" if of.refit is None else ""
        raise SearchError(f"study {study.spec.name!r} holds {of.description} and cannot be extended{instead}")
    if study.spec.pruner.shares_checkpoints:
        raise SearchError(
            f"study {study.spec.name!r} cannot be extended, because --pruner pbt has a fixed population; create a new "
            "study"
        )
    if not re.fullmatch(r"\+?[0-9]{1,12}" + (r"(\.[0-9]{1,6})?" if setting == "budget_seconds" else ""), more):
        limit = "; it has too many digits" if re.fullmatch(r"\+?[0-9]{13,}", more) else ""
        raise SearchError(
            f"{flag} {more!r} is invalid{limit}; give +N for N more {unit}, or the new budget as a number"
        )
    changed: list[BudgetChange] = []

    def change_budget(spec: dict[str, Any], started: int) -> dict[str, Any]:
        before = spec.get(setting)
        if before is None:
            raise SearchError(
                f"{flag} {more}: study {study.spec.name!r} was created without a budget in {unit}; "
                "extend another budget, or create a new study"
            )
        number = float(more) if "." in more else int(more)
        if setting == "n_trials" and before == MAX_TRIALS and more.startswith("+"):
            other = "budget_epochs" if spec.get("budget_epochs") is not None else "budget_seconds"
            per_trial = spec["epochs"] if other == "budget_epochs" else None
            epochs = f"; {number} full trials have {number * per_trial} epochs" if per_trial else ""
            raise SearchError(
                f"--trials {more}: study {study.spec.name!r} has a budget in {_UNITS[other]}, and no limit of trials; "
                f"use {get_option_name(other)} +N instead{epochs}"
            )
        after = before + number if more.startswith("+") else number
        if setting == "n_trials" and after <= started:
            more_trials = "" if before == MAX_TRIALS else f"+{max(started - before, 0) + 1} or more, or "
            raise SearchError(
                f"--trials {more}: study {study.spec.name!r} has already started {started} trials; "
                f"give {more_trials}a number above {started}"
            )
        changed.append(BudgetChange(before, after, started, unit))
        changed_spec = {**spec, setting: after}
        parse_stored_spec(changed_spec)
        return changed_spec  # the database rejects other changes, such as defaults of later versions

    def requeue_trials(connection: sa.Connection, values: dict[str, Any]) -> None:
        spec = parse_stored_spec(values)
        cancel_early_stop(connection, study.study_id)
        changed.append(replace(changed[-1], enqueued_trials=enqueue_in(connection, study.study_id, spec, enqueued)))
        if (rungs := make_rungs(spec)) is not None:
            requeue_pruned_at_rungs(connection, study.study_id, rungs, n_trials=spec.n_trials)
        if not spec.has_epoch_or_time_budget:
            return
        if not change_budgets(connection, study.study_id, epochs=spec.budget_epochs, seconds=spec.budget_seconds):
            if setting == "n_trials":
                return  # the other budget is spent and does not change
            spent = read_spending_in_transaction(connection, study.study_id)
            raise SearchError(
                f"{flag} {more}: study {study.spec.name!r} has already used {spent.epochs} epochs and "
                f"{spent.seconds:.0f} seconds; give a larger number, or +N for N more"
            )
        requeue_trials_stopped_by_budget(connection, study.study_id)

    change_spec(study.engine, study.study_id, change_budget, then=requeue_trials)
    return changed[-1]


def retry_trial(study: StoredStudy, number: int, *, from_start: bool = False) -> tuple[FrozenTrial, int | None]:
    """Requeue a failed or infeasible trial, so that it runs next with the same number and parameters.

    Args:
        study: the study.
        number: number of the trial.
        from_start: whether to discard the checkpoints and reports of the trial.

    Returns:
        The trial before the change; and the last epoch in its checkpoint, counted from 0, or None if it starts from
        scratch.

    Raises:
        SearchError: the trial does not exist, is neither failed nor infeasible, or would be pruned, because the budget
            is spent.
    """
    trial = find_trial(study, number)
    can_be_retried = trial.state == TrialState.FAIL or trial.user_attrs.get(INFEASIBLE)
    frees_epochs = from_start and trial.intermediate_values  # discarded epochs no longer count
    if can_be_retried and not frees_epochs and (spending := study.spending) is not None and spending.is_exhausted:
        no_epochs = spending.epochs_left is not None and spending.epochs_left <= 0
        options = ("--budget-epochs", f"+{study.spec.epochs}") if no_epochs else ("--budget-seconds", "+600")
        extend = format_command("extend", study.spec.name, *options)
        raise SearchError(f"--trial {number}: {spending.exhausted_reason}; first extend the budget: {extend}")
    rungs = make_rungs(study.spec)
    reopened, epoch = reopen_trial(study.engine, study.study_id, trial._trial_id, from_start=from_start, rungs=rungs)
    if not reopened:
        state = _describe_state(find_trial(study, number))
        raise SearchError(f"--trial {number}: {state}; only failed and infeasible trials can be retried")
    return trial, epoch


def _describe_state(trial: FrozenTrial) -> str:
    if trial.state == TrialState.PRUNED:
        return f"the trial was pruned ({trial.user_attrs.get(REASON, 'by another program')})"
    return f"the trial is {trial.state.name.lower()}"


def find_trial(study: StoredStudy, number: int) -> FrozenTrial:
    """Return a trial of the study.

    Raises:
        SearchError: the trial does not exist.
    """
    try:
        if isinstance(number, bool):
            raise TypeError
        trial_id = study.storage.get_trial_id_from_study_id_trial_number(study.study_id, operator.index(number))
    except (KeyError, TypeError):  # a number of another type, such as a text
        trials = study.storage.get_n_trials(study.study_id)
        numbers = f"give a number from 0 to {trials - 1}" if trials else "it has no trials yet"
        raise SearchError(f"--trial {number!r}: study {study.spec.name!r} has no such trial; {numbers}") from None
    return study.storage.read_trial(trial_id)
