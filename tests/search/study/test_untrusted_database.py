"""Attacks by a holder of the worker's database role, on the person who runs commands on the same database."""

from __future__ import annotations

import json
import os
import pwd
import py_compile
import shlex
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.loading import load_objective, locate_source
from hpsearch.objectives.template import write_template
from hpsearch.search.cli import run_command, steer
from hpsearch.search.errors import SearchError
from hpsearch.search.study import study as study_module
from hpsearch.search.study.cleanup import find_garbage
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.trust import check_source, read_code
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, RESTORED, RUN_ID, SOURCE_SHA256, SPEC, TRACKING_URI
from hpsearch.storage.files import compute_sha256
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.factories import spec_of
from tests.second_user import UID, act_as_second_user, needs_root

TOKEN = "0123456789abcdef"


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="attacker")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Path:
    """Return the home folder of the victim, whose commands use the database of the attacker."""
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a folder with a file of the victim, which has the layout of a study's checkpoints."""
    file = tmp_path / f"s-{TOKEN}" / "0000" / "0001-1.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    return file


def make_study(storage: PostgresStorage, **attrs: Any) -> int:
    """Create a study as a worker's role can, with attributes of the attacker's choice and a finished trial."""
    study = optuna.create_study(study_name="s", storage=storage)
    for key, value in {SPEC: spec_of(name="none").model_dump(), **attrs}.items():
        storage.set_study_user_attr(study._study_id, key, value)
    study.add_trial(optuna.trial.create_trial(value=0.5))
    return study._study_id


def read_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("hpsearch: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("folder", ["../../victim", "victim", "", ".", "..", f"s-{TOKEN}/../../victim", f"s-{TOKEN}\n"])
def test_delete_rejects_folder_names_that_hpsearch_does_not_generate(
    home: Path, storage: PostgresStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    kept = tmp_path / "victim" / "file"
    kept.parent.mkdir()
    kept.touch()
    for name in ("runs", "outbox", "checkpoints"):
        (home / name / "victim").mkdir(parents=True)
    make_study(storage, **{FOLDER_NAME: folder})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert "study 's' has the folder name" in read_error(capsys)
    assert run_command(["gc", "s", "--yes"]) == 2
    assert kept.exists()
    assert len(list(home.glob("*/victim"))) == 3
    load_study(storage, "s")


@pytest.mark.parametrize("name", ["s", "other"])
@pytest.mark.parametrize("folder", [f"other-{TOKEN}", f"s-other-{TOKEN}", f"s{TOKEN}", "other-1"])
def test_delete_and_gc_reject_the_folder_of_another_study(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], folder: str, name: str
) -> None:
    kept = [home / kind / folder / "0000" / "0001-1.pt" for kind in ("runs", "outbox", "checkpoints")]
    for file in kept:
        file.parent.mkdir(parents=True)
        file.touch()
    spec = {**spec_of(name="none").model_dump(), "name": name}
    make_study(storage, **{FOLDER_NAME: folder, SPEC: spec})
    assert run_command(["delete", "s", "--yes"]) == 2
    error = read_error(capsys)
    assert (f"has the folder name '{folder}'" if name == "s" else "no study 'other'") in error
    run_command(["gc", "s", "--yes"])
    assert all(file.exists() for file in kept)


@pytest.mark.parametrize("folder", [f"s-2-{TOKEN}", "s-2"])
def test_delete_rejects_the_folder_of_a_study_whose_name_ends_in_a_number(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """Earlier versions generated NAME-ID-TOKEN and NAME-ID."""
    kept = home / "runs" / folder / "0000" / "0001-1.pt"
    kept.parent.mkdir(parents=True)
    kept.touch()
    make_study(storage, **{FOLDER_NAME: folder})  # its id is 1
    assert run_command(["delete", "s", "--yes"]) == 2
    assert f"has the folder name '{folder}'" in read_error(capsys)
    assert kept.exists()


def test_a_folder_of_an_earlier_version_is_accepted_unless_it_may_belong_to_another_study(
    storage: PostgresStorage,
) -> None:
    make_study(storage, **{FOLDER_NAME: f"s-1-{TOKEN}"})
    study = load_study(storage, "s")
    assert study.folder == f"s-1-{TOKEN}"
    optuna.create_study(study_name="s-1", storage=storage)
    with pytest.raises(SearchError, match=f"has the folder name 's-1-{TOKEN}', which hpsearch did not generate"):
        _ = study.folder


def test_delete_removes_checkpoints_only_below_configured_addresses(
    home: Path, storage: PostgresStorage, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = victim.parents[2]
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: str(root)})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert f"add --checkpoint-url {root}" in read_error(capsys)
    assert victim.exists()
    load_study(storage, "s")

    assert run_command(["delete", "s", "--yes", "--checkpoint-url", str(root)]) == 0
    assert not victim.exists()
    assert home.exists()


HOSTILE = "http://127.0.0.1:1/$(touch evil);`touch evil`"


def copy_option(text: str, option: str) -> str:
    """Return the value of an option in a printed command, as a shell reads it."""
    return shlex.split(text.partition(f"{option} ")[2])[0]


@pytest.mark.parametrize("url", ["/srv/x; touch evil", "s3://bucket/$(touch evil)", "/srv/'`touch evil`"])
def test_a_stored_checkpoint_address_is_quoted_in_the_remedy(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: url})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert copy_option(read_error(capsys), "add --checkpoint-url") == url


def test_a_stored_address_of_mlflow_is_quoted_in_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheim")
    with pytest.raises(credentials.CredentialsWithheldError) as raised:
        credentials.check_credentials(HOSTILE)
    assert copy_option(str(raised.value), "set --tracking-uri") == HOSTILE


def test_a_stored_objective_file_is_quoted_in_the_remedy() -> None:
    with pytest.raises(ObjectiveError) as raised:
        load_objective("/srv/$(touch evil).py:A")
    assert copy_option(str(raised.value), "hpsearch init") == "$(touch evil).py"


def test_gc_removes_checkpoints_only_below_configured_addresses(
    home: Path, storage: PostgresStorage, victim: Path
) -> None:
    root = str(victim.parents[2])
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: root})
    study = load_study(storage, "s")
    found, (problem,) = find_garbage(study, home=home, tracking=None)
    assert found == []
    assert f"add --checkpoint-url {root}" in problem
    (garbage,), problems = find_garbage(study, home=home, tracking=None, checkpoint_url=root)
    assert (garbage.size, problems) == (4, [])


@pytest.mark.parametrize("linked", ["", f"s-{TOKEN}", f"s-{TOKEN}/0000"])
def test_removal_does_not_follow_links(home: Path, storage: PostgresStorage, victim: Path, linked: str) -> None:
    root = victim.parents[2]
    link = home / "checkpoints" / (linked or "link")
    link.parent.mkdir(parents=True)
    link.symlink_to(root / linked)
    attrs = {FOLDER_NAME: f"s-{TOKEN}", **({} if linked else {CHECKPOINT_URL: str(link)})}
    make_study(storage, **attrs)
    run_command(["gc", "s", "--yes"])
    run_command(["delete", "s", "--yes"])
    assert victim.exists()


@pytest.mark.parametrize("url", ["~/x", "file://~/x", "x", "../x", "simplecache::s3://bucket/x"])
def test_stored_checkpoint_addresses_are_not_expanded(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: url})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert "neither an absolute path nor a URL" in read_error(capsys)
    assert home.exists()


def test_gc_keeps_files_that_are_not_checkpoints(home: Path, storage: PostgresStorage) -> None:
    folder = home / "checkpoints" / f"s-{TOKEN}" / "0000"
    folder.mkdir(parents=True)
    (folder / "notes.txt").touch()
    (folder / "0001-1.pt").touch()
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}"})
    assert run_command(["gc", "s", "--yes"]) == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


class Listener(ThreadingHTTPServer):
    """A tracking server of the attacker, which records the credentials that it receives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Recorder)
        self.received: list[str | None] = []

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Recorder(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        self.server.received.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"OK" if self.path == "/health" else b"{}")

    do_POST = do_GET  # noqa: N815 named by the base class

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(credentials, "_configured", set[str]())
    server = Listener()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


SECRETS = (
    {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "geheim"},
    {"MLFLOW_TRACKING_TOKEN": "geheim"},
)
COMMANDS = (
    ("show", "s"),
    ("gc", "s", "--yes"),
    ("sync", "s"),
    ("promote", "s"),
    ("evaluate-test", "s", "--unconfirmed", "--trial", "0", "--yes"),
    ("worker", "--study", "s"),
    ("doctor", "s", "--json"),
)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("secrets", SECRETS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_credentials_are_not_sent_to_an_address_from_the_study(
    storage: PostgresStorage,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    secrets: dict[str, str],
) -> None:
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    make_study(storage, **{TRACKING_URI: listener.uri, RUN_ID: "0" * 32})
    code = run_command([*command])
    assert listener.received == []
    captured = capsys.readouterr()
    assert f"{listener.uri} is named only by the study, so the credentials in" in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert "geheim" not in captured.out + captured.err
    assert code == {"show": 0, "doctor": 1}.get(command[0], 2)


@pytest.mark.usefixtures("home")
def test_credentials_are_not_sent_from_the_credentials_file_of_mlflow(
    storage: PostgresStorage, listener: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / ".mlflow" / "credentials"
    file.parent.mkdir()
    file.write_text("[mlflow]\nmlflow_tracking_username = admin\nmlflow_tracking_password = geheim\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    make_study(storage, **{TRACKING_URI: listener.uri, RUN_ID: "0" * 32})
    assert run_command(["show", "s"]) == 0
    assert listener.received == []


@pytest.mark.usefixtures("home")
def test_credentials_are_sent_to_a_configured_address(
    storage: PostgresStorage, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(storage, **{TRACKING_URI: listener.uri, RUN_ID: "0" * 32})
    assert run_command(["show", "s"]) == 0, "without credentials, the address of the study is used"
    assert set(listener.received) == {None}
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheim")
    run_command(["show", "s", "--tracking-uri", f"{listener.uri}/"])
    assert "Bearer geheim" in listener.received


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return an objective file that records its import in the file `imported` next to it."""
    path = tmp_path / "code" / "wine.py"
    path.parent.mkdir()
    write_template(path)
    path.write_text(f"{path.read_text()}\n\nimport pathlib\n\npathlib.Path(__file__).with_name('imported').touch()\n")
    return path


def make_study_of(storage: PostgresStorage, code: Path, **attrs: Any) -> None:
    spec = {**spec_of(name="none").model_dump(), "objective": f"{code}", "metric": "accuracy"}
    make_study(storage, **{SPEC: spec, **attrs})


@pytest.mark.usefixtures("home")
def test_doctor_imports_no_objective_unless_it_is_asked_to(
    storage: PostgresStorage, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_study_of(storage, code, **{SOURCE_SHA256: compute_sha256(code)})
    run_command(["doctor", "s"])
    assert not code.with_name("imported").exists()
    assert "--import-objective imports it" in capsys.readouterr().out
    run_command(["doctor", "s", "--import-objective"])
    assert code.with_name("imported").exists()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("recorded", [{}, {SOURCE_SHA256: "0" * 64}], ids=["no hash", "another hash"])
def test_an_objective_with_another_hash_is_imported_only_after_a_confirmation(
    storage: PostgresStorage, code: Path, capsys: pytest.CaptureFixture[str], recorded: dict[str, str]
) -> None:
    make_study_of(storage, code, **recorded)
    study = load_study(storage, "s")
    with pytest.raises(SearchError, match=r"its code has changed .* confirm it with: .*hpsearch trust s"):
        study.objective()
    assert run_command(["trust", "s", "--yes"]) == 0
    assert "commands on this machine may import" in capsys.readouterr().out
    assert not code.with_name("imported").exists()
    assert study.objective().name
    code.write_text(f"{code.read_text()}# changed again\n")
    with pytest.raises(SearchError, match="its code has changed"):
        study.objective()


@pytest.mark.usefixtures("home")
def test_a_file_of_another_user_is_not_imported(storage: PostgresStorage, code: Path) -> None:
    """The attacker writes the hash of his own file into the study."""
    if os.geteuid() != 0:
        pytest.skip("takes root to create a file of another user")
    os.chown(code, pwd.getpwnam("nobody").pw_uid, -1)
    make_study_of(storage, code, **{SOURCE_SHA256: compute_sha256(code)})
    with pytest.raises(SearchError, match=f"because another user can change '{code}'; if you trust this code"):
        load_study(storage, "s").objective()
    assert not code.with_name("imported").exists()


def test_confirmations_of_another_user_are_ignored(storage: PostgresStorage, code: Path, home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("takes root to create a file of another user")
    home.mkdir()
    record = home / "trusted-objectives.json"
    record.write_text(json.dumps({str(code): compute_sha256(code)}))
    os.chown(record, pwd.getpwnam("nobody").pw_uid, -1)
    make_study_of(storage, code, **{RESTORED: True})
    with pytest.raises(SearchError, match="because the study was restored from a backup"):
        load_study(storage, "s").objective()
    assert not code.with_name("imported").exists()


@pytest.fixture
def exposed(open_folder: Path) -> Path:
    """Return a folder of a second user of the machine, with a file that records its import."""
    folder = open_folder / "exposed"
    folder.mkdir()
    os.chown(folder, UID, -1)
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(open_folder)!r}, 'imported').touch()\n")
    return folder


@needs_root
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("is_named", [False, True], ids=["own file", "file that the user has named"])
def test_a_link_that_another_user_replaces_does_not_change_the_imported_file(
    storage: PostgresStorage, code: Path, exposed: Path, monkeypatch: pytest.MonkeyPatch, *, is_named: bool
) -> None:
    """The second user replaces a link in the moment between the check of the file and its import."""
    link, evil = exposed / "link.py", exposed / "evil.py"
    link.symlink_to(code)
    os.lchown(link, UID, -1)
    make_study_of(storage, link, **{SOURCE_SHA256: compute_sha256(code)})
    study = load_study(storage, "s")
    if is_named:
        study.trust_code(read_code(str(code)))
    replace_after_check(monkeypatch, link, evil)
    with pytest.raises((SearchError, ObjectiveError)) as raised:
        study.objective()
    expected = "changed between its check and its import" if is_named else f"another user can change '{exposed}'"
    assert expected in str(raised.value)
    assert not (exposed.parent / "imported").exists()
    assert not code.with_name("imported").exists()


def replace_after_check(monkeypatch: pytest.MonkeyPatch, link: Path, target: Path) -> None:
    """Let the second user replace `link` after each check of an objective's code."""

    def check_and_wait(*arguments: Any, **options: Any) -> Any:
        checked = check_source(*arguments, **options)
        act_as_second_user(lambda: (link.unlink(), link.symlink_to(target)))
        return checked

    monkeypatch.setattr(study_module, "check_source", check_and_wait)


@needs_root
@pytest.mark.usefixtures("home")
def test_a_confirmation_is_for_the_displayed_file(
    storage: PostgresStorage, code: Path, exposed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second user replaces a link while the user reads the question."""
    link, evil = exposed / "link.py", exposed / "evil.py"
    link.symlink_to(code)
    make_study_of(storage, link)

    def confirm(question: str) -> bool:
        assert str(code) in question
        act_as_second_user(lambda: (link.unlink(), link.symlink_to(evil)))
        return True

    monkeypatch.setattr(steer, "confirm", confirm)
    assert run_command(["trust", "s"]) == 0
    with pytest.raises(SearchError, match="its code has changed"):
        load_study(storage, "s").objective()
    assert not (exposed.parent / "imported").exists()


@needs_root
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("exposure", ["owner of a folder", "everybody", "group", "sticky folder"])
def test_a_file_in_a_folder_of_another_user_is_not_imported(
    storage: PostgresStorage, code: Path, exposure: str
) -> None:
    """Another user can replace the file, or add modules that it imports."""
    folder = code.parent
    if exposure == "owner of a folder":
        os.chown(folder, UID, -1)
    elif exposure == "group":
        os.chown(folder, -1, UID)
    folder.chmod({"everybody": 0o777, "group": 0o775, "sticky folder": 0o1777}.get(exposure, 0o755))
    make_study_of(storage, code, **{SOURCE_SHA256: compute_sha256(code)})
    with pytest.raises(SearchError, match=f"because another user can change '{folder}'; if you trust"):
        load_study(storage, "s").objective()
    assert not code.with_name("imported").exists()


@pytest.mark.usefixtures("home")
def test_a_module_is_not_imported_in_a_folder_of_another_user(
    storage: PostgresStorage, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder could contain a module that an imported module imports if it is installed."""
    study = make_study_of_module(storage, package)
    folder = package.parents[3] / "working folder"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.syspath_prepend(package.parents[2])
    monkeypatch.chdir(folder)
    with pytest.raises(SearchError, match=f"because another user can change '{folder}'"):
        study.objective()
    assert not list(package.parents[1].rglob("*imported"))


@pytest.mark.usefixtures("home")
def test_a_compiled_file_does_not_replace_the_checked_file(storage: PostgresStorage, code: Path) -> None:
    """Python runs a compiled file in `__pycache__` if it has the time and size of its source."""
    benign = code.read_text()
    evil = "import pathlib; pathlib.Path(__file__).with_name('evil').touch()\n"
    code.write_text(f"{evil}#{'-' * (len(benign) - len(evil) - 1)}")
    status = code.stat()
    py_compile.compile(str(code))
    code.write_text(benign)
    os.utime(code, ns=(status.st_atime_ns, status.st_mtime_ns))
    make_study_of(storage, code, **{SOURCE_SHA256: compute_sha256(code)})
    assert load_study(storage, "s").objective()
    assert not code.with_name("evil").exists()


def test_a_file_in_the_home_folder_is_not_imported(storage: PostgresStorage, code: Path, home: Path) -> None:
    """MLflow's server writes artifacts of others into this folder, as the user."""
    artifact = home / "artifacts" / "1" / "run" / "wine.py"
    artifact.parent.mkdir(parents=True)
    (home / "stack.json").write_text("{}")
    code.rename(artifact)
    make_study_of(storage, artifact, **{SOURCE_SHA256: compute_sha256(artifact)})
    with pytest.raises(SearchError, match="because the file is in a home folder of hpsearch; if you trust"):
        load_study(storage, "s").objective()
    assert not artifact.with_name("imported").exists()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("reference", ["~/wine.py:Wine", "code/wine.py", "./code/wine.py:Wine"])
def test_stored_references_are_not_expanded(
    storage: PostgresStorage, code: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.setenv("HOME", str(code.parent))
    monkeypatch.chdir(code.parents[1])
    spec = {**spec_of(name="none").model_dump(), "objective": reference, "metric": "accuracy"}
    make_study(storage, **{SPEC: spec, SOURCE_SHA256: compute_sha256(code)})
    for allow_changed in (False, True):  # commands and workers
        with pytest.raises(SearchError, match="because its path is not absolute"):
            load_study(storage, "s").objective(allow_changed=allow_changed)
    assert not code.with_name("imported").exists()


@pytest.mark.parametrize(
    "reference", ["digits", "hpsearch.objectives.builtin.digits:Digits", "tests.e2e.cheap:Cheap", "no.such:Module"]
)
def test_locating_an_objective_imports_nothing(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests.e2e.cheap", "tests.e2e", "hpsearch.objectives.builtin.digits"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    found = locate_source(reference)
    assert set(sys.modules) == before
    assert (found is None) == (reference == "no.such:Module")


@pytest.fixture
def package(code: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the module `outer.inner.wine`, of which `outer.inner` has no `__init__.py`, in the working folder."""
    path = code.parent / "outer" / "inner" / "wine.py"
    path.parent.mkdir(parents=True)
    code.rename(path)
    (path.parents[1] / "__init__.py").write_text("import pathlib\npathlib.Path(__file__ + '.imported').touch()\n")
    monkeypatch.chdir(code.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return path


def make_study_of_module(storage: PostgresStorage, path: Path, **attrs: Any) -> StoredStudy:
    spec = {**spec_of(name="none").model_dump(), "objective": "outer.inner.wine:Wine", "metric": "accuracy"}
    make_study(storage, **{SPEC: spec, SOURCE_SHA256: compute_sha256(path), **attrs})
    return load_study(storage, "s")


@pytest.mark.usefixtures("home")
def test_an_own_module_of_the_working_folder_is_imported(storage: PostgresStorage, package: Path) -> None:
    study = make_study_of_module(storage, package)
    assert locate_source(study.spec.objective) == package
    assert "outer" not in sys.modules
    check_source("s", study.spec.objective, study.attrs)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("foreign", ["wine.py", "__init__.py"])
def test_a_module_of_another_user_is_not_imported(storage: PostgresStorage, package: Path, foreign: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("takes root to create a file of another user")
    path = next(package.parents[1].rglob(foreign))
    os.chown(path, pwd.getpwnam("nobody").pw_uid, -1)
    with pytest.raises(SearchError, match=f"because another user can change '{path}'"):
        make_study_of_module(storage, package).objective()
    assert not list(package.parents[1].rglob("*imported"))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("attrs", "reason"), [({}, "not on this machine"), ({RESTORED: True}, "restored from a back")])
def test_a_module_that_is_not_located_is_not_imported(
    storage: PostgresStorage, package: Path, attrs: dict[str, Any], reason: str
) -> None:
    study = make_study_of_module(storage, package, **attrs)
    package.unlink()
    for allow_changed in (False, True):  # commands and workers
        with pytest.raises(SearchError, match=reason):
            study.objective(allow_changed=allow_changed)
    assert not list(package.parents[1].rglob("*imported"))
