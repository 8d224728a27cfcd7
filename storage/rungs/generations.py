"""Generations of population-based training: wait for all members, and decide once which members copy others.

All members pause at the end of a generation. When none is left to train, the next claim decides for all of them, in
its transaction. A decision depends only on the reported values, the seed of the study and the trials' numbers, so it
does not depend on the order of the workers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution

from hpsearch.storage.attributes import CONFIG_SCHEDULE
from hpsearch.storage.checkpoints.pointers import copy_pointers
from hpsearch.storage.database.statements import Database
from hpsearch.storage.database.trial_rows import decode_param


@dataclass(frozen=True)
class Member:
    """A trial of the population at the end of a generation.

    Attributes:
        number: number of the trial.
        loss: last reported value of the trial as a loss, for which lower is better.
        params: parameters with which the trial trained the generation.
        distributions: distributions of the parameters, by name.
        has_checkpoint: whether the checkpoint after the generation is stored, so that others can copy it.
    """

    number: int
    loss: float
    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]
    has_checkpoint: bool


@dataclass(frozen=True)
class Copy:
    """The decision that a member continues from the checkpoint of another member.

    Attributes:
        child, parent: numbers of the trials.
        params: parameters with which the child trains the next generation.
    """

    child: int
    parent: int
    params: dict[str, Any]


# Given the generation, from 0, and its members, returns the copies. The other members continue unchanged.
Decide = Callable[[int, Sequence[Member]], Sequence[Copy]]


@dataclass(frozen=True)
class Generation:
    """The decision on one trial at the end of a generation.

    Attributes:
        number: number of the trial.
        generation: the generation, from 0.
        parent: number of the trial that was copied; None if the trial continued unchanged.
        before, after: parameters before and after a copy; None if the trial continued unchanged.
    """

    number: int
    generation: int
    parent: int | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


_SELECT_UNDECIDED = sa.text("""
    SELECT r.trial_id, t.number, r.rung, r.loss,
           EXISTS (SELECT FROM hpsearch_generations d WHERE d.study_id = :study AND d.generation = r.rung) AS late,
           EXISTS (SELECT FROM hpsearch_checkpoints c
                    WHERE c.trial_id = r.trial_id AND c.epoch = (CAST(:epochs AS int[]))[r.rung + 1] - 1)
           AS has_checkpoint,
           (SELECT value_json FROM trial_user_attributes a WHERE a.trial_id = r.trial_id AND a.key = :key) AS schedule
      FROM hpsearch_rungs r JOIN trials t USING (trial_id)
      LEFT JOIN hpsearch_generations g ON g.trial_id = r.trial_id AND g.generation = r.rung
     WHERE r.study_id = :study AND r.promoted_at IS NULL AND r.retired_at IS NULL AND t.state = 'WAITING'
       AND g.trial_id IS NULL
     ORDER BY r.rung, t.number
""")

_SELECT_PARAMS = sa.text("""
    SELECT trial_id, param_name, param_value, distribution_json FROM trial_params JOIN trials USING (trial_id)
     WHERE study_id = :study ORDER BY trial_id, param_id
""")

_SELECT_NEXT = sa.text("""
    SELECT r.trial_id, r.rung
      FROM hpsearch_rungs r JOIN trials t USING (trial_id)
      JOIN hpsearch_generations g ON g.trial_id = r.trial_id AND g.generation = r.rung
     WHERE r.study_id = :study AND r.promoted_at IS NULL AND r.retired_at IS NULL AND t.state = 'WAITING'
     ORDER BY r.rung, t.number LIMIT 1
""")

_INSERT_DECISION = sa.text("""
    INSERT INTO hpsearch_generations (trial_id, generation, study_id, parent, params_before, params_after)
    VALUES (:trial, :generation, :study, :parent, CAST(:before AS jsonb), CAST(:after AS jsonb))
""")

_SET_SCHEDULE = sa.text("""
    INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (:trial, :key, :schedule)
    ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
""")

_SELECT_ALL = sa.text("""
    SELECT t.number, g.generation, g.parent, g.params_before AS before, g.params_after AS after
      FROM hpsearch_generations g JOIN trials t USING (trial_id)
     WHERE g.study_id = :study ORDER BY g.generation, t.number
""")


def read_generations(engine: sa.Engine, study_id: int) -> list[Generation]:
    """Return all decisions of a study, in the order of the generations."""
    return [Generation(**row._mapping) for row in Database(engine).fetch_rows(_SELECT_ALL, {"study": study_id})]


def find_next_member(connection: sa.Connection, study_id: int) -> tuple[int, int] | None:
    """Return (id, generation) of the next paused member that may continue; None if there is none."""
    row = connection.execute(_SELECT_NEXT, {"study": study_id}).one_or_none()
    return None if row is None else (row.trial_id, row.rung)


def decide_generation(connection: sa.Connection, study_id: int, epochs: Sequence[int], decide: Decide) -> None:
    """Decide for all members that wait at the end of the earliest generation; do nothing if no member waits.

    A member that ends a generation after its decision, because it was retried, continues unchanged.

    Args:
        connection: connection whose transaction holds the lock of the study's row. No member may be left to train.
        study_id: id of the study.
        epochs: per generation, the number of epochs at its end.
        decide: function that returns the copies.
    """
    arguments = {"study": study_id, "epochs": list(epochs), "key": CONFIG_SCHEDULE}
    waiting = connection.execute(_SELECT_UNDECIDED, arguments).all()
    rows = [row for row in waiting if row.rung == waiting[0].rung]
    if not rows:
        return
    generation, by_number = rows[0].rung, {row.number: row for row in rows}
    started: dict[int, dict[str, Any]] = defaultdict(dict)
    distributions = {}  # also of trials that have left the population, whose conditional parameters may be copied
    for param in connection.execute(_SELECT_PARAMS, {"study": study_id}):
        if (found := decode_param(param.param_value, param.distribution_json)) is not None:
            started[param.trial_id][param.param_name], distributions[param.param_name] = found
    schedules = {
        row.number: json.loads(row.schedule or "null")
        or [{"epoch": 0, "trial": row.number, "params": started[row.trial_id]}]
        for row in rows
    }
    current = {number: schedule[-1]["params"] for number, schedule in schedules.items()}
    copies: Sequence[Copy] = []
    if not rows[0].late:
        members = [
            Member(n, row.loss, current[n], {name: distributions[name] for name in current[n]}, row.has_checkpoint)
            for n, row in by_number.items()
        ]
        copies = decide(generation, members)
    by_child = {copy.child: copy for copy in copies}
    for number, row in by_number.items():
        copy = by_child.get(number)
        before, after = (None, None) if copy is None else (json.dumps(current[number]), json.dumps(copy.params))
        decision = {"trial": row.trial_id, "generation": generation, "study": study_id}
        decision |= {"parent": copy and copy.parent, "before": before, "after": after}
        connection.execute(_INSERT_DECISION, decision)
        if copy is not None:
            changed = {"epoch": epochs[generation], "trial": number, "params": copy.params}
            schedule = json.dumps([*schedules[copy.parent], changed])
            connection.execute(_SET_SCHEDULE, {"trial": row.trial_id, "key": CONFIG_SCHEDULE, "schedule": schedule})
            copy_pointers(connection, child=row.trial_id, parent=by_number[copy.parent].trial_id)
