"""The stored cut of a rung equals the one from counting its trials."""

from __future__ import annotations

import json
import random
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial

from hpsearch.storage.attributes import SPEC
from hpsearch.storage.database import migrations
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.rungs.rungs import Rungs, recompute_cutoffs, record_rung_value
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.conftest import execute
from tests.storage.trials.support import budget, rows, take

CUTS = "SELECT * FROM hpsearch_rung_cuts WHERE study_id = :study ORDER BY rung"


@pytest.mark.parametrize(("factor", "n_trials"), [(2, 7), (2, 60), (3, 2), (3, 60), (4, 1000)])
def test_incremental_cuts_equal_counted_cuts(
    storage: BaseStorage, study_id: int, engine: sa.Engine, factor: int, n_trials: int
) -> None:
    rungs = Rungs("asha", (1, 2), 4, factor, maximize=False)
    drawn = random.Random(factor * n_trials)
    trials = [storage.create_new_trial(study_id) for _ in range(60)]
    # Includes ties and both infinities.
    values = [drawn.choice([0.1, 0.2, drawn.random(), float("inf"), -float("inf")]) for _ in trials]
    noted = [(trial, rung, value) for trial, value in zip(trials, values, strict=True) for rung in (0, 1)]
    drawn.shuffle(noted)
    noted += noted[:5]  # again, after a crash
    for trial, rung, value in noted:
        with engine.begin() as connection:
            record_rung_value(connection, study_id, trial, rungs, rung=rung, value=value, n_trials=n_trials)
        moved = rows(engine, CUTS, study=study_id)
        with engine.begin() as connection:
            recompute_cutoffs(connection, study_id, rungs, n_trials=n_trials)
        assert moved == rows(engine, CUTS, study=study_id)
    assert [row.reached for row in rows(engine, CUTS, study=study_id)] == [60, 60]


RUNGS = Rungs("asha", (1, 3, 9), 27, 3, maximize=False)

# All trials of a study have reached the first rung. A third of them were promoted, except for a few that will be next.
_FILL = """
    UPDATE trials t SET datetime_start = now() WHERE study_id = :study;
    INSERT INTO hpsearch_rungs (trial_id, rung, study_id, loss)
    SELECT trial_id, 0, study_id, (number * 7919 % :trials)::float FROM trials WHERE study_id = :study;
    INSERT INTO hpsearch_attempts (trial_id, attempt, claim_id, worker, process, expires_at, ended_at, outcome)
    SELECT trial_id, 1, gen_random_uuid(), 'w', 'p', now(), now(), 'paused' FROM trials WHERE study_id = :study;
    UPDATE hpsearch_rungs SET promoted_at = now() WHERE study_id = :study AND loss < :trials / 3 - 20;
    UPDATE trials SET state = 'COMPLETE'
     WHERE trial_id IN (SELECT trial_id FROM hpsearch_rungs WHERE study_id = :study AND promoted_at IS NOT NULL)
"""


def _rows_of_a_promotion(storage: BaseStorage, engine: sa.Engine, owner: sa.Engine, trials: int) -> int:
    """Return the number of rows that the server reads for a claim with a promotion, in a study of `trials` trials."""
    study_id = storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], f"of {trials}")
    budget(storage, study_id, n_trials=2 * trials)
    storage.import_trials(study_id, [create_trial(state=TrialState.WAITING)] * trials)  # type: ignore[attr-defined]
    with engine.begin() as connection:
        connection.execute(sa.text(_FILL), {"study": study_id, "trials": trials})
        recompute_cutoffs(connection, study_id, RUNGS, n_trials=2 * trials)
    with owner.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE trials, hpsearch_rungs, hpsearch_attempts, hpsearch_rung_cuts"))
    claims = Claims(engine, study_id, worker="w", rungs=RUNGS)
    take(claims)
    read: list[int] = []

    def at_commit(connection: sa.Connection) -> None:
        seen = sa.text("""
            SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0) + n_tup_ins + n_tup_upd)
              FROM pg_stat_xact_user_tables
        """)
        read.append(int(connection.execute(seen).scalar_one()))

    for _ in range(10):
        with engine.begin() as connection:  # flush the counts so far
            connection.execute(sa.text("SELECT pg_stat_force_next_flush()"))
        sa.event.listen(engine, "commit", at_commit)
        assert take(claims).attempt == 2, "it waited"
        sa.event.remove(engine, "commit", at_commit)
    assert len(read) == 10
    return max(read)


@pytest.mark.new_database
def test_the_rows_read_by_a_promotion_do_not_grow_with_the_study(
    storage: BaseStorage, engine: sa.Engine, owner_url: str
) -> None:
    owner = sa.create_engine(owner_url, poolclass=sa.NullPool)
    few, many = (_rows_of_a_promotion(storage, engine, owner, trials) for trials in (1_000, 10_000))
    assert many <= few + 20
    assert many < 150


def test_the_best_promotable_trial_is_promoted(storage: BaseStorage, study_id: int, engine: sa.Engine) -> None:
    budget(storage, study_id, n_trials=90)
    rungs = Rungs("asha", (1,), 3, 3, maximize=True)
    claims, drawn = Claims(engine, study_id, worker="w", rungs=rungs), random.Random(3)
    came: dict[int, float] = {}
    gone: set[int] = set()
    while isinstance(claim := claims.claim(), Claim):
        best = sorted(came, key=lambda number: (-came[number], number))[: len(came) // 3]
        waits = [number for number in best if number not in gone]
        assert claim.attempt == (2 if waits else 1)
        if waits:
            assert claim.number == waits[0]
            gone.add(claim.number)
            continue
        came[claim.number] = drawn.choice([0.5, drawn.random()])
        if claims.report_rung(claim, 0, came[claim.number]).is_promoted:
            gone.add(claim.number)
    assert len(came) > 30


def test_a_study_from_before_cuts_continues(
    storage: BaseStorage, study_id: int, engine: sa.Engine, owner_url: str
) -> None:
    spec = {"retries": 1, "n_trials": 6, "pruner": {"name": "asha", "reduction_factor": 2}}
    statement = f"UPDATE study_user_attributes SET value_json = '{json.dumps(spec)}' WHERE key = '{SPEC}'"
    execute(owner_url, statement)  # workers cannot change the settings of a stored study
    claims = Claims(engine, study_id, worker="w", rungs=Rungs("asha", (1,), 2, 2, maximize=True))
    held = [take(claims) for _ in range(6)]
    given_back = held.pop()
    claims.finish_attempt(given_back, Outcome.RELEASED)
    for claim, value in zip(held, (0.5, 0.4, 0.3, 0.2, 0.1), strict=True):
        claims.report_rung(claim, 0, value)
    assert take(claims).number == given_back.number
    storage.set_trial_state_values(held[-1].trial_id, TrialState.FAIL)
    cuts = rows(engine, CUTS, study=study_id)
    engine.dispose()
    _downgrade(owner_url, "0005")
    with sa.create_engine(owner_url, poolclass=sa.NullPool).begin() as connection:  # as earlier releases left them
        connection.execute(sa.text("UPDATE trials SET state = 'WAITING' WHERE number = 5"))
        connection.execute(sa.text("UPDATE hpsearch_attempts SET ended_at = now(), outcome = 'lost' WHERE attempt = 2"))
    migrate(owner_url)
    assert rows(engine, CUTS, study=study_id) == cuts
    assert [take(claims).number for _ in range(2)] == [5, 0], "the one that was given back, and the best that waits"


def _downgrade(owner_url: str, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    with sa.create_engine(owner_url, poolclass=sa.NullPool).connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
