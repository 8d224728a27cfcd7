"""The operating system user of the embedded Postgres, which refuses to run as root, and the location of its folder."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.errors import StorageError

# Ids for root's Postgres that no other program uses: neither distributions nor systemd assign them. Processes of the
# users `nobody` and `postgres` could read the data directory of a Postgres that runs as the same user. If the first
# range belongs to a user's subordinate ids, for rootless containers, an id of the second range is used.
_DEDICATED_IDS = (*range(65520, 65532), *range(2147352540, 2147352552))
_SUBORDINATE_IDS = (Path("/etc/subuid"), Path("/etc/subgid"))  # lines `USER:FIRST:COUNT`
_FORMER_USERS = ("postgres", "nobody")  # root's Postgres ran as one of these users in earlier versions
# Location of root's Postgres if its user has no access to the home folder.
_EXTERNAL_FOLDER = Path("/var/lib/hpsearch-postgres")


@dataclass(frozen=True)
class Account:
    """Operating system user of the Postgres processes.

    Attributes:
        name, uid, gid: name and ids of the user.
        is_other_user: whether this user differs from the user of the current process.
    """

    name: str
    uid: int
    gid: int
    is_other_user: bool

    @property
    def popen_options(self) -> dict[str, Any]:
        """Arguments with which `subprocess.Popen` runs a program as this user, and with a umask for private files."""
        options: dict[str, Any] = {"umask": 0o077}
        if self.is_other_user:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        return options

    def can_run(self, command: Sequence[str | Path]) -> bool:
        """Return whether the command succeeds when this user runs it."""
        try:
            options = self.popen_options
            result = subprocess.run(command, capture_output=True, cwd="/", timeout=30, check=False, **options)
        except (OSError, subprocess.SubprocessError):
            return False
        return result.returncode == 0

    def can_enter(self, folder: Path) -> bool:
        """Return whether this user has access to the folder."""
        return self.can_run(["/bin/sh", "-c", 'cd "$1"', "sh", folder])

    def admit(self, folder: Path) -> None:
        """Let this user's group, and no other user, traverse a folder of root; do nothing for the current user."""
        if self.is_other_user:
            os.chown(folder, 0, self.gid)
            folder.chmod(0o710)

    def take_over(self, folder: Path) -> None:
        """Make this user the owner of a folder and its content; do nothing for the current user.

        Files of other users than the folder's owner, to which hard links may lead, are unchanged. If the process is
        killed, the next call does the rest.
        """
        owner = folder.stat().st_uid
        if not self.is_other_user or owner == self.uid:
            return
        # Relative to open folders, because the former owner could replace a folder by a link.
        for _, folders, files, descriptor in os.fwalk(folder, topdown=False):
            for name in (*folders, *files):
                if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid == owner:
                    os.chown(name, self.uid, self.gid, dir_fd=descriptor, follow_symlinks=False)
        os.chown(folder, self.uid, self.gid, follow_symlinks=False)


def find_account(data: Path | None = None) -> Account:
    """Return the user for Postgres: the current user or, for root, a user id that no other program uses.

    The dedicated id has no passwd entry, which only `initdb` needs.

    Args:
        data: data directory, whose owner is returned; None before the directory exists. Directories of root, of the
            users of earlier versions, and of a subordinate id of another user, are handed over to the dedicated id by
            `Account.take_over`.

    Raises:
        StorageError: the current user has no passwd entry, or is root and cannot switch to the dedicated id.
    """
    if (uid := os.geteuid()) != 0:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise StorageError(
                f"user id {uid} has no entry in /etc/passwd, which Postgres needs to create its data "
                "directory; add an entry, or give --storage-url"
            ) from None
        return Account(entry.pw_name, uid, entry.pw_gid, is_other_user=False)
    if data is not None and data.exists():
        owner = data.stat()
        if not (_is_former_user(owner.st_uid) or _is_subordinate(owner.st_uid) or _is_subordinate(owner.st_gid)):
            return Account(f"uid {owner.st_uid}", owner.st_uid, owner.st_gid, is_other_user=True)
    number = next((each for each in _DEDICATED_IDS if not _has_name(each) and not _is_subordinate(each)), None)
    if number is not None:
        account = Account(f"uid {number}", number, number, is_other_user=True)
        if account.can_enter(Path("/")):  # root of a user namespace may not be able to switch users
            return account
    raise StorageError(
        "Postgres refuses to run as root, and no user id of its own is usable, such as "
        f"{_DEDICATED_IDS[0]} or {_DEDICATED_IDS[-1]}; run hpsearch as an ordinary user, or give --storage-url"
    )


def find_setup_account(account: Account) -> Account:
    """Return the user that runs `initdb`, which needs a passwd entry: for root any unprivileged user.

    The process has the group of `account`, so other processes of that user can neither enter its folder nor trace it.

    Raises:
        StorageError: no unprivileged user exists.
    """
    if not account.is_other_user:
        return account
    entry = next((each for each in pwd.getpwall() if each.pw_name == "nobody"), None)
    entry = entry or next((each for each in pwd.getpwall() if each.pw_uid != 0), None)
    if entry is None:
        raise StorageError(
            "Postgres cannot create its data directory as root without another user in /etc/passwd: add a user, "
            "run hpsearch as an ordinary user, or give --storage-url"
        )
    return Account(entry.pw_name, entry.pw_uid, account.gid, is_other_user=True)


def _is_former_user(uid: int) -> bool:
    with contextlib.suppress(KeyError):
        return uid == 0 or pwd.getpwuid(uid).pw_name in _FORMER_USERS
    return False


def _has_name(number: int) -> bool:
    """Return whether the id belongs to a user or group of this system."""
    for find in (pwd.getpwuid, grp.getgrgid):
        with contextlib.suppress(KeyError):
            find(number)
            return True
    return False


def _is_subordinate(number: int) -> bool:
    """Return whether an id is in a subordinate range, whose ids a user can assign to rootless containers."""
    for path in _SUBORDINATE_IDS:
        with contextlib.suppress(FileNotFoundError):
            for first, count in re.findall(r"^[^:\n]*:(\d+):(\d+)\s*$", path.read_text(errors="replace"), re.MULTILINE):
                if 0 <= number - int(first) < int(count):
                    return True
    return False


def find_postgres_folder(home: Path) -> Path | None:
    """Return the Postgres folder of the home folder; None if there is no data directory yet."""
    return next((folder for folder in _list_locations(home) if (folder / "data").exists()), None)


def make_postgres_folder(home: Path) -> Path:
    """Return the Postgres folder of the home folder, and create it if it is missing.

    The folder is in `home`. If hpsearch runs as root, and the user of Postgres has no access to `home`, it is outside.
    """
    inside, outside = _list_locations(home)
    if os.geteuid() != 0:
        inside.mkdir(exist_ok=True, mode=0o700)
        return inside
    if existing := find_postgres_folder(home):
        return existing
    account = find_account()
    inside.mkdir(exist_ok=True, mode=0o700)  # whatever the umask: other users could create a password file first
    account.admit(inside)
    if account.can_enter(inside):
        return inside
    with contextlib.suppress(OSError):  # the folder is not empty
        inside.rmdir()
    outside.parent.mkdir(parents=True, exist_ok=True, mode=0o711)
    outside.parent.chmod(0o711)
    outside.mkdir(exist_ok=True, mode=0o700)
    account.admit(outside)
    (outside / "home").write_text(f"{home}\n")  # names the owner, for manual cleanup
    return outside


def ensure_executable(binaries: Binaries, account: Account, folder: Path) -> Binaries:
    """Return binaries that the account can run: `binaries`, or a copy of them in `folder`.

    If the path of `folder` has characters that a shell interprets in double quotes, in which `initdb` runs the
    binaries, the copy is in a folder for all homes.

    Raises:
        StorageError: the account cannot run the binaries, which are not from a wheel and therefore cannot be copied.
    """
    if not account.is_other_user or account.can_run([binaries.bin_folder / "postgres", "--version"]):
        return binaries
    if binaries.package is None:
        raise StorageError(
            f"user {account.name!r}, the user of Postgres, cannot execute {str(binaries.bin_folder / 'postgres')!r}; "
            "pip install 'hpsearch[server]', run hpsearch as an ordinary user, or give --storage-url"
        )
    if set(str(folder)) & set('"$`\\'):
        folder = _EXTERNAL_FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=0o711)
        folder.chmod(0o711)
    target = folder / f"binaries-{binaries.version}"
    with FileLock(f"{target}.lock"):
        if not target.exists():
            _copy_package(binaries.package, target)
    return Binaries(target / binaries.package.name / "pginstall" / "bin", binaries.version, None)


def _list_locations(home: Path) -> tuple[Path, Path]:
    return home / "postgres", _EXTERNAL_FOLDER / hashlib.sha256(os.fsencode(home)).hexdigest()[:16]


def _copy_package(package: Path, target: Path) -> None:
    """Copy a wheel's package folder, and the libraries that its programs load by a relative path."""
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for source in (package, package.with_name(package.name + ".libs")):
        if source.exists():
            shutil.copytree(source, unfinished / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (unfinished, *unfinished.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    unfinished.rename(target)
