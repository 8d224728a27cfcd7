"""Trials that a process owns: fenced writes, cached reads, batched writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.storage.errors import ClaimLostError
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.storage.conftest import Open
from tests.storage.statements import statements

X, KIND = FloatDistribution(0, 1), CategoricalDistribution(("a", "b"))


@pytest.fixture
def storage(opened: Open) -> PostgresStorage:
    return opened("test", retry_seconds=5)


@pytest.fixture
def other(opened: Open) -> PostgresStorage:
    return opened("other", retry_seconds=5)


def begin_attempt(storage: PostgresStorage, trial_id: int, attempt: int) -> None:
    """End the live attempt of a trial, if there is one, and start another."""
    with storage.engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE hpsearch_attempts SET ended_at = now(), outcome = 'lost' WHERE ended_at IS NULL")
        )
        connection.execute(
            sa.text(
                "INSERT INTO hpsearch_attempts (trial_id, attempt, claim_id, worker, process, expires_at)"
                "VALUES (:trial_id, :attempt, gen_random_uuid(), 'w', 'p', now())"
            ),
            {"trial_id": trial_id, "attempt": attempt},
        )


@pytest.fixture
def owned(storage: PostgresStorage, study_id: int) -> int:
    """Return the id of a trial that `storage` owns with attempt 1."""
    trial_id = storage.create_new_trial(study_id)
    begin_attempt(storage, trial_id, 1)
    storage.acquire_trial(storage.get_trial(trial_id), 1)
    return trial_id


def write_everything(storage: PostgresStorage, trial_id: int) -> None:
    storage.set_trial_param(trial_id, "x", 0.5, X)
    storage.set_trial_param(trial_id, "kind", 1, KIND)
    storage.set_trial_user_attr(trial_id, "u", {"deep": [1]})
    storage.set_trial_system_attr(trial_id, "s", None)
    storage.set_trial_intermediate_value(trial_id, 0, float("inf"))
    storage.set_trial_intermediate_value(trial_id, 0, 0.25)
    storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1])


def test_the_cache_equals_the_database(storage: PostgresStorage, other: PostgresStorage, owned: int) -> None:
    with statements(storage) as sent:
        write_everything(storage, owned)
        writes = len(sent)
        mirror = storage.get_trial(owned)
        assert storage.get_trial_system_attrs(owned) == {"s": None}
        assert storage.get_trial_user_attrs(owned) == {"u": {"deep": [1]}}
    assert len(sent) == writes, "reads of an owned trial ask the database"
    assert mirror == other.get_trial(owned)
    assert mirror.params == {"x": 0.5, "kind": "b"}
    assert mirror.duration is not None
    assert mirror.duration.total_seconds() >= 0


def test_the_cache_returns_copies(storage: PostgresStorage, owned: int) -> None:
    storage.set_trial_user_attr(owned, "u", {"deep": [1]})
    before = storage.get_trial(owned)
    before.user_attrs["u"]["deep"].append(2)
    before.params["x"] = 7
    storage.set_trial_intermediate_value(owned, 1, 1.0)
    assert storage.get_trial(owned).user_attrs == {"u": {"deep": [1]}}
    assert storage.get_trial(owned).params == {}
    assert before.intermediate_values == {}


WRITES = {
    "param": lambda s, t: s.set_trial_param(t, "y", 0.5, X),
    "user_attr": lambda s, t: s.set_trial_user_attr(t, "y", 1),
    "system_attr": lambda s, t: s.set_trial_system_attr(t, "y", 1),
    "step": lambda s, t: s.set_trial_intermediate_value(t, 7, 1.0),
    "complete": lambda s, t: s.set_trial_state_values(t, TrialState.COMPLETE, [1.0]),
    "waiting": lambda s, t: s.set_trial_state_values(t, TrialState.WAITING),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_of_a_superseded_attempt_are_rejected(
    storage: PostgresStorage, other: PostgresStorage, owned: int, write: str
) -> None:
    begin_attempt(other, owned, 2)
    before = other.read_trial(owned)
    with pytest.raises(ClaimLostError, match=r"trial 0 was taken over by w \(attempt 2\)"):
        WRITES[write](storage, owned)
    assert other.read_trial(owned) == before, "something was written"
    storage.release_trial(owned)
    other.acquire_trial(before, 2)
    WRITES[write](other, owned)


@pytest.mark.parametrize("write", WRITES)
def test_writes_after_an_external_end_are_rejected(
    storage: PostgresStorage, other: PostgresStorage, owned: int, write: str
) -> None:
    other.set_trial_state_values(owned, TrialState.FAIL)
    before = other.read_trial(owned)
    assert storage.get_trial(owned).state == TrialState.RUNNING, "noticed at the next write"
    with pytest.raises(ClaimLostError, match="trial 0 was set to FAIL by another program"):
        WRITES[write](storage, owned)
    assert other.read_trial(owned) == before


def test_writes_of_an_unknown_or_ended_attempt_are_rejected(storage: PostgresStorage, owned: int) -> None:
    storage.acquire_trial(storage.get_trial(owned), 5)
    with pytest.raises(ClaimLostError, match="trial 0 never had an attempt 5"):
        storage.set_trial_user_attr(owned, "a", 1)
    storage.acquire_trial(storage.get_trial(owned), 1)
    with storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_attempts SET ended_at = now(), outcome = 'gave back'"))
    with pytest.raises(ClaimLostError, match="trial 0 was taken from this worker, whose lease expired"):
        storage.set_trial_user_attr(owned, "a", 1)


def test_the_fencing_token_holds_during_a_concurrent_takeover(
    storage: PostgresStorage, other: PostgresStorage, owned: int
) -> None:
    """An uncommitted takeover blocks the write, and its commit rejects the write."""
    with ThreadPoolExecutor(1) as pool:
        with other.engine.begin() as connection:
            connection.execute(sa.text("UPDATE hpsearch_attempts SET ended_at = now(), outcome = 'lost'"))
            write = pool.submit(storage.set_trial_intermediate_value, owned, 0, 1.0)
            while not _somebody_waits(other):
                assert not write.done()
        with pytest.raises(ClaimLostError):
            write.result(timeout=300)
    assert other.read_trial(owned).intermediate_values == {}


def _somebody_waits(storage: PostgresStorage) -> bool:
    query = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'test' AND wait_event_type = 'Lock'"
    )
    with storage.engine.connect() as connection:
        return bool(connection.execute(sa.text(query)).scalar())


def test_batched_writes_are_one_statement_and_visible_locally_before(
    storage: PostgresStorage, other: PostgresStorage, study_id: int, owned: int
) -> None:
    storage.set_trial_param(owned, "x", 0.25, X)
    with statements(storage) as sent:
        with storage.batch_writes(owned):
            storage.set_trial_param(owned, "kind", 1, KIND)
            storage.set_trial_param(owned, "x", 0.75, X)  # already set: the first value is kept
            storage.set_trial_user_attr(owned, "u", 1)
            storage.set_trial_user_attr(owned, "u", 2)
            storage.set_trial_system_attr(owned, "s", 1)
            assert storage.get_trial(owned).params == {"x": 0.25, "kind": "b"}
            assert storage.get_trial_system_attrs(owned) == {"s": 1}
            lookups = len(sent)
            (listed,) = storage.get_all_trials(study_id)
            assert listed.params == {"x": 0.25, "kind": "b"}
            assert other.read_trial(owned).params == {"x": 0.25}
            sent.clear()
        assert len(sent) == 1
    assert lookups == 1, "whether the study has the parameter `kind` is asked once"
    assert storage.get_trial(owned) == other.read_trial(owned)
    assert other.read_trial(owned).user_attrs == {"u": 2}


def test_batched_writes_of_a_trial_without_a_worker(storage: PostgresStorage, study_id: int) -> None:
    trial_id = storage.create_new_trial(study_id)
    with storage.batch_writes(trial_id):
        storage.set_trial_param(trial_id, "x", 0.5, X)
        assert storage.get_trial(trial_id).params == {"x": 0.5}
        assert storage.read_trial(trial_id).params == {}
    assert storage.read_trial(trial_id).params == {"x": 0.5}


def test_discarded_writes_have_no_effect(storage: PostgresStorage, owned: int) -> None:
    with storage.batch_writes(owned) as held:
        storage.set_trial_param(owned, "x", 0.5, X)
        storage.set_trial_user_attr(owned, "u", 1)
        held.discard()
        assert storage.get_trial(owned).params == {}
        storage.set_trial_param(owned, "x", 0.75, X)
    assert storage.read_trial(owned).params == {"x": 0.75}
    assert storage.read_trial(owned).user_attrs == {}


def test_an_exception_discards_batched_writes(storage: PostgresStorage, owned: int) -> None:
    with pytest.raises(KeyError), storage.batch_writes(owned):  # noqa: PT012  the first line is the point
        storage.set_trial_param(owned, "x", 0.5, X)
        storage.get_study_id_from_name("none such")
    assert storage.get_trial(owned) == storage.read_trial(owned)
    assert storage.read_trial(owned).params == {}
    storage.set_trial_param(owned, "x", 0.25, X)
    assert storage.read_trial(owned).params == {"x": 0.25}


def test_the_fencing_token_holds_for_batched_writes(
    storage: PostgresStorage, other: PostgresStorage, owned: int
) -> None:
    with pytest.raises(ClaimLostError), storage.batch_writes(owned):  # noqa: PT012  raised at its exit
        storage.set_trial_param(owned, "x", 0.5, X)
        begin_attempt(other, owned, 2)
    assert other.read_trial(owned).params == {}
    assert storage.get_trial(owned).params == {}


def test_an_incompatible_distribution_is_rejected_at_once(
    storage: PostgresStorage, other: PostgresStorage, study_id: int, owned: int
) -> None:
    first = other.create_new_trial(study_id)
    other.set_trial_param(first, "x", 0.5, X)
    with pytest.raises(ValueError, match="different distribution kind"), storage.batch_writes(owned):
        storage.set_trial_param(owned, "x", 1, KIND)
    with storage.batch_writes(owned):
        storage.set_trial_param(owned, "kind", 1, KIND)
    with pytest.raises(ValueError, match=r"the search space of parameter 'kind' differs.*dynamic value space"):
        storage.set_trial_param(owned, "kind", 0, CategoricalDistribution(("b", "a")))
    with pytest.raises(ValueError, match="different distribution kind"):
        storage.import_trials(study_id, [create_trial(value=1, params={"x": "a"}, distributions={"x": KIND})])
    other.set_trial_state_values(first, TrialState.COMPLETE, [1.0])
    with pytest.raises(UpdateFinishedTrialError):
        other.set_trial_param(first, "x", 1, KIND)


def test_an_import_of_trials_is_atomic(storage: PostgresStorage, other: PostgresStorage, study_id: int) -> None:
    good = create_trial(value=1.0, intermediate_values={0: 1.0})
    bad = create_trial(value=1.0, user_attrs={"k" * 600: 1})  # longer than the column
    with pytest.raises(sa.exc.DBAPIError):
        storage.import_trials(study_id, [*[good] * 1500, bad])
    assert other.get_all_trials(study_id) == []
    ids = storage.import_trials(study_id, [good] * 1500)
    got = other.get_all_trials(study_id)
    assert ([t._trial_id for t in got], [t.number for t in got]) == (ids, list(range(1500)))
    assert got[-1].intermediate_values == {0: 1.0}
    with pytest.raises(KeyError):
        storage.import_trials(study_id + 1, [good])
    assert storage.import_trials(study_id, []) == []


def test_a_full_read_equals_an_incremental_read(
    storage: PostgresStorage, other: PostgresStorage, study_id: int
) -> None:
    def one(number: int) -> FrozenTrial:
        state = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING)[number % 4]
        return create_trial(
            state=state,
            value=float("inf") if state == TrialState.COMPLETE else None,
            params={"kind": "a", "x": 0.1},
            distributions={"x": X, "kind": KIND},
            user_attrs={"u": [number]},
            system_attrs={"s": {"n": number}},
            intermediate_values={2: float("-inf"), 0: 0.1},
        )

    storage.get_all_trials(study_id)
    for number in range(8):
        storage.create_new_trial(study_id, one(number))
        storage.get_all_trials(study_id)
    cold = other.get_all_trials(study_id)
    assert cold == storage.get_all_trials(study_id)
    assert list(cold[0].params) == ["kind", "x"]


def test_cached_finished_trials_always_include_own_ones(
    storage: PostgresStorage, other: PostgresStorage, study_id: int, owned: int
) -> None:
    def known() -> list[int]:
        return [t.number for t in storage.get_finished_trials(study_id, (TrialState.COMPLETE,), max_age=3600.0)]

    assert known() == []
    other.create_new_trial(study_id, create_trial(value=1.0))
    assert known() == []
    storage.set_trial_state_values(owned, TrialState.COMPLETE, [0.5])
    storage.release_trial(owned)
    assert known() == [0, 1]
