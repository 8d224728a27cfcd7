"""Many concurrent worker processes run exactly the budget."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from tests.storage.trials.support import begin_at_once, budget, outcomes, rows, set_retries

WORKER_PROGRAM = """
import sys
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.database.connect import make_engine
claims = Claims(make_engine(sys.argv[1], application_name="w"), int(sys.argv[2]), worker="w")
print("ready", flush=True)
sys.stdin.readline()
while isinstance(claim := claims.claim(), Claim):
    print(claim.number, claim.attempt, flush=True)
    claims.finish_attempt(claim, Outcome.COMPLETE, value=1.0)
"""


def spawn(url: str, study_id: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER_PROGRAM, url, str(study_id)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_many_processes_with_a_kill_run_exactly_the_budget(
    storage: BaseStorage, engine: sa.Engine, study_id: int, database_url: str, owner_url: str
) -> None:
    set_retries(owner_url, study_id, 5, n_trials=100)
    workers = [spawn(database_url, study_id) for _ in range(4)]
    begin_at_once(workers)
    assert workers[0].stdout is not None
    workers[0].stdout.readline()
    workers[0].kill()
    for worker in workers:
        worker.communicate()
    # The killed process may have been the last with a claim. The next worker takes its trial over.
    finisher = spawn(database_url, study_id)
    finisher.communicate("go\n")
    trials = storage.get_all_trials(study_id)
    assert Counter(t.state for t in trials) == {TrialState.COMPLETE: 100}
    assert [t.number for t in trials] == list(range(100))
    assert workers[0].returncode == -signal.SIGKILL
    assert all(attempt <= 2 for attempt, _ in outcomes(engine))
    overlapping = """
        SELECT count(*) FROM hpsearch_attempts a JOIN hpsearch_attempts b USING (trial_id)
         WHERE a.attempt < b.attempt AND a.ended_at > b.started_at
    """
    assert rows(engine, overlapping)[0][0] == 0


EIGHT_PROGRAM = """
import sys
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.database.connect import make_engine
engine = make_engine(sys.argv[1], application_name="w")
print("ready", flush=True)
for line in sys.stdin:
    claims, done = Claims(engine, int(line), worker="w"), 0
    while isinstance(claim := claims.claim(), Claim):
        claims.finish_attempt(claim, Outcome.COMPLETE, value=1.0)
        done += 1
    print(done, flush=True)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("n_workers", "searches", "n_trials"), [(4, 12, 5), pytest.param(8, 50, 20, marks=pytest.mark.soak)]
)
def test_workers_run_exactly_the_budget_many_times_in_a_row(
    storage: BaseStorage, database_url: str, n_workers: int, searches: int, n_trials: int
) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", EIGHT_PROGRAM, database_url]
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(n_workers)]

    def replies() -> list[str]:
        return [worker.stdout.readline().strip() for worker in workers if worker.stdout]

    def search(study_id: int) -> int:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{study_id}\n")
            worker.stdin.flush()
        return sum(map(int, replies()))

    assert replies() == ["ready"] * n_workers
    for time_ in range(searches):
        study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], f"s{time_}")
        budget(storage, study_id, n_trials=n_trials)
        assert search(study_id) == n_trials
        assert search(study_id) == 0, "started again"
        trials = storage.get_all_trials(study_id)
        assert [(t.number, t.state) for t in trials] == [(n, TrialState.COMPLETE) for n in range(n_trials)]
    for worker in workers:
        worker.communicate()
