"""Leases: a silent worker loses its trial, and a disconnected one has time to come back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from hpsearch.storage.errors import ClaimLostError
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable
from hpsearch.storage.trials.finishing import Outcome
from tests.storage.trials.support import Join, outcomes, rows, take


@pytest.fixture
def settled_server(postgres_server: Any, engine: sa.Engine) -> None:
    """Wait until the server has been up for longer than two leases of a tenth of a second."""
    while not rows(engine, "SELECT pg_postmaster_start_time() < now() - interval '0.3 second' AS up")[0].up:
        time.sleep(0.02)


def expire(engine: sa.Engine) -> None:
    while not rows(engine, "SELECT bool_and(expires_at < now()) AS over FROM hpsearch_attempts")[0].over:
        time.sleep(0.02)


@pytest.mark.usefixtures("settled_server")
def test_a_frozen_worker_loses_its_trial_and_can_change_nothing(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    frozen, living = join(lease=0.1), join(lease=0.1)
    claim = take(frozen)
    frozen.report(claim, 0, 0.5)
    expire(engine)
    again = take(living)
    assert (again.trial_id, again.attempt) == (claim.trial_id, 2)
    for act in (
        lambda: frozen.report(claim, 1, 0.9),
        lambda: frozen.finish_attempt(claim, Outcome.COMPLETE, value=0.9),
        lambda: frozen.finish_attempt(claim, Outcome.RELEASED),
    ):
        with pytest.raises(ClaimLostError, match=r"trial 0 was taken over by w2 \(attempt 2\)"):
            act()
    assert not frozen.renew(claim)
    frozen.release(claim)
    assert storage.get_trial(claim.trial_id).intermediate_values == {0: 0.5}
    assert living.renew(again)
    living.report(again, 1, 0.6)
    living.finish_attempt(again, Outcome.PRUNED, value=0.6)
    trial = storage.get_trial(claim.trial_id)
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.PRUNED, 0.6, {0: 0.5, 1: 0.6})
    assert outcomes(engine) == [(1, "lost"), (2, "pruned")]


@pytest.mark.usefixtures("settled_server")
def test_a_report_and_a_renewal_keep_a_lease(engine: sa.Engine, join: Join) -> None:
    holder = join(lease=0.1)
    claim = take(holder)
    expire(engine)
    assert holder.renew(claim), "an expired attempt that no worker took over is still live"
    later = join(lease=60.0)
    later.report(claim, 0, 0.5)
    expires = rows(engine, "SELECT expires_at > now() + interval '50 seconds' AS far FROM hpsearch_attempts")
    assert expires[0].far
    assert take(holder).number == 1


def test_a_lease_starts_at_the_claim_and_not_at_its_wait(engine: sa.Engine, study_id: int, join: Join) -> None:
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as holder:
            holder.execute(sa.text("SELECT FROM studies WHERE study_id = :id FOR UPDATE"), {"id": study_id})
            claim = pool.submit(take, join(lease=7.0))
            while not rows(engine, waiting):
                time.sleep(0.005)
            released = holder.execute(sa.text("SELECT clock_timestamp()")).scalar_one()
        claim.result()
    (attempt,) = rows(engine, "SELECT started_at, expires_at FROM hpsearch_attempts")
    assert attempt.started_at > released
    assert attempt.expires_at >= released + timedelta(seconds=7.0)


def test_leases_that_expired_during_an_outage_are_extended(engine: sa.Engine, join: Join) -> None:
    claim = take(join(lease=3600.0))  # longer than this server has been up
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_attempts SET expires_at = now() - interval '1 minute'"))
    other = join(lease=3600.0)
    assert take(other).number == 1
    assert other.claim() == NoTrialAvailable(running_trials=2)
    assert join(lease=0.1).claim() == NoTrialAvailable(running_trials=2), "it is not its own lease that counts"
    assert claim.attempt == 1


@pytest.mark.usefixtures("settled_server")
def test_after_an_outage_each_worker_has_its_lease_time_to_return(engine: sa.Engine, join: Join) -> None:
    take(join(lease=1.0))
    expire(engine)
    first_back = join()
    first_back.record_outage()
    assert take(first_back).number == 1, "the trial whose lease ended in the outage is left alone"
    while not isinstance(first_back.claim(), Claim):
        time.sleep(0.02)
    assert outcomes(engine)[0] == (1, "lost")
