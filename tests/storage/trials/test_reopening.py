"""Other processes that have read a trial as finished see that it was reopened, and that it has finished again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from hpsearch.storage.attributes import BUDGET_CUT, REASON
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.reopening import reopen_trial, requeue_trials_stopped_by_budget
from tests.storage.statements import statements
from tests.storage.trials.support import Join, take

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class Reader:
    """A process with its own cache, which always reads the trials in the same states."""

    def __init__(self, url: str, study_id: int, states: tuple[TrialState, ...] | None) -> None:
        self.storage, self.study_id, self.states = open_storage(url, application_name="reader"), study_id, states

    def assert_current(self, truth: RDBStorage) -> None:
        """Compare all reads with those of Optuna's storage, which has no cache."""
        for deepcopy in (True, False):
            trials = self.storage.get_all_trials(self.study_id, deepcopy=deepcopy, states=self.states)
            assert trials == truth.get_all_trials(self.study_id, states=self.states)
        for trial in truth.get_all_trials(self.study_id):
            assert self.storage.get_trial(trial._trial_id) == trial
        assert self.storage.get_best_trial(self.study_id) == truth.get_best_trial(self.study_id)


@pytest.fixture
def truth(database_url: str) -> Iterator[RDBStorage]:
    storage = RDBStorage(database_url, skip_table_creation=True)
    yield storage
    storage.engine.dispose()


@pytest.fixture
def readers(database_url: str, study_id: int) -> Iterator[list[Reader]]:
    made = [Reader(database_url, study_id, states) for states in (None, FINISHED, (TrialState.COMPLETE,))]
    yield made
    for reader in made:
        reader.storage.engine.dispose()


@pytest.fixture
def claims(join: Join, study_id: int) -> Claims:
    """Claims of a worker that has completed trial 0 with the value 0.5."""
    claims = join()
    claims.finish_attempt(take(claims), Outcome.COMPLETE, value=0.5)
    return claims


def end(claims: Claims, outcome: Outcome, value: float, *, epochs: int = 1) -> int:
    """Run a trial, and return its id."""
    claim = take(claims)
    for epoch in range(epochs):
        claims.report(claim, epoch, value)
    attrs = {REASON: f"reason {value}"} | ({BUDGET_CUT: True} if outcome == Outcome.PRUNED else {})
    claims.finish_attempt(claim, outcome, value=None if outcome == Outcome.FAILED else value, attrs=attrs)
    return claim.trial_id


def retry(connection: sa.Connection, study_id: int, trial_id: int) -> None:
    assert reopen_trial(connection.engine, study_id, trial_id, from_start=True) == (True, None)


def extend(connection: sa.Connection, study_id: int, trial_id: int) -> None:
    assert requeue_trials_stopped_by_budget(connection, study_id) == 1


Reopen = Callable[[sa.Connection, int, int], None]
WAYS = pytest.mark.parametrize(
    ("outcome", "reopen"), [(Outcome.FAILED, retry), (Outcome.PRUNED, extend)], ids=["failed", "pruned"]
)


@WAYS
def test_each_state_of_a_reopened_trial_is_read(
    readers: list[Reader],
    truth: RDBStorage,
    claims: Claims,
    engine: sa.Engine,
    study_id: int,
    outcome: Outcome,
    reopen: Reopen,
) -> None:
    def check() -> None:
        for reader in readers:
            reader.assert_current(truth)

    trial_id = end(claims, outcome, 0.1)
    check()
    with engine.begin() as connection:
        reopen(connection, study_id, trial_id)
    check()
    again = take(claims)
    assert again.trial_id == trial_id
    check()
    claims.report(again, 0, 0.9)
    check()
    claims.finish_attempt(again, Outcome.COMPLETE, value=0.9)
    check()
    for reader in readers:
        assert reader.storage.get_best_trial(study_id).value == 0.9


@WAYS
def test_a_trial_that_was_reopened_and_finished_between_two_reads_is_read_once(
    readers: list[Reader],
    truth: RDBStorage,
    claims: Claims,
    engine: sa.Engine,
    study_id: int,
    outcome: Outcome,
    reopen: Reopen,
) -> None:
    trial_id = end(claims, outcome, 0.1)
    for ended_as, value in ((outcome, 0.2), (Outcome.COMPLETE, 0.9)):
        for reader in readers:
            reader.assert_current(truth)
        with engine.begin() as connection:
            reopen(connection, study_id, trial_id)
        assert end(claims, ended_as, value) == trial_id
    for reader in readers:
        with statements(reader.storage) as sent:
            trials = reader.storage.get_all_trials(study_id, states=reader.states)
            first = len(sent)
            assert reader.storage.get_all_trials(study_id, states=reader.states) == trials
        assert [(t.state, t.value) for t in trials] == [(TrialState.COMPLETE, 0.5), (TrialState.COMPLETE, 0.9)]
        assert (first, len(sent) - first) == (2, 1)
        reader.assert_current(truth)


def test_a_reopening_that_commits_after_later_transactions_is_read(
    readers: list[Reader],
    truth: RDBStorage,
    claims: Claims,
    storage: PostgresStorage,
    engine: sa.Engine,
    study_id: int,
) -> None:
    trial_id = end(claims, Outcome.PRUNED, 0.1)
    with engine.begin() as connection:
        extend(connection, study_id, trial_id)
        for _ in range(2):  # the second read begins after a transaction that is later than the open one
            for reader in readers:
                reader.assert_current(truth)
            other = storage.create_new_study(storage.get_study_directions(study_id))
            storage.delete_study(other)
    for reader in readers:
        reader.assert_current(truth)
    assert end(claims, Outcome.COMPLETE, 0.9) == trial_id
    for reader in readers:
        reader.assert_current(truth)


def test_deleted_values_of_a_running_trial_are_forgotten(
    readers: list[Reader], truth: RDBStorage, claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    """The trial fails and is retried between two reads, both of which see it running."""
    claim = take(claims)
    for epoch in range(3):
        claims.report(claim, epoch, 0.1)
    for reader in readers:
        assert len(reader.storage.get_all_trials(study_id)[1].intermediate_values) == 3
    claims.finish_attempt(claim, Outcome.FAILED)
    with engine.connect() as connection:
        retry(connection, study_id, claim.trial_id)
    claims.report(take(claims), 0, 0.9)
    for reader in readers:
        reader.assert_current(truth)
        assert reader.storage.get_all_trials(study_id)[1].intermediate_values == {0: 0.9}
