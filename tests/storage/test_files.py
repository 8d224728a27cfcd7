"""Atomic appends, file locks, and sizes and digests of folders."""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import os
import pwd
import shlex
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpsearch.changeable_paths import find_changeable_part
from hpsearch.storage.files import (
    append_atomically,
    compute_folder_bytes,
    compute_folder_sha256,
    lock_file,
    read_last_lines,
    read_tail,
)


def test_the_size_of_a_changing_folder(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    own = compute_folder_bytes(tmp_path)
    assert own == 1000 + len(str(tmp_path / "kept")), "a link is as long as its target's name"
    end = threading.Event()

    def disturb() -> None:
        while not end.is_set():
            for number in range(20):
                (tmp_path / f"{number}" / "deep").mkdir(parents=True)
            for number in range(20):
                shutil.rmtree(tmp_path / f"{number}")

    other = threading.Thread(target=disturb)
    other.start()
    try:
        assert {compute_folder_bytes(tmp_path) for _ in range(300)} == {own}
    finally:
        end.set()
        other.join()
    assert compute_folder_bytes(tmp_path / "nothing") == 0


def test_an_append_without_disk_space_keeps_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "file", os.write
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append_atomically(descriptor, b"first\n", 0)

    def torn(descriptor: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:3])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        with pytest.raises(OSError, match="No space left"):
            append_atomically(descriptor, b"second\n", 6)
    assert path.read_bytes() == b"first\n"
    append_atomically(descriptor, b"second\n", 6)
    os.close(descriptor)
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_file_lock_has_one_holder(tmp_path: Path) -> None:
    descriptor = lock_file(tmp_path / "lock")
    assert descriptor is not None
    assert lock_file(tmp_path / "lock") is None
    os.close(descriptor)
    again = lock_file(tmp_path / "lock")
    assert again is not None
    os.close(again)


def test_a_file_system_without_locks_grants_every_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    held = [lock_file(tmp_path / "lock") for _ in range(2)]
    assert None not in held


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "huge.log"
    with log.open("wb") as file:
        file.truncate(1 << 36)  # a sparse file
        file.seek(1 << 36)
        file.write(b"\xffbroken\n\nlast \x1b[2J line\n\n")
    assert read_tail(log) == "last \x1b[2J line"
    assert read_tail(log, lines=2).endswith("broken last \x1b[2J line")
    assert len(read_last_lines(log)) == 2
    log.write_text("x" * 5_000_000)
    assert len(read_tail(log)) == 1_000
    assert read_tail(tmp_path / "missing.log") == ""


def test_parts_of_a_path_that_another_user_can_change(tmp_path: Path) -> None:
    file, shared = tmp_path / "own" / "file", tmp_path / "shared"
    for folder in (file.parent, shared, shared / "own"):
        folder.mkdir(mode=0o755)
    file.touch(mode=0o644)
    (tmp_path / "link").symlink_to(file.parent)
    (file.parent / "up").symlink_to("../link/file")
    (shared / "up").symlink_to(file)
    (shared / "own" / "file").touch(mode=0o644)
    for path in (file, tmp_path / "link" / "file", file.parent / "up"):
        assert find_changeable_part(path) is None
    shared.chmod(0o1777)
    assert find_changeable_part(shared / "own" / "file") is None, "others cannot replace folders in a sticky folder"
    (shared / "here").symlink_to(".")
    (shared / "script").touch(mode=0o644)
    for path in ("up", "own/../up", "own/../script", "here/script", "own/../here/script"):
        assert find_changeable_part(shared / path) == shared, "others can add files next to this one"
    shared.chmod(0o777)
    assert find_changeable_part(shared / "own" / "file") == shared
    assert find_changeable_part(shared / ".." / "own" / "file") == shared
    file.chmod(0o666)
    assert find_changeable_part(file.parent / "up") == file
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "missing"):
        assert find_changeable_part(path) == path


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="no access control lists")
def test_an_access_control_list_lets_others_change_a_file_of_the_users_private_group(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    entries = [
        (0x01, 6, 0xFFFFFFFF),
        (0x02, 6, 65534),
        (0x04, 4, 0xFFFFFFFF),
        (0x10, 6, 0xFFFFFFFF),
        (0x20, 4, 0xFFFFFFFF),
    ]
    try:
        os.setxattr(
            tmp_path / "file",
            "system.posix_acl_access",
            struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries),
        )
    except OSError:
        pytest.skip("the file system has no access control lists")
    assert find_changeable_part(tmp_path / "file") == tmp_path / "file"


_CHECK = "import sys; from pathlib import Path; from hpsearch.changeable_paths import find_changeable_part; "
_CHECK += "print(find_changeable_part(Path(sys.argv[1]), as_folder=True))"


@pytest.mark.parametrize("name", ["a folder", "a\\040\x0b\r\n\t\x85b"])
def test_a_folder_that_is_mounted_below_a_private_one_is_reachable(tmp_path: Path, name: str) -> None:
    shared, mounted = tmp_path / "shared", tmp_path / "own" / name
    shared.mkdir()
    shared.chmod(0o777)
    mounted.mkdir(parents=True)
    mounted.parent.chmod(0o700)
    check = f'mount --bind "$1" "$2" && exec {shlex.quote(sys.executable)} -c "$0" "$2"'
    command = ["unshare", "--mount", "sh", "-c", check, _CHECK, str(shared), str(mounted)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this user cannot mount folders: {done.stderr.decode()}")
    assert done.stdout == os.fsencode(f"{mounted}\n")
    mounted.chmod(0o777)
    assert find_changeable_part(mounted, as_folder=True) is None


def test_a_group_that_is_the_first_group_of_two_users_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = pwd.getpwuid(os.geteuid())
    if grp.getgrgid(user.pw_gid).gr_name != user.pw_name or os.getegid() != user.pw_gid:
        pytest.skip("the user has no group of its own")
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o660)
    assert find_changeable_part(tmp_path / "file") is None
    other = pwd.struct_passwd(("other", "x", user.pw_uid + 1, user.pw_gid, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwall", lambda: [user, other])
    assert find_changeable_part(tmp_path / "file") == tmp_path / "file"


def test_a_name_with_a_line_feed_cannot_imitate_two_files(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    for folder in (two, one):
        folder.mkdir()
    (two / "a").write_text("code")
    (two / "b").write_text("weights")
    sums = subprocess.run(["sha256sum", "a", "b"], cwd=two, capture_output=True, text=True, check=True).stdout
    assert compute_folder_sha256(two) == hashlib.sha256(sums.encode()).hexdigest()
    (one / f"a\n{sums.splitlines()[1]}").write_text("code")
    assert compute_folder_sha256(one) != compute_folder_sha256(two)
    sums = subprocess.run(
        ["sha256sum", *(path.name for path in one.iterdir())], cwd=one, capture_output=True, check=True
    ).stdout
    assert compute_folder_sha256(one) == hashlib.sha256(sums).hexdigest()
