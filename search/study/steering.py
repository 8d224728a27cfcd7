"""What a person may do to a study from anywhere: stop it, start it again, extend it, give a failed trial another go."""

from __future__ import annotations

import datetime
import getpass
import re
import socket
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from search.console import command
from search.errors import SearchError
from search.pruning import study_rungs
from search.spec.spec import parse_spec
from search.study.study import StoredStudy
from storage.attributes import REASON, STOPPED
from storage.trials.claims import running_now
from storage.trials.reopening import reopen_trial, wait_again
from storage.trials.spec_change import change_spec


def stop_study(study: StoredStudy) -> str | None:
    """Stop a study: no trial is handed out, and workers give theirs back after the epoch they are in.

    Returns:
        Who stopped it before, and when; None if it was not stopped.
    """
    if why := study.attrs.get(STOPPED):
        return str(why)
    study.set_attr(STOPPED, f"by {whoami()} at {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC")
    return None


def start_study(study: StoredStudy) -> str | None:
    """Let a stopped study go on; return who had stopped it, and when, or None if it was not stopped."""
    if not (why := study.attrs.get(STOPPED)):
        return None
    study.set_attr(STOPPED, None)
    return str(why)


def running_trials(study: StoredStudy) -> int:
    """Return how many trials are run by a worker that seems alive."""
    return running_now(study.engine, study.study_id)


def whoami() -> str:
    """Return user and host, for a person to read."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a passwd entry
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True)
class Extended:
    """A budget before and after, and how many of its trials were started."""

    before: int
    after: int
    started: int


def extend_study(study: StoredStudy, trials: str) -> Extended:
    """Change the budget of a study, running or not.

    Args:
        study: the study.
        trials: ``+50`` for fifty more, or the new budget as a number.

    Raises:
        SearchError: that is no such number, too large, or no more than was started already; or they are finalists.
    """
    if (of := study.spec.finalists_of) is not None:
        raise SearchError(
            f"study {study.spec.name!r} holds the finalists of {of.study!r}, no more than were chosen: choose others "
            f"with {command('finalists', of.study, '--new-set')}"
        )
    if not re.fullmatch(r"\+?[0-9]{1,12}", trials):
        raise SearchError(f"--trials {trials!r}: give +N for N more trials, or the new budget as a number")
    changed: list[Extended] = []

    def change(spec: dict[str, Any], started: int) -> dict[str, Any]:
        before = spec["n_trials"]
        after = before + int(trials) if trials.startswith("+") else int(trials)
        if after <= started:
            raise SearchError(
                f"--trials {trials}: {started} trials of {study.spec.name!r} are started already: "
                "give a larger number, or +N for N more"
            )
        changed.append(Extended(before, after, started))
        return parse_spec({**spec, "n_trials": after}).model_dump()

    def wait(connection: sa.Connection, spec: dict[str, Any]) -> None:
        if (rungs := study_rungs(parse_spec(spec))) is not None:
            wait_again(connection, study.study_id, rungs, n_trials=spec["n_trials"])

    change_spec(study.engine, study.study_id, change, then=wait)
    return changed[-1]


def retry_trial(study: StoredStudy, number: int, *, from_start: bool = False) -> tuple[FrozenTrial, int | None]:
    """Make a failed or infeasible trial the next to be run, under its number and with its parameters.

    Args:
        study: the study.
        number: the trial's.
        from_start: whether to forget its checkpoints and all that it has reported.

    Returns:
        The trial as it was, and the last epoch, from 0, that its checkpoint has; None to start anew.

    Raises:
        SearchError: there is no such trial, or its state says that there is nothing to try again.
    """
    trial = find_trial(study, number)
    reopened, epoch = reopen_trial(study.engine, trial._trial_id, from_start=from_start, rungs=study_rungs(study.spec))
    if not reopened:
        why = _why_not(find_trial(study, number))
        raise SearchError(f"--trial {number}: {why}; only a failed or an infeasible trial is tried again")
    return trial, epoch


def _why_not(trial: FrozenTrial) -> str:
    match trial.state:
        case TrialState.PRUNED:
            return f"it was pruned ({trial.user_attrs.get(REASON, 'by another program')})"
        case TrialState.RUNNING:
            return "it is running"
        case TrialState.WAITING:
            return "it is waiting already"
        case _:
            return f"it is {trial.state.name}"


def find_trial(study: StoredStudy, number: int) -> FrozenTrial:
    """Return a trial of the study as it is now.

    Raises:
        SearchError: there is none of that number.
    """
    try:
        trial_id = study.storage.get_trial_id_from_study_id_trial_number(study.study_id, number)
    except KeyError:
        trials = study.storage.get_n_trials(study.study_id)
        there = f"it has 0 to {trials - 1}" if trials else "it has none yet"
        raise SearchError(f"--trial {number}: study {study.spec.name!r} has no such trial; {there}") from None
    return study.storage.read_trial(trial_id)
