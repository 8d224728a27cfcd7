"""Replace files in folders that other users may be able to change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpsearch.storage.replacement import replacement


def test_a_replacement_keeps_links_and_permissions(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    with replacement(tmp_path / "link") as file:
        file.write(b"after")
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600, "others could open it, and read it later"
        assert (tmp_path / "file").read_text() == "before"
    assert (tmp_path / "file").read_text() == "after"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").readlink() == Path("file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "own").symlink_to("link")
    (tmp_path / "to pipe").symlink_to("pipe")
    os.mkfifo(tmp_path / "pipe")
    os.chown(tmp_path / "to pipe", 65534, -1, follow_symlinks=False)
    os.chown(tmp_path / "link", 65534, -1, follow_symlinks=False)
    for path in ("link", "own", "to pipe"):
        with pytest.raises(PermissionError, match="link of another user"), replacement(tmp_path / path) as file:
            file.write(b"new")
    assert (tmp_path / "target").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 65534, -1)
    with pytest.raises(PermissionError, match="belongs to another user"), replacement(tmp_path / "file") as file:
        file.write(b"new")


def test_a_replacement_never_gets_the_rights_of_its_owner(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o6750)
    with replacement(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").stat().st_mode & 0o7777 == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to any group")
def test_a_replacement_keeps_the_group(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o640)
    os.chown(tmp_path / "file", -1, 65533)
    with replacement(tmp_path / "file") as file:
        file.write(b"new")
    status = (tmp_path / "file").stat()
    assert (status.st_gid, status.st_mode & 0o777) == (65533, 0o640)


def test_a_failed_replacement_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacement(tmp_path / "file") as file:
        file.write(b"1" * (1 // 0))
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_without_a_reader_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device or address"), replacement(tmp_path / "pipe"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a pipe to another user")
def test_nothing_is_written_to_a_pipe_of_another_user(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.chown(tmp_path / "pipe", 65534, -1)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(PermissionError, match="pipe of another user"), replacement(tmp_path / "pipe"):
            pass
    finally:
        os.close(reader)


def test_a_device_is_not_replaced() -> None:
    with replacement(Path(os.devnull)) as file:
        assert os.fstat(file.fileno()).st_rdev == os.stat(os.devnull).st_rdev  # noqa: PTH116 as the line before


def test_a_replacement_in_a_shared_folder_never_changes_the_target_of_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    (tmp_path / "table").touch(mode=0o644)
    with replacement(tmp_path / "table") as file:
        (temporary,) = tmp_path.glob(".*.tmp")
        temporary.unlink()
        temporary.symlink_to(secret)  # as another user with write permission for the folder can
        file.write(b"new")
    assert (secret.stat().st_mode & 0o777, secret.read_bytes()) == (0o600, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "table").write_text("kept")
    (tmp_path / "exports").symlink_to("private")
    with replacement(tmp_path / "exports" / "table") as file:
        file.write(b"own link")
    os.chown(tmp_path / "exports", 65534, -1, follow_symlinks=False)
    with (
        pytest.raises(PermissionError, match="'exports' is a link of another user"),
        replacement(tmp_path / "exports" / "table") as file,
    ):
        file.write(b"new")
    assert (tmp_path / "private" / "table").read_text() == "own link"


def test_a_folder_that_is_replaced_meanwhile_redirects_nothing(tmp_path: Path) -> None:
    for folder in ("exports", "private"):
        (tmp_path / folder).mkdir()
    with replacement(tmp_path / "exports" / "table") as file:
        (tmp_path / "exports").rename(tmp_path / "moved")
        (tmp_path / "exports").symlink_to("private")
        file.write(b"new")
    assert list((tmp_path / "private").iterdir()) == []
    assert (tmp_path / "moved" / "table").read_text() == "new"


def test_links_in_a_path_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "up").symlink_to("../../file")
    (tmp_path / "loop").symlink_to("loop")
    with replacement(tmp_path / "absolute" / ".." / "b" / "up") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_text() == "new"
    for path, said in (("loop", "symbolic links"), ("gone/file", "No such file"), ("a", "Is a directory")):
        with pytest.raises(OSError, match=said), replacement(tmp_path / path):
            pass
    with pytest.raises(OSError, match="Is a directory"), replacement(Path("/")):
        pass
