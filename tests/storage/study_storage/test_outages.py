"""Outages of the database during calls: calls wait, nothing is lost, nothing is executed twice."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg2
import pytest
import sqlalchemy as sa
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.retry import is_transient, retrying
from hpsearch.storage.database.roles import create_databases
from hpsearch.storage.embedded import state as ports
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.factories import X
from tests.storage.conftest import Open
from tests.storage.shaking import COMPLETE, check, run_trials

if TYPE_CHECKING:
    from tests.conftest import PostgresServer


@pytest.fixture
def storage(opened: Open) -> PostgresStorage:
    return opened("shaken", retry_seconds=60)


def test_cut_connections_lose_nothing(
    storage: PostgresStorage, study_id: int, postgres_server: PostgresServer, database: str
) -> None:
    """All connections are cut repeatedly in the middle of statements."""
    cut, cuts = psycopg2.connect(postgres_server.admin_url.replace("+psycopg2", "")), 0
    cut.autocommit = True
    query = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = %s AND application_name = 'shaken' AND pid <> pg_backend_pid()"
    )
    enough = threading.Event()

    def run_until_enough() -> list[int]:
        made = run_trials(storage, study_id, 4)
        while not enough.is_set():
            made += run_trials(storage, study_id, 1)
        return made

    with ThreadPoolExecutor(3) as pool, cut.cursor() as cursor:
        runs = [pool.submit(run_until_enough) for _ in range(3)]
        try:
            while cuts < 25 and not any(run.done() for run in runs):  # done only if it failed
                cursor.execute(query, (database,))
                cuts += (cursor.fetchone() or (0,))[0]
                time.sleep(0.05)  # the pace of the cuts
        finally:
            enough.set()
        made = [run.result() for run in runs]
    cut.close()
    check(storage, study_id, made)


@pytest.fixture(scope="module")
def own_server(guarded_homes: Callable[[], Any]) -> Iterator[tuple[EmbeddedPostgres, str]]:
    """Start a Postgres that the test can kill; return it with the URL of its migrated database for a worker."""
    with guarded_homes() as home:
        (home / "logs").mkdir(parents=True)
        home.chmod(0o755)
        server = EmbeddedPostgres(make_postgres_folder(home), home / "logs" / "postgres.log", has_port=True)
        port = server.start(None)
        made = create_databases(server.make_url(port), owner_password="o", worker_password="w", mlflow_password="m")
        migrate(made.owner_url)
        yield server, made.worker_url
        server.stop()


def test_a_killed_and_restarted_server_loses_nothing(
    own_server: tuple[EmbeddedPostgres, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = own_server
    storage = open_storage(url, application_name="killed", retry_seconds=120)
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "killed")
    port = server.read_port()
    progress = open_storage(url, application_name="watch", retry_seconds=120)
    with caplog.at_level(logging.WARNING, "hpsearch.storage.database.retry"), ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_trials, storage, study_id, 8) for _ in range(2)]
        for reached in (3, 8):
            while len(progress.get_all_trials(study_id, states=COMPLETE)) < reached:
                assert not all(run.done() for run in runs)
            running = server.find_process()
            assert running is not None
            running.send_signal(signal.SIGKILL)
            running.wait()
            assert server.start(port) == port
        made = [run.result() for run in runs]
    check(storage, study_id, made)
    lines = [record.getMessage() for record in caplog.records]
    away, back = (sum(text in line for line in lines) for text in ("unavailable", "available again"))
    assert away == back >= 2, lines
    storage.engine.dispose()
    progress.engine.dispose()


@pytest.mark.soak
def test_an_outage_longer_than_the_retry_time_is_an_error(own_server: tuple[EmbeddedPostgres, str]) -> None:
    server, url = own_server
    port = server.read_port()
    storage = open_storage(url, application_name="impatient", retry_seconds=1)
    storage.get_all_studies()
    server.stop()
    try:
        with pytest.raises(sa.exc.OperationalError, match="refused"):
            storage.get_all_studies()
    finally:
        assert server.start(port) == port
    assert storage.get_all_studies() is not None
    storage.engine.dispose()


class LosesReplies:
    """A relay to Postgres that can forward a statement and then cut the connection instead of sending the reply."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.lose = threading.Event()
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.upstream))
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            threading.Thread(target=self._reply, args=(server, client), daemon=True).start()

    def _forward(self, client: Any, server: Any) -> None:
        try:
            while data := client.recv(65536):
                server.sendall(data)
        except OSError:
            pass
        server.close()

    def _reply(self, server: Any, client: Any) -> None:
        try:
            while data := server.recv(65536):
                # A reply to a write, complete: CommandComplete ('C') and ReadyForQuery ('Z').
                if self.lose.is_set() and data.endswith(b"Z\x00\x00\x00\x05I"):
                    self.lose.clear()
                    self.lost += 1
                    break
                client.sendall(data)
        except OSError:
            pass
        client.shutdown(socket.SHUT_RDWR)
        client.close()


@pytest.fixture
def relay(postgres_server: PostgresServer) -> Iterator[LosesReplies]:
    made = LosesReplies(postgres_server.port)
    yield made
    made.listener.close()


CALLS: dict[str, Callable[[PostgresStorage, int, int], Any]] = {
    "create": lambda s, study, _: s.create_new_trial(study),
    "template": lambda s, study, _: s.create_new_trial(study, create_trial(state=TrialState.WAITING)),
    "import": lambda s, study, _: s.import_trials(study, [create_trial(value=1.0)] * 3),
    "param": lambda s, _, trial: s.set_trial_param(trial, "x", 0.5, X),
    "attr": lambda s, _, trial: s.set_trial_user_attr(trial, "a", 1),
    "step": lambda s, _, trial: s.set_trial_intermediate_value(trial, 0, float("nan")),
    "complete": lambda s, _, trial: s.set_trial_state_values(trial, TrialState.COMPLETE, [float("-inf")]),
    "run": lambda s, _, trial: s.set_trial_state_values(trial + 1, TrialState.RUNNING),
    "study": lambda s, *_: s.create_new_study([StudyDirection.MINIMIZE], "second"),
    "study attr": lambda s, study, _: s.set_study_user_attr(study, "a", 1),
    "delete": lambda s, study, _: s.delete_study(study),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_with_a_lost_reply_is_executed_once(
    relay: LosesReplies, postgres_server: PostgresServer, database: str, call: str
) -> None:
    """A call with a lost reply has the same effect and result as one with its reply."""
    direct = open_storage(postgres_server.url(database), application_name="direct")
    shaken = open_storage(
        postgres_server.url(database).replace(str(postgres_server.port), str(relay.port)),
        application_name="shaken",
        retry_seconds=30,
    )

    def outcome(storage: PostgresStorage, name: str) -> tuple[Any, list[Any]]:
        study_id = direct.create_new_study([StudyDirection.MINIMIZE], name)
        trial_id = direct.create_new_trial(study_id)
        assert direct.create_new_trial(study_id, create_trial(state=TrialState.WAITING)) == trial_id + 1
        storage.get_all_trials(study_id)
        storage.set_trial_param(trial_id, "known", 0.5, X)
        if storage is shaken:
            relay.lose.set()
        got = CALLS[call](storage, study_id, trial_id)
        if storage is shaken:
            assert relay.lost == 1, "no reply was lost"
        names = sorted(s.study_name for s in direct.get_all_studies())
        if call == "study":
            direct.delete_study(direct.get_study_id_from_name("second"))
        if name not in names:
            return type(got), names
        trials = direct.get_all_trials(study_id)
        what = [(t.number, t.state, t.params, t.user_attrs, repr(t.intermediate_values), t.values) for t in trials]
        direct.delete_study(study_id)
        return type(got) if isinstance(got, int) and not isinstance(got, bool) else repr(got)[:1], [*what, names]

    assert outcome(shaken, "s") == outcome(direct, "s")
    direct.engine.dispose()
    shaken.engine.dispose()


def test_a_lost_reply_does_not_take_a_trial_of_another_worker(
    relay: LosesReplies, postgres_server: PostgresServer, database: str
) -> None:
    direct = open_storage(postgres_server.url(database), application_name="direct")
    url = postgres_server.url(database).replace(str(postgres_server.port), str(relay.port))
    shaken = open_storage(url, application_name="shaken", retry_seconds=30)
    study_id = direct.create_new_study([StudyDirection.MINIMIZE], "s")
    trial_id = direct.create_new_trial(study_id, create_trial(state=TrialState.WAITING))
    shaken.get_all_trials(study_id)
    assert direct.set_trial_state_values(trial_id, TrialState.RUNNING)
    relay.lose.set()
    assert shaken.set_trial_state_values(trial_id, TrialState.RUNNING) is False
    assert relay.lost == 1
    direct.engine.dispose()
    shaken.engine.dispose()


# Errors that are retried, and errors that are not


def fails(engine: sa.Engine, statement: str) -> sa.exc.DBAPIError:
    with pytest.raises(sa.exc.DBAPIError) as raised, engine.begin() as connection:
        connection.execute(sa.text(statement))
    return raised.value


@pytest.mark.parametrize(
    ("code", "transient"),
    [
        ("40001", True),  # serialization failure
        ("40P01", True),  # deadlock
        ("57P01", True),  # shutdown
        ("57P03", True),  # starting up
        ("53300", True),  # too many connections
        ("08006", True),  # connection failure
        ("23505", False),  # unique violation
        ("42P01", False),  # undefined table
        ("22001", False),  # too long
        ("42501", False),  # no right
        ("57014", False),  # query canceled
    ],
)
def test_the_error_of_the_server_determines_whether_to_retry(
    storage: PostgresStorage, code: str, transient: bool
) -> None:
    error = fails(storage.engine, f"DO $$ BEGIN RAISE 'on purpose' USING ERRCODE = '{code}'; END $$")
    assert is_transient(error) is transient


def test_only_temporary_connection_errors_are_retried(postgres_server: PostgresServer, database: str) -> None:
    def error_of(url: str) -> sa.exc.DBAPIError:
        engine = open_storage(url, application_name="t", retry_seconds=0).engine
        return fails(engine, "SELECT 1")

    assert not is_transient(error_of(postgres_server.url(database, password="wrong")))
    assert not is_transient(error_of(postgres_server.url("nowhere")))
    closed = postgres_server.url(database).replace(str(postgres_server.port), str(ports.choose_port()))
    assert is_transient(error_of(closed))


def test_an_error_of_the_caller_is_raised_at_once() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        retrying(60)(call)
    assert len(calls) == 1


def test_a_call_without_a_retry_time_logs_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    """`run` reads the progress like this twice a second."""

    def call() -> None:
        raise sa.exc.OperationalError("SELECT 1", {}, psycopg2.OperationalError("server closed the connection"))

    with pytest.raises(sa.exc.OperationalError):
        retrying(0)(call)
    assert caplog.messages == []
    with pytest.raises(sa.exc.OperationalError):
        retrying(0.01)(call)
    assert caplog.messages[0].startswith("database unavailable, retrying for up to 0 s: ")


@pytest.mark.soak
def test_a_process_frozen_beyond_the_retry_time_retries_once() -> None:
    calls = []

    def call() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise sa.exc.OperationalError("SELECT 1", {}, psycopg2.OperationalError("server closed the connection"))
        return len(calls)

    assert retrying(0)(call) == 2


def test_deadlocks_are_retried(storage: PostgresStorage, study_id: int, database_url: str) -> None:
    """Two transactions that lock two rows in opposite order both succeed."""
    one, two = (storage.create_new_trial(study_id) for _ in range(2))
    both, touch = threading.Barrier(2), sa.text("UPDATE trials SET number = number WHERE trial_id = :t")

    def lock(first: int, second: int) -> int:
        tries = 0
        for attempt in retrying(30):
            with attempt, storage.engine.begin() as connection:
                tries += 1
                for trial_id in (first, second):
                    connection.execute(touch, {"t": trial_id})
                    if tries == 1 and trial_id == first:
                        both.wait()
        return tries

    with ThreadPoolExecutor(2) as pool:
        tries = list(pool.map(lock, (one, two), (two, one)))
    assert sorted(tries) == [1, 2]
