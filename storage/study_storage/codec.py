"""Between the rows of Optuna's tables and its objects: times, values, distributions, trials."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.trial import FrozenTrial, TrialState

STATES = {state.name: state for state in TrialState}
FINISHED = frozenset(state for state in TrialState if state.is_finished())

_SCALARS = (str, int, float, type(None))  # bool is an int


def utc_now() -> datetime:
    """Return this machine's time as the naive UTC of Optuna's tables."""
    return datetime.now(UTC).replace(tzinfo=None)


def to_utc(local: datetime | None) -> datetime | None:
    """Return Optuna's naive local time as the naive UTC of its tables."""
    return None if local is None else local.astimezone(UTC).replace(tzinfo=None)


def to_local(utc: datetime | None) -> datetime | None:
    """Return the tables' naive UTC as Optuna's naive local time."""
    return None if utc is None else utc.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)


@lru_cache(maxsize=4096)
def distribution(text: str) -> BaseDistribution:
    """Return the distribution of a JSON text: one object for all trials that have it, never to be changed."""
    return json_to_distribution(text)


def skeleton(row: Any) -> FrozenTrial:
    """Return a trial of which only id, number and state are known."""
    return FrozenTrial(
        number=row.number,
        state=STATES[row.state],
        value=None,
        datetime_start=None,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=row.trial_id,
    )


def copy_trial(trial: FrozenTrial) -> FrozenTrial:
    """Return a copy that shares nothing mutable with `trial` but its distributions, which nobody changes.

    About thirty times as fast as `copy.deepcopy`.
    """
    return FrozenTrial(
        number=trial.number,
        state=trial.state,
        value=None,
        values=trial.values,
        datetime_start=trial.datetime_start,
        datetime_complete=trial.datetime_complete,
        params=dict(trial.params),
        distributions=dict(trial.distributions),
        user_attrs=_copied(trial.user_attrs),
        system_attrs=_copied(trial.system_attrs),
        intermediate_values=dict(trial.intermediate_values),
        trial_id=trial._trial_id,
    )


def copy_trials(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return copies of all."""
    return [copy_trial(trial) for trial in trials]


def _copied(attrs: dict[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, _SCALARS) else copy.deepcopy(value) for key, value in attrs.items()}
