"""From a journal to a real MLflow server: sent records and rejected ones."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import optuna
import psycopg2
import pytest
import sqlalchemy as sa
import torch
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_metric_name

from hpsearch.storage.attributes import RUN_ID, TRACKING
from hpsearch.storage.database.roles import MLFLOW
from hpsearch.storage.database.roles import MLFLOW_DATABASE as TRACKING_DATABASE
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.embedded.state import load_state
from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.journal import Cursor, Journal
from hpsearch.storage.journals.journal_records import (
    Artifacts,
    ArtifactsComplete,
    Dataset,
    End,
    Epoch,
    Header,
    Model,
    Params,
    Released,
    Tags,
)
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.journals.sender import Sender
from hpsearch.storage.mlflow import health, model_export
from hpsearch.storage.mlflow import model as exported_model
from hpsearch.storage.mlflow.client import RunDeletedError, Tracking, sanitize_name
from hpsearch.storage.mlflow.consumer import MlflowConsumer
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.finishing import Outcome

_numbers = itertools.count()


@pytest.fixture(scope="module")
def tracking(stack: StackInfo) -> Tracking:
    return Tracking(stack.tracking_uri)


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


class Post:
    """A study, its outbox and its consumer."""

    def __init__(self, storage: PostgresStorage, tracking: Tracking, folder: Path) -> None:
        self.name = f"shipping-{secrets.token_hex(4)}"
        self.storage, self.tracking = storage, tracking
        study_id = storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], self.name)
        self.trial_id = storage.create_new_trial(study_id)
        self.parent = tracking.ensure_study_run(self.name, study_id, params={"n_trials": 1}, known_run_id=None)
        self.box = Outbox(folder)
        self.delivered: list[int] = []
        links = RunLinks(storage.engine)
        self.consumer = MlflowConsumer(
            tracking, links, get_parent_run=lambda: self.parent, on_delivered=self.delivered.append
        )

    def open(self, *, resumed: bool = False, attempt: int = 1) -> Journal:
        tags = {"hpsearch.objective": "x"}
        return self.box.open(
            f"0000-{attempt}", Header(self.name, self.trial_id, 0, attempt, resumed, metric="val_loss", tags=tags)
        )

    def consume(self, journal: Journal) -> bool:
        return self.consumer.consume(journal.cursors["mlflow"])

    def attrs(self) -> dict[str, str]:
        return self.storage.get_trial_user_attrs(self.trial_id)

    @property
    def run_id(self) -> str:
        return self.note(RUN_ID)

    def note(self, key: str = TRACKING) -> str:
        with self.storage.engine.connect() as connection:
            query = "SELECT value_json FROM trial_user_attributes WHERE trial_id = :id AND key = :key"
            value = connection.execute(sa.text(query), {"id": self.trial_id, "key": key}).scalar()
        assert value is not None
        return str(value).strip('"')

    def begin_attempt(self, attempt: int) -> None:
        query = """
            INSERT INTO hpsearch_attempts (trial_id, attempt, claim_id, worker, process, expires_at)
            VALUES (:trial, :attempt, gen_random_uuid(), 'w', 'p', now() + interval '1 h')
        """
        with self.storage.engine.begin() as connection:
            connection.execute(sa.text(query), {"trial": self.trial_id, "attempt": attempt})

    def points(self, key: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self.tracking.client.get_metric_history(self.run_id, key)]


@pytest.fixture
def post(storage: PostgresStorage, tracking: Tracking, tmp_path: Path) -> Post:
    return Post(storage, tracking, tmp_path / "box")


@pytest.fixture
def sending(post: Post) -> Iterator[Callable[[], int]]:
    """Return a function that sends all waiting records in a thread and returns the number of remaining journals."""
    senders = []

    def send(*, should_retry_rejected: bool = False) -> int:
        senders.append(Sender(post.box, [post.consumer], should_retry_rejected=should_retry_rejected))
        senders[-1].start()
        left = senders[-1].flush(60.0)
        senders[-1].close()
        return left

    yield send
    for sender in senders:
        sender.close()


def test_nan_and_infinity_are_sent_in_the_form_of_mlflow(post: Post) -> None:
    journal = post.open()
    journal.append(Epoch(0, 1.5, {"val_loss": math.nan, "up": math.inf, "down": -math.inf}))
    post.consume(journal)
    [(_, value)] = post.points("val_loss")
    assert math.isnan(value)
    assert post.points("up") == [(0, 1.7976931348623157e308)], "MLflow's tables have no infinity"
    assert post.points("down") == [(0, -1.7976931348623157e308)]


def test_names_and_texts_that_mlflow_rejects_are_adapted(post: Post) -> None:
    journal = post.open()
    journal.append(Params({"very long": "x" * 10_000, "a@b": 1}))
    journal.append(Epoch(0, 1.0, {"f1@0.5": 0.5, "val_loss": 1.0}))
    journal.append(Tags({"reason": "y" * 10_000}))
    post.consume(journal)
    run = post.tracking.client.get_run(post.run_id)
    assert (len(run.data.params["very long"]), run.data.params["a_b"]) == (6000, "1")
    assert run.data.metrics == {"f1_0.5": 0.5, "val_loss": 1.0}
    assert len(run.data.tags["reason"]) == 5000


def test_a_rejected_record_does_not_affect_others(post: Post) -> None:
    journal = post.open()
    journal.append(Params({"lr": 1}))
    post.consume(journal)
    journal.append(Params({"lr": 2}))  # MLflow rejects changed parameters
    journal.append(Epoch(0, 1.0, {"val_loss": 1.0}))
    post.consume(journal)
    assert post.points("val_loss") == [(0, 1.0)]
    assert "rejected params" in str(journal.cursors["mlflow"].position.problem)
    journal.append(End(Outcome.COMPLETE, "r", at=2000, is_checkpoint_kept=False))
    assert post.consume(journal)
    assert "rejected params" in post.storage.get_trial(post.trial_id).user_attrs[TRACKING]


@pytest.fixture
def mlflow_database(stack: StackInfo) -> Iterator[psycopg2.extensions.connection]:
    """Connect to the MLflow server's database as the server does."""
    state = load_state(stack.home)
    assert state is not None
    server = EmbeddedPostgres(stack.home / "postgres", stack.home / "logs" / "postgres.log")
    port = state.postgres.port or 0
    parts = {"host": server.get_host(port), "port": port, "dbname": TRACKING_DATABASE, "sslmode": "disable"}
    connection = psycopg2.connect(user=MLFLOW, password=state.mlflow_password, **parts)
    yield connection
    connection.close()


def wait_for_a_waiter(database: psycopg2.extensions.connection) -> None:
    """Wait until the server waits for a row lock of this connection."""
    waits = "SELECT 1 FROM pg_stat_activity WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"
    with database.cursor() as cursor:
        while cursor.execute(waits) or not cursor.fetchall():
            time.sleep(0.01)  # Postgres has no event for this


def test_concurrent_logging_of_equal_data_loses_no_files(
    post: Post, mlflow_database: psycopg2.extensions.connection, tmp_path: Path
) -> None:
    """MLflow checks for a dataset before it writes it, so the slower of two requests fails as a bad request."""
    data = Dataset("split", secrets.token_hex(16), source="{}", profile="{}")
    journal = post.open()
    post.consume(journal)
    (tmp_path / "config.yaml").write_text("lr: 1")
    assert journal.store_artifact(tmp_path / "config.yaml")
    journal.append(data)
    journal.append(Artifacts())
    with mlflow_database, mlflow_database.cursor() as other:
        row = (secrets.token_hex(16), post.tracking.experiment_id, data.name, data.digest)
        other.execute(
            "INSERT INTO datasets (dataset_uuid, experiment_id, name, digest, dataset_source_type, dataset_source)"
            " VALUES (%s, %s, %s, %s, 'code', '{}')",
            row,
        )
        slower = threading.Thread(target=post.consume, args=(journal,))
        slower.start()
        wait_for_a_waiter(mlflow_database)
    slower.join()
    run = post.tracking.client.get_run(post.run_id)
    assert [used.dataset.digest for used in run.inputs.dataset_inputs] == [data.digest]
    assert [file.path for file in post.tracking.client.list_artifacts(post.run_id)] == ["config.yaml"]
    assert journal.cursors["mlflow"].position.problem is None


def test_files_are_logged_whatever_their_names_are(post: Post, tmp_path: Path) -> None:
    journal = post.open()
    for name in ("a#1", "a#2", "b?c", "50%2Fd", "e\nf", " g", "h ü.txt", "i\udcff"):
        (tmp_path / name).write_text(name, errors="surrogateescape")
        assert journal.store_artifact(tmp_path / name)
    journal.append(Artifacts())
    post.consume(journal)
    logged = {file.path for file in post.tracking.client.list_artifacts(post.run_id)}
    assert logged == {"a_1", "a_2", "b_c", "50_2Fd", "e_f", "_g", "h ü.txt", "i_"}
    assert journal.cursors["mlflow"].position.problem is None


def test_rejected_data_do_not_affect_files(post: Post, tmp_path: Path) -> None:
    journal = post.open()
    (tmp_path / "config.yaml").write_text("lr: 1")
    assert journal.store_artifact(tmp_path / "config.yaml")
    journal.append(Dataset("split", "x" * 1000, source="{}", profile="{}"))
    journal.append(Artifacts())
    post.consume(journal)
    assert [file.path for file in post.tracking.client.list_artifacts(post.run_id)] == ["config.yaml"]
    assert str(journal.cursors["mlflow"].position.problem).startswith("MLflow rejected data: ")


def test_many_epochs_are_sent_in_few_requests(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    log = post.tracking.log

    def counted(run_id: str, **batch: list[object]) -> None:
        sizes.append(len(batch.get("metrics", [])))
        log(run_id, **batch)  # type: ignore[arg-type]

    monkeypatch.setattr(post.tracking, "log", counted)
    journal = post.open()
    for epoch in range(130):
        journal.append(Epoch(epoch, float(epoch), {f"m{n}": 1.0 for n in range(9)} | {"val_loss": 1.0}))
    post.consume(journal)
    assert sizes == [1000, 300]
    assert len(post.points("m3")) == 130


def test_a_resumed_trial_sends_only_records_missing_in_its_run(post: Post) -> None:
    """Epochs that were trained again at another time are not sent again, unless the value differs."""
    journal = post.open()
    for epoch in range(3):
        journal.append(Epoch(epoch, float(epoch), {"val_loss": epoch / 10, "epoch_seconds": 1.0}))
    post.consume(journal)
    again = post.open(resumed=True, attempt=2)
    for epoch in range(5):
        at = float(epoch) if epoch < 2 else 100.0 + epoch
        again.append(Epoch(epoch, at, {"val_loss": epoch / 10, "epoch_seconds": 2.0}))
    post.consume(again)
    assert post.points("val_loss") == [(epoch, epoch / 10) for epoch in range(5)]
    assert post.points("epoch_seconds") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_deleted_run_stays_deleted_and_is_reported(
    post: Post, sending: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    journal = post.open()
    post.consume(journal)
    run_id = post.run_id
    post.tracking.client.delete_run(run_id)
    journal.append(Epoch(0, 1.0, {"val_loss": 1.0}))
    journal.close()
    with caplog.at_level(logging.WARNING):
        assert sending() == 0
    assert f"MLflow run {run_id} was deleted in the MLflow UI; restore the run there" in caplog.text
    assert f"retry with: hpsearch sync {post.name}" in caplog.text
    assert post.box.count_journals() == 1
    assert sending() == 0, "it is not tried again unasked"
    post.tracking.client.restore_run(run_id)
    assert sending(should_retry_rejected=True) == 0
    assert post.box.count_journals() == 0
    assert post.points("val_loss") == [(0, 1.0)]


def test_a_deleted_experiment_is_an_error_of_one_line(stack: StackInfo) -> None:
    name = f"gone-{next(_numbers)}"
    made = Tracking(stack.tracking_uri, experiment=name).experiment_id
    tracking = Tracking(stack.tracking_uri, experiment=name)
    run_id = tracking.client.create_run(made).info.run_id
    tracking.client.delete_experiment(made)
    command = rf"mlflow experiments restore --experiment-id {made}"
    with pytest.raises(StorageError, match=rf"^MLflow experiment '{name}' is deleted; restore it .* with: {command}$"):
        _ = tracking.experiment_id
    with pytest.raises(RunDeletedError, match=rf"^MLflow experiment '{name}' is deleted; .* with: {command}$"):
        tracking.has_run(run_id)


def test_journals_of_a_deleted_study_are_removed(post: Post) -> None:
    journal = post.open()
    post.storage.delete_study(post.storage.get_study_id_from_name(post.name))
    assert post.consume(journal)


@pytest.mark.parametrize(("state", "delivered"), [("COMPLETE", [0]), ("PRUNED", [0]), ("FAIL", [])])
def test_the_run_of_a_worker_that_died_after_the_end_of_its_trial_is_ended(
    post: Post, sending: Callable[[], int], state: str, delivered: list[int]
) -> None:
    journal = post.open()
    journal.append(Epoch(0, 1.0, {"val_loss": 0.5}))
    journal.append(ArtifactsComplete())
    journal.close()
    post.storage.set_trial_state_values(post.trial_id, optuna.trial.TrialState[state])
    assert sending() == 0
    assert post.tracking.client.get_run(post.run_id).data.tags["hpsearch.state"] == state.lower()
    assert post.points("val_loss") == [(0, 0.5)]
    assert post.delivered == delivered, "whose checkpoints may go"


def test_a_journal_that_ends_before_its_model_keeps_the_checkpoint(post: Post, sending: Callable[[], int]) -> None:
    """The trial was COMPLETE before: after an interrupted rebuild or a power cut."""
    journal = post.open(resumed=True)
    journal.append(Epoch(0, 1.0, {"val_loss": 0.5}))
    journal.close()
    post.storage.set_trial_state_values(post.trial_id, optuna.trial.TrialState.COMPLETE)
    assert sending() == 0
    assert post.delivered == [], "its checkpoint is all that is left of its weights"
    assert post.note().startswith("pending"), "so that sync makes it again"


@pytest.mark.parametrize(("state", "points"), [("FAIL", [(0, 0.5)]), ("COMPLETE", None), (None, None)])
def test_records_of_an_earlier_attempt_are_sent_if_not_repeated(
    post: Post, sending: Callable[[], int], state: str | None, points: list[tuple[int, float]] | None
) -> None:
    journal = post.open()
    journal.append(Epoch(0, 1.0, {"val_loss": 0.5}))
    journal.append(Released())
    journal.close()
    post.begin_attempt(2)
    if state is not None:
        post.storage.set_trial_state_values(post.trial_id, optuna.trial.TrialState[state])
    assert sending() == 0
    assert post.box.count_journals() == (state is None), "it is kept until the trial has ended"
    if points is None:
        assert RUN_ID not in post.attrs()
    else:
        assert post.points("val_loss") == points
        assert post.tracking.client.get_run(post.run_id).info.status == "FAILED"


def test_an_interrupted_model_export_creates_one_model(
    post: Post, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, cut = exported_model.link_model, []

    def first_cut(*args: Any, **kwargs: Any) -> None:
        if not cut:
            cut.append(True)
            raise ConnectionError("the server was killed")
        link(*args, **kwargs)

    monkeypatch.setattr(exported_model, "link_model", first_cut)
    journal = post.open()
    model_export.export_model(torch.nn.Linear(2, 1).eval(), [("", torch.zeros(4, 2))], [{0}], journal.model_folder)
    journal.append(Epoch(0, 1.0, {"val_loss": 0.5}))
    journal.append(Model("m", step=0, at=1.0, metrics={"val_loss": 0.5}, params={}, tags={}))
    with pytest.raises(ConnectionError):
        post.consume(journal)
    post.consume(journal)
    found = post.tracking.client.search_logged_models([post.tracking.experiment_id], f"source_run_id = '{post.run_id}'")
    assert [model.status for model in found] == ["READY"]


def test_a_journal_that_the_server_cannot_process_blocks_no_other(
    post: Post, storage: PostgresStorage, tracking: Tracking, tmp_path: Path, sending: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    original = post.consumer.consume

    def choke(cursor: Cursor) -> bool:
        if cursor.journal.name == "0000-1":
            raise MlflowException("Internal server error")  # as with a full artifact store
        return original(cursor)

    monkeypatch.setattr(post.consumer, "consume", choke)
    for attempt in (1, 2):
        journal = post.open(attempt=attempt)
        journal.append(Epoch(attempt, 1.0, {"val_loss": 0.5}))
        journal.append(Released())
        journal.close()
    assert sending() == 1
    assert post.points("val_loss") == [(2, 0.5)]


def test_a_run_locked_by_a_frozen_process_blocks_no_other_run(post: Post, sending: Callable[..., int]) -> None:
    held = post.open()
    held.append(Epoch(0, 1.0, {"val_loss": 1.0}))
    held.close()
    study_id = post.storage.get_study_id_from_name(post.name)
    trial_id = post.storage.create_new_trial(study_id)
    other = post.box.open("0001-1", Header(post.name, trial_id, 1, 1, resumed=False, metric="val_loss", tags={}))
    other.append(Released())
    other.close()
    sender = Sender(post.box, [post.consumer])
    with RunLinks(post.storage.engine).lock_run(post.trial_id):
        sender.start()
        deadline = time.monotonic() + 600
        while post.box.has_journal("0001"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert post.box.has_journal("0000")
    sender.close()
    assert sending() == 0
    assert post.points("val_loss") == [(0, 1.0)]


def test_a_server_that_does_not_answer_receives_only_health_checks(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests would wait 30 seconds for the answer."""
    post.open().close()
    requests = []
    monkeypatch.setattr(health, "_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as connections:

        def read_requests() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    connection = connections.enter_context(server.accept()[0])
                    requests.append(connection.recv(100).partition(b" HTTP")[0])

        threading.Thread(target=read_requests, daemon=True).start()
        frozen = Tracking(f"http://127.0.0.1:{server.getsockname()[1]}")
        sender = Sender(post.box, [MlflowConsumer(frozen, RunLinks(post.storage.engine), get_parent_run=str)])
        sender.start()
        assert sender.flush(math.inf) == 1
        sender.close()
        server.shutdown(socket.SHUT_RDWR)
    assert "no MLflow server answers (timed out)" in str(sender.unavailable_reason)
    assert requests == [b"GET /health"] * 3


def test_all_open_runs_of_a_study_are_found_on_all_pages(tracking: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    study, search = f"pages-{secrets.token_hex(4)}", tracking.client.search_runs
    parent = tracking.ensure_study_run(study, next(_numbers), params={}, known_run_id=None)
    made = {number: tracking.create_trial_run(study, number, parent=parent, tags={}) for number in range(3)}

    def one_by_one(*arguments: Any, page_token: str | None, **_: int) -> Any:
        return search(*arguments, max_results=1, page_token=page_token)

    monkeypatch.setattr(tracking.client, "search_runs", one_by_one)
    assert tracking.find_running_trial_runs(study, parent) == made


@pytest.mark.parametrize(
    "name", ["train//loss", "acc/", "/a", "./a", "../../etc", "a/../b", "..", ".", "%", "x" * 249 + "//"]
)
def test_names_of_metrics_are_changed_to_names_that_mlflow_accepts(name: str) -> None:
    """MLflow would reject all metrics of the epoch."""
    _validate_metric_name(sanitize_name(name))
