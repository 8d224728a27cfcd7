"""``hpsearch doctor`` on real services: a working setup, and each kind of failure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import optuna
import pytest

from hpsearch import load_objective, source_hash
from hpsearch.objectives.template import write_template
from hpsearch.search.cli import run_command
from hpsearch.storage.attributes import SOURCE_SHA256, SPEC, STOPPED, TRACKING_URI, VERSION
from hpsearch.storage.embedded import stack as embedded
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.home import FOLDERS
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.conftest import execute
from tests.factories import spec_of

Look = Callable[..., tuple[int, dict[str, dict[str, str]]]]
AWAY = "http://127.0.0.1:1"
MACHINE = ("cpu", "gpu", "home", "disk", "versions")
SERVICES = ("services", "database", "schema", "rights", "clock", "connections", "mlflow", "artifacts")


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Look:
    """Run the command with --json; return its exit code and the result of each check."""

    def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = run_command(["doctor", "--json", *arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        report = json.loads(captured.out)
        assert report["ok"] == (code == 0) == all(check["status"] != "failed" for check in report["checks"])
        checks = {check["check"]: check for check in report["checks"]}
        assert len(checks) == len(report["checks"])
        return code, checks

    return run


@pytest.fixture
def storage(database_url: str) -> Iterator[PostgresStorage]:
    opened = open_storage(database_url, application_name="test")
    yield opened
    opened.engine.dispose()


@pytest.fixture
def path(tmp_path: Path, storage: PostgresStorage, stack: StackInfo) -> Path:
    """Create study ``s`` with an objective file, and return the file."""
    path = tmp_path / "wine.py"
    write_template(path)
    study_id = optuna.create_study(study_name="s", storage=storage)._study_id
    spec = {**spec_of(name="none").model_dump(), "objective": str(path), "metric": "accuracy"}
    attrs = {SPEC: spec, SOURCE_SHA256: source_hash(load_objective(str(path))), TRACKING_URI: stack.tracking_uri}
    for key, value in attrs.items():
        storage.set_study_user_attr(study_id, key, value)
    return path


def test_on_a_working_stack_nothing_fails(look: Look, stack: StackInfo) -> None:
    code, checks = look("--home", str(stack.home))
    assert code == 0
    assert tuple(checks) == (*SERVICES, "checkpoints", *MACHINE)
    assert [check["status"] for name, check in checks.items() if name in SERVICES] == ["ok"] * len(SERVICES)
    assert re.search(r"Postgres \d+\.\d+ at /\S+:5432, .* round trip .* ms", checks["database"]["found"])
    assert re.search(r"MLflow \d+\.\d+", checks["mlflow"]["found"])


def test_each_check_is_a_line_without_passwords(stack: StackInfo, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--home", str(stack.home)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [*SERVICES, "checkpoints", *MACHINE]
    assert re.fullmatch(r"\d+ ok(, \d+ with a warning)?", lines[-1])
    for url in (stack.storage_url, stack.owner_url):
        password = urlsplit(url).password
        assert password
        assert password not in "\n".join(lines)


def test_without_services_doctor_prints_the_remedy_and_starts_nothing(look: Look, fresh_home: Path) -> None:
    code, checks = look("--home", str(fresh_home))
    assert code == 1
    assert checks["services"]["status"] == "failed"
    assert "hpsearch up" in checks["services"]["remedy"]
    assert {checks[name]["status"] for name in SERVICES[1:]} == {"skipped"}
    assert checks["artifacts"]["found"] == "not run, because the check 'services' failed"
    assert checks["checkpoints"]["status"] == "ok"
    assert {service.state for service in embedded.read_status(fresh_home)} == {"stopped"}
    assert sorted(path.name for path in fresh_home.rglob("*")) == sorted(FOLDERS)


@pytest.mark.parametrize("url", ["postgresql://u:geheim@127.0.0.1:1/x", "postgresql://u@127.0.0.1:1/x?password=geheim"])
def test_an_unreachable_database_is_reported_without_its_password(look: Look, stack: StackInfo, url: str) -> None:
    code, checks = look("s", "--storage-url", url, "--tracking-uri", stack.tracking_uri)
    assert code == 1
    assert checks["database"]["status"] == "failed"
    assert "nothing listens at 127.0.0.1:1" in checks["database"]["found"]
    assert checks["mlflow"]["status"] == checks["artifacts"]["status"] == "ok"
    why = "not run, because the check 'database' failed"
    skipped = [name for name, check in checks.items() if check["found"] == why]
    assert skipped == [*SERVICES[2:6], "study", "workers", "release", "objective", "source", "checkpoints"]
    assert "geheim" not in str(checks)


def test_a_rejected_password_is_not_printed(look: Look, database_url: str) -> None:
    _, checks = look("--storage-url", re.sub(r":[^:@/]+@", ":geheim@", database_url))
    assert "rejected the password" in checks["database"]["found"]
    assert "geheim" not in str(checks)


def test_missing_rights_are_reported_with_the_grant_statement(look: Look, owner_url: str, database_url: str) -> None:
    execute(owner_url, "REVOKE INSERT, DELETE ON trial_values FROM hpsearch_worker")
    code, checks = look("--storage-url", database_url)
    assert code == 1
    assert "lacks DELETE, INSERT on the tables trial_values" in checks["rights"]["found"]
    grant = checks["rights"]["remedy"]
    assert grant == "run as the owner: GRANT DELETE, INSERT ON trial_values TO hpsearch_worker"
    execute(owner_url, grant.partition(": ")[2], "REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM hpsearch_worker")
    _, checks = look("--storage-url", database_url)
    assert "lacks USAGE on the sequences " in checks["rights"]["found"]
    execute(owner_url, checks["rights"]["remedy"].partition(": ")[2])
    assert look("--storage-url", database_url)[0] == 0


def test_tables_of_another_release_need_a_migration(look: Look, owner_url: str, database_url: str) -> None:
    execute(owner_url, "UPDATE hpsearch_alembic_version SET version_num = '0001'")
    code, checks = look("--storage-url", database_url)
    assert code == 1
    assert "revision 0001 of hpsearch" in checks["schema"]["found"]
    assert "hpsearch migrate" in checks["schema"]["remedy"]
    assert checks["rights"]["status"] == "skipped"
    assert checks["clock"]["status"] == "ok"


def test_a_database_without_tables_needs_a_migration(look: Look, empty_database_url: str) -> None:
    _, checks = look("--storage-url", empty_database_url)
    assert checks["schema"]["found"] == "the database has no hpsearch tables yet"
    assert "hpsearch migrate" in checks["schema"]["remedy"]


def test_a_different_clock_and_few_connections_cause_warnings(look: Look, database_url: str, monkeypatch) -> None:
    monkeypatch.setattr("hpsearch.search.doctor.database.MAX_CLOCK_SKEW_SECONDS", -1.0)
    monkeypatch.setattr("hpsearch.search.doctor.database.CONNECTIONS_PER_WORKER", 100_000)
    code, checks = look("--storage-url", database_url)
    assert code == 0
    assert checks["clock"]["status"] == checks["connections"]["status"] == "warning"
    assert "leases use the database's clock" in checks["clock"]["found"]
    assert "PgBouncer" in checks["connections"]["remedy"]


def test_an_unreachable_mlflow_server_is_reported(look: Look, database_url: str) -> None:
    code, checks = look("--storage-url", database_url, "--tracking-uri", AWAY)
    assert code == 1
    assert "no MLflow server answers" in checks["mlflow"]["found"]
    assert checks["artifacts"] == {
        "check": "artifacts",
        "status": "skipped",
        "found": "not run, because the check 'mlflow' failed",
        "remedy": "",
    }
    assert {checks[name]["status"] for name in SERVICES[:6]} == {"ok"}


def test_without_a_tracking_uri_that_of_the_study_is_used(look: Look, database_url: str, path: Path) -> None:
    assert "or STUDY to check" in look("--storage-url", database_url)[1]["mlflow"]["found"]
    code, checks = look("s", "--storage-url", database_url)
    assert code == 0
    assert checks["mlflow"]["status"] == checks["artifacts"]["status"] == "ok"


def test_a_checkpoint_folder_without_write_access_is_reported(look: Look, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, checks = look("--storage-url", database_url, "--checkpoint-url", str(tmp_path / "file" / "below"))
    assert code == 1
    assert "cannot be written" in checks["checkpoints"]["found"]
    _, checks = look("--storage-url", database_url, "--checkpoint-url", "s3://key:geheim@bucket/x")
    assert "pip install s3fs" in checks["checkpoints"]["found"]
    assert "geheim" not in str(checks)


def test_a_missing_checkpoint_folder_is_not_created(look: Look, database_url: str, tmp_path: Path) -> None:
    _, checks = look("--storage-url", database_url, "--checkpoint-url", str(tmp_path / "new" / "folder"))
    assert checks["checkpoints"]["status"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_accepts_a_study_that_a_worker_can_join(look: Look, database_url: str, path: Path) -> None:
    code, checks = look("s", "--storage-url", database_url)
    assert code == 0
    assert [checks[name]["status"] for name in ("study", "workers", "release", "objective", "source")] == ["ok"] * 5
    assert "0/9 trials ended" in checks["study"]["found"]


def test_obstacles_for_joining_a_study_are_reported(
    look: Look, database_url: str, path: Path, storage: PostgresStorage
) -> None:
    study_id = storage.get_study_id_from_name("s")
    storage.set_study_user_attr(study_id, STOPPED, "by me")
    storage.set_study_user_attr(study_id, VERSION, "99.0")
    path.write_text("print('to be loaded')\n" + path.read_text())
    code, checks = look("s", "--storage-url", database_url)
    assert code == 1
    assert "stopped by me" in checks["study"]["found"]
    assert "hpsearch start s" in checks["study"]["remedy"]
    assert "install hpsearch 99.0" in checks["release"]["found"]
    assert "has changed since" in checks["source"]["found"]
    path.unlink()
    code, checks = look("s", "--storage-url", database_url)
    assert "wine.py" in checks["objective"]["found"]
    assert checks["source"]["found"] == "not run, because the check 'objective' failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--home", "/dev/null/nowhere"], "'/dev/null/nowhere' cannot be created"),
        (["nope"], "no study 'nope'"),
        (["--storage-url", "sqlite:///x.db"], "is not a Postgres URL"),
        (["--storage-url", "", "--tracking-uri", AWAY], "--storage-url is empty"),
        (["--sort", "x"], "--sort"),
    ],
)
def test_bad_input_is_an_error_of_one_line(
    arguments, words, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--storage-url" in arguments else ["--storage-url", database_url]
    assert run_command(["doctor", *given, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_tracking_server_without_a_database_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--tracking-uri", AWAY]) == 2
    assert "--tracking-uri needs --storage-url" in capsys.readouterr().err
