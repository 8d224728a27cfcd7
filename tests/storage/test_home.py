from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpsearch.search.cli import run_command
from hpsearch.storage.embedded.stack import find_running
from hpsearch.storage.errors import StorageError
from hpsearch.storage.home import FOLDERS, prepare_home, read_own_text
from hpsearch.storage.web.token import load_or_create_token
from tests.second_user import UID, act_as_second_user, needs_root

if TYPE_CHECKING:
    from tests.storage.conftest import OrdinaryUser

_SHOW = "from hpsearch.storage.home import FOLDERS, prepare_home; print(prepare_home())"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_argument_has_precedence_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "variable"))
    assert prepare_home() == tmp_path / "variable"
    assert prepare_home(str(tmp_path / "argument")) == tmp_path / "argument"


def test_commands_about_services_create_no_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "mistyped"
    assert run_command(["status", "--home", str(home)]) == 3
    assert f"not set up yet in '{home}'" in capsys.readouterr().out
    assert run_command(["down", "--home", str(home)]) == 0
    assert not home.exists()
    (tmp_path / "file").touch()
    for command in ("status", "down"):
        assert run_command([command, "--home", str(tmp_path / "file" / "home")]) == 2
        assert "cannot be created" in capsys.readouterr().err


def test_the_home_is_created_with_parents_for_its_owner_only(tmp_path: Path) -> None:
    home = prepare_home(str(tmp_path / "with spaces" / ("long" * 50) / "home"))
    # Other users can traverse root's home, because root's Postgres runs as another user.
    assert _mode(home) == (0o711 if os.geteuid() == 0 else 0o700)
    assert {path.name: _mode(path) for path in home.iterdir()} == dict.fromkeys(FOLDERS, 0o700)


@needs_root
def test_a_link_in_place_of_a_new_home_changes_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can replace the folder between its creation and the change of its mode."""
    (private := tmp_path / "private").mkdir(mode=0o700)
    make = Path.mkdir

    def make_link(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name == "home":
            path.symlink_to(private)
        else:
            make(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", make_link)
    with pytest.raises(StorageError, match=r"--home .* cannot be created \((Not a directory|Too many levels)"):
        prepare_home(str(tmp_path / "home"))
    assert _mode(private) == 0o700


def test_an_existing_home_keeps_its_mode_and_its_folders_become_private(tmp_path: Path) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    for folder in (home / "runs" / "s", home / "sources", shared):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    (home / "runs").chmod(0o775)
    (home / "checkpoints").symlink_to(shared)  # the user's own folder
    home.chmod(0o750)
    assert prepare_home(str(home)) == home
    assert (_mode(home), _mode(home / "runs"), _mode(home / "reports")) == (0o750, 0o700, 0o700)
    assert (_mode(shared), _mode(home / "sources")) == (0o755, 0o755)


def test_no_folder_of_a_home_has_the_name_of_a_system_folder() -> None:
    """It would become private if someone gave / or /var as the home."""
    system = {"bin", "boot", "cache", "dev", "etc", "home", "lib", "log", "mail", "media", "mnt", "opt", "proc", "root"}
    assert not {*FOLDERS} & (system | {"run", "sbin", "spool", "srv", "sys", "tmp", "usr", "var"})


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(StorageError, match=r"'runs' cannot be a private folder \(File exists\); set --home"):
        prepare_home(str(tmp_path))


def test_another_user_cannot_read_files_of_root(ordinary_user: OrdinaryUser, open_folder: Path) -> None:
    home = open_folder / "home"
    (home / "reports").mkdir(parents=True)
    for folder in (home, home / "reports"):
        folder.chmod(0o755)  # as earlier versions created them
    prepare_home(str(home))
    for name in FOLDERS:
        file = home / name / "study" / "file"
        file.parent.mkdir(parents=True)
        file.touch()
        for path in (file.parent, file):
            path.chmod(0o755)  # as with the usual umask
        assert not ordinary_user.can_read(file), name
    (home / "readable").touch()
    assert ordinary_user.can_read(home / "readable"), "the user can enter the home"


def test_a_relative_path_and_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert prepare_home("here") == tmp_path / "here"
    assert prepare_home("~/mine") == tmp_path / "user" / "mine"
    with pytest.raises(StorageError, match="unknown user"):
        prepare_home("~nobody-of-this-name/mine")


@pytest.mark.parametrize("value", ["file/home", "file", "/proc/1/home", "a\0b"])
def test_an_unusable_home_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^--home ") as raised:
        prepare_home(value)
    assert "set --home to a folder that you may write to" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_ordinary_user_gets_the_data_directory(ordinary_user: OrdinaryUser, open_folder: Path) -> None:
    login = ordinary_user.own(open_folder / "login")
    shown = ordinary_user.python(_SHOW, HOME=str(login))
    assert shown.stdout.strip() == str(login / ".local/share/hpsearch")


def test_an_ordinary_user_cannot_use_a_folder_of_others(ordinary_user: OrdinaryUser, open_folder: Path) -> None:
    roots = open_folder / "roots"
    roots.mkdir()
    shown = ordinary_user.python(_SHOW, HPSEARCH_HOME=str(roots))
    assert f"HPSEARCH_HOME '{roots}' is not writable for this user" in shown.stderr
    shared = ordinary_user.own(open_folder / "shared")
    (shared / "stack.json").touch()
    shown = ordinary_user.python(_SHOW, HPSEARCH_HOME=str(shared))
    assert "belongs to uid 0" in shown.stderr
    common = open_folder / "common"
    prepare_home(str(common))
    common.chmod(0o777)
    shown = ordinary_user.python(_SHOW, HPSEARCH_HOME=str(common))
    assert (
        "'artifacts' cannot be a private folder (it belongs to uid 0, and a home belongs to one user)" in shown.stderr
    )


def _prepare_traps(folder: str) -> None:
    """Create homes for the owner to use: a folder, a link, and files, folders and links in a shared folder."""
    for name in ("taken", "taken/runs", "target"):
        Path(folder, name).mkdir(mode=0o777)
        Path(folder, name).chmod(0o777)
    Path(folder, "link").symlink_to(Path(folder, "roots"))
    Path(folder, "shared-folder", "runs").mkdir()
    Path(folder, "shared-link", "runs").symlink_to(Path(folder, "target"))
    Path(folder, "shared-stack", "stack.json").symlink_to(Path(folder, "nowhere"))
    Path(folder, "shared-token", "web-token").write_text("known\n")
    Path(folder, "shared-token", "trusted-objectives.json").write_text('{"file": "digest"}')
    Path(folder, "shared-token-link", "web-token").symlink_to(Path(folder, "roots-file"))
    Path(folder, "taken", "stack.json").write_text("{}")


@needs_root
def test_a_home_that_another_user_prepared_is_rejected(open_folder: Path) -> None:
    for name in ("shared-folder", "shared-link", "shared-stack", "shared-token", "shared-token-link", "roots"):
        (open_folder / name).mkdir()
        (open_folder / name).chmod(0o777)
    (open_folder / "roots-file").write_text("a file of root\n")
    open_folder.chmod(0o777)
    act_as_second_user(lambda: _prepare_traps(str(open_folder)))
    for name in ("taken", "link", "shared-folder", "shared-link", "shared-stack"):
        with pytest.raises(StorageError, match=rf"belongs to uid {UID}.*set (HPSEARCH_HOME|--home) to") as raised:
            prepare_home(str(open_folder / name))
        assert "\n" not in str(raised.value)
    with pytest.raises(StorageError, match=rf"cannot be read \(it belongs to uid {UID}\)"):
        find_running(open_folder / "taken")  # for tab completion
    for name in ("shared-token", "shared-token-link"):
        home = prepare_home(str(open_folder / name))
        with pytest.raises(StorageError, match=rf"cannot be read \(it belongs to uid {UID}\): delete it"):
            load_or_create_token(home)
    assert prepare_home(str(open_folder / "roots"))


@needs_root
def test_an_ordinary_user_may_use_a_volume_of_root(open_folder: Path) -> None:
    """Kubernetes mounts volumes that belong to root."""
    (open_folder / "volume").mkdir()
    (open_folder / "volume").chmod(0o777)
    (open_folder / "link").symlink_to(open_folder / "volume")
    assert act_as_second_user(lambda: str(prepare_home(str(open_folder / "link")))) == str(open_folder / "link")


@pytest.mark.parametrize("name", ["stack.json", "web-token"])
def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="it is not a regular file"):
        read_own_text(tmp_path / name)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"it is not a regular file: '{tmp_path}'"):
        read_own_text(tmp_path)
