"""A worker's role and other users cannot choose the code that the victim's commands import."""

from __future__ import annotations

import json
import os
import pwd
import py_compile
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.references import locate_source
from hpsearch.objectives.template import write_template
from hpsearch.search.cli import run_command, steer
from hpsearch.search.console import PlainConsole
from hpsearch.search.errors import SearchError
from hpsearch.search.fleet import fleet
from hpsearch.search.run.fleet import run_fleet
from hpsearch.search.services import Services
from hpsearch.search.study import study as study_module
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.trust import check_source, find_distrust, read_code, record_trust
from hpsearch.search.worker.context import WorkerContext
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import RESTORED, SOURCE_SHA256, SPEC
from hpsearch.storage.files import compute_sha256
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import spec_of
from tests.search.study.untrusted.support import make_study
from tests.second_user import UID, act_as_second_user, needs_root


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return an objective file that records its import in the file `imported` next to it."""
    path = tmp_path / "code" / "wine.py"
    path.parent.mkdir()
    write_template(path)
    path.write_text(f"{path.read_text()}\n\nimport pathlib\n\npathlib.Path(__file__).with_name('imported').touch()\n")
    return path


def make_study_of(storage: PostgresStorage, code: Path | str, **attrs: Any) -> None:
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
def test_a_file_that_is_no_python_code_is_not_read(storage: PostgresStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root would wait for the kernel's next message."""
    monkeypatch.delattr("hpsearch.search.study.trust.compute_sha256")
    make_study_of(storage, "/proc/kmsg:Wine", **{SOURCE_SHA256: "0" * 64})
    with pytest.raises(SearchError, match="is not imported, because this machine has no Python file at"):
        load_study(storage, "s").objective()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("folder", [f"{'a' * 32}/artifacts", f"{'A' * 32}/artifacts", f"{'a' * 32}/Artifact\u017f"])
def test_an_uploaded_artifact_is_not_imported(
    storage: PostgresStorage, code: Path, tmp_path: Path, folder: str
) -> None:
    """Some file systems find the file by each of these paths."""
    uploaded = tmp_path / "mlruns" / "1" / folder / "wine.py"
    uploaded.parent.mkdir(parents=True)
    code.rename(uploaded)
    (uploaded.parents[1] / "tags").mkdir()
    named = uploaded.parents[1] / "tags" / ".." / uploaded.parent.name / "wine.py"
    make_study_of(storage, named, **{SOURCE_SHA256: compute_sha256(uploaded)})
    with pytest.raises(SearchError, match="because the file is an artifact of MLflow"):
        load_study(storage, "s").objective()
    assert not uploaded.with_name("imported").exists()


@pytest.mark.usefixtures("home")
def test_an_open_file_of_a_process_is_not_imported(storage: PostgresStorage, code: Path) -> None:
    """A server has a file open while it receives the file from another user."""
    with code.open() as file:
        named = f"/proc/{os.getpid()}/fd/{file.fileno()}:Wine"
        make_study_of(storage, named, **{SOURCE_SHA256: compute_sha256(code)})
        with pytest.raises(SearchError, match="because another user can change '/proc/"):
            load_study(storage, "s").objective()
    assert not code.with_name("imported").exists()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("folder", ["mlflow-tmp/tmp3x_8k2ab", "tmp/hpsearch-3x_8k2ab"])
def test_a_file_in_a_temporary_folder_of_a_program_is_not_imported(
    storage: PostgresStorage, code: Path, tmp_path: Path, folder: str
) -> None:
    """MLflow writes uploads there, and the dashboard downloads."""
    uploaded = tmp_path / folder / "wine.py"
    uploaded.parent.mkdir(parents=True)
    uploaded.parent.chmod(0o700)
    code.rename(uploaded)
    make_study_of(storage, uploaded, **{SOURCE_SHA256: compute_sha256(uploaded)})
    with pytest.raises(SearchError, match="because the file is in a temporary folder, where it may be a download"):
        load_study(storage, "s").objective()
    assert not uploaded.with_name("imported").exists()


@pytest.mark.usefixtures("home")
def test_workers_of_a_command_do_not_join_a_study_that_has_replaced_its_study(
    storage: PostgresStorage, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    """A worker's role can delete a study while `finalists` starts workers, and create another one of the same name."""
    make_study_of(storage, "digits")
    opened = load_study(storage, "s")
    environments: list[dict[str, str]] = []

    def start(_command: list[str], environment: dict[str, str], _log: Path) -> NoReturn:
        environments.append(environment)
        raise InterruptedError

    monkeypatch.setattr(fleet, "can_fork", lambda: False)
    monkeypatch.setattr(fleet, "_start_interpreter", start)
    with pytest.raises(InterruptedError):
        run_fleet(PlainConsole(), Services(tmp_path, database_url, None, None), opened, 1, WorkerOptions())
    storage.delete_study(opened.study_id)
    make_study_of(storage, code, **{SOURCE_SHA256: compute_sha256(code)})
    monkeypatch.setenv("HPSEARCH_FLEET_STUDY", environments[0]["HPSEARCH_FLEET_STUDY"])
    with pytest.raises(SearchError, match="study 's' was replaced by another study of the same name"):
        WorkerContext("s", WorkerOptions(storage_url=database_url), threading.Event())
    assert not code.with_name("imported").exists()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("named", ["", ":Wine", ":Path"])
def test_a_script_of_the_user_is_not_imported_as_an_objective(
    storage: PostgresStorage, tmp_path: Path, named: str
) -> None:
    """A worker's role can name any file of the user in a new study, with the hash of the file."""
    script = tmp_path / "cleanup.py"
    script.write_text("from pathlib import Path\n\nPath(__file__).with_name('imported').touch()\n\nclass Wine: ...\n")
    spec = {**spec_of(name="none").model_dump(), "objective": f"{script}{named}", "metric": "accuracy"}
    make_study(storage, **{SPEC: spec, SOURCE_SHA256: compute_sha256(script)})
    with pytest.raises(SearchError, match="is not imported, because its file does not define this class"):
        load_study(storage, "s").objective()
    assert not script.with_name("imported").exists()


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
    assert "commands on this machine may use" in capsys.readouterr().out
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


@pytest.mark.usefixtures("home")
def test_another_function_of_a_trusted_file_is_not_called(tmp_path: Path) -> None:
    """To get a search space, hpsearch calls the function."""
    file = tmp_path / "mine.py"
    file.write_text("def main(trial): ...\ndef clear_cache(verbose=True): ...\nclass Mine(LoopObjective): ...\n")
    attrs = {SOURCE_SHA256: compute_sha256(file)}
    record_trust(f"{file}:main", read_code(f"{file}:main"))
    assert find_distrust(f"{file}:main", attrs) is None
    assert find_distrust(f"{file}:Mine", attrs) is None
    assert find_distrust(f"{file}:clear_cache", attrs) == (
        "its file does not define this class, or is not confirmed for this function"
    )


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
def test_an_uploaded_module_is_not_imported_as_an_installed_one(
    storage: PostgresStorage, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"a{'0' * 31}"
    uploaded = tmp_path / "site-packages" / run / "artifacts" / "wine.py"
    uploaded.parent.mkdir(parents=True)
    code.rename(uploaded)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    make_study_of(storage, f"{run}.artifacts.wine:Wine", **{SOURCE_SHA256: compute_sha256(uploaded)})
    with pytest.raises(SearchError, match="because the file is an artifact of MLflow"):
        load_study(storage, "s").objective()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", ["working folder", "site-packages"])
def test_a_module_is_not_imported_in_a_folder_of_another_user(
    storage: PostgresStorage, package: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The working folder could contain a module that an imported module imports if it is installed."""
    study = make_study_of_module(storage, package)
    folder = package.parents[3] / name
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
@pytest.mark.parametrize(("attrs", "reason"), [({}, "no Python file"), ({RESTORED: True}, "restored from a back")])
def test_a_module_that_is_not_located_is_not_imported(
    storage: PostgresStorage, package: Path, attrs: dict[str, Any], reason: str
) -> None:
    study = make_study_of_module(storage, package, **attrs)
    package.unlink()
    for allow_changed in (False, True):  # commands and workers
        with pytest.raises(SearchError, match=reason):
            study.objective(allow_changed=allow_changed)
    assert not list(package.parents[1].rglob("*imported"))
