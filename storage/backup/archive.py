"""The backup file: a tar archive with a manifest at the start and an index of all files at the end.

The index reveals a truncated file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Self, get_type_hints

from hpsearch.storage.errors import StorageError, format_error, format_os_error

ARCHIVE_FORMAT = 1
MANIFEST, INDEX = "manifest.json", "index.jsonl"
STUDIES_DUMP, MLFLOW_DUMP = "studies.dump", "mlflow.dump"
ARTIFACTS, CHECKPOINTS = "artifacts/", "checkpoints/"

_CHUNK = 1 << 20
# Keys of the manifest that differ from its fields.
_KEYS = {"hpsearch_version": "hpsearch", "postgres_version": "postgres", "pg_dump_version": "dumped_by"}


@dataclass(frozen=True)
class Manifest:
    """Description of a backup.

    Attributes:
        made_at: time of the snapshot of the studies, in UTC.
        hpsearch_version: version of hpsearch that wrote the backup.
        postgres_version: version of the Postgres server; the newer one if the two databases are on different servers.
        pg_dump_version: version of pg_dump; the newer version if the two dumps are from different versions.
        schema, optuna_schema: revisions of hpsearch's and Optuna's tables.
        mlflow_schema: revision of MLflow's tables; None if the archive does not contain MLflow's database.
        home: home folder at the time of the backup.
        studies, trials, runs, models: numbers of studies, trials, active MLflow runs and registered models.
        files: whether the archive contains the artifact files; otherwise it contains only their index entries.
        format: format version of the archive.
    """

    made_at: str
    hpsearch_version: str
    postgres_version: str
    pg_dump_version: str
    schema: str
    optuna_schema: str | None
    mlflow_schema: str | None
    home: str
    studies: int
    trials: int
    runs: int
    models: int
    files: bool
    format: int = ARCHIVE_FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values of the archive."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    @property
    def has_mlflow(self) -> bool:
        """Whether the archive contains MLflow's database."""
        return self.mlflow_schema is not None


@dataclass(frozen=True)
class IndexEntry:
    """Index entry of one file.

    Attributes:
        path: path in the archive.
        size: size in bytes.
        sha256: SHA-256 of the content in hexadecimal; None if the content was not read.
        held: whether the archive contains the file.
    """

    path: str
    size: int
    sha256: str | None
    held: bool


class _FixedSizeReader:
    """Reader and hash of exactly `size` bytes of a file, even if the file shrinks: missing bytes are read as zeros."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._remaining = file, size
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        size = self._remaining if size < 0 else min(size, self._remaining)
        data = self._file.read(size).ljust(size, b"\0")
        self._remaining -= size
        self.hash.update(data)
        return data


class ArchiveWriter:
    """Writer of an archive."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._index: list[IndexEntry] = []

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest; must be the first call."""
        self._add_text(MANIFEST, json.dumps(manifest.to_dict(), indent=2) + "\n")

    def add_file(self, name: str, path: Path) -> bool:
        """Add a file to the archive and the index; return False if the file no longer exists."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            self.add_open_file(name, file)
        return True

    def add_open_file(self, name: str, file: IO[bytes]) -> None:
        """Add the content of an open file to the archive and the index."""
        file.seek(0)
        size = os.fstat(file.fileno()).st_size
        reader = _FixedSizeReader(file, size)
        self._add(name, size, reader)
        self._index.append(IndexEntry(name, size, reader.hash.hexdigest(), held=True))

    def add_index_entry(self, name: str, size: int, sha256: str | None) -> None:
        """Add an index entry for a file whose content is not in the archive."""
        self._index.append(IndexEntry(name, size, sha256, held=False))

    def write_index(self) -> None:
        """Write the index; must be the last call."""
        self._add_text(INDEX, "".join(json.dumps(asdict(entry)) + "\n" for entry in self._index))

    def _add_text(self, name: str, text: str) -> None:
        data = text.encode()
        self._add(name, len(data), io.BytesIO(data))

    def _add(self, name: str, size: int, content: _FixedSizeReader | io.BytesIO) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        self._tar.addfile(member, content)


@contextmanager
def create_archive(file: IO[bytes]) -> Iterator[ArchiveWriter]:
    """Yield a writer to an open file, which is synced to disk at the end."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        yield ArchiveWriter(tar)
    file.flush()
    os.fsync(file.fileno())


class UnpackedArchive:
    """Verified archive, extracted to a folder.

    Attributes:
        manifest: manifest of the archive.
        folder: folder with the extracted files, under their paths in the archive.
        index: index of all files, including files whose content is not in the archive.
    """

    def __init__(self, manifest: Manifest, folder: Path, index: list[IndexEntry]) -> None:
        self.manifest, self.folder, self.index = manifest, folder, index

    def iterate_files(self, kind: str) -> Iterator[tuple[PurePosixPath, Path]]:
        """Yield (relative path, extracted file) for each file of a kind, `ARTIFACTS` or `CHECKPOINTS`."""
        for entry in self.index:
            if entry.held and entry.path.startswith(kind):
                yield PurePosixPath(entry.path.removeprefix(kind)), self.folder / entry.path


class ArchiveReader:
    """Reader of an archive; raises StorageError for every fault of the file.

    Attributes:
        manifest: manifest of the archive.
    """

    def __init__(self, path: Path, tar: tarfile.TarFile) -> None:
        self._path, self._tar = path, tar
        self.manifest = self._read_manifest()

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Yield a reader of the archive at `path`.

        Raises:
            StorageError: the file is missing or not a regular file, is not a backup, has a newer format, or is damaged.
        """
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe would block
                raise StorageError(f"{str(path)!r} is not a regular file; give a file that hpsearch backup wrote")
            if status.st_size == 0:  # files of /proc may block too
                raise StorageError(f"{str(path)!r} is not a backup of hpsearch (it is empty)")
            tar = tarfile.open(path, "r:")  # noqa: SIM115 closed below
        except FileNotFoundError:
            raise StorageError(f"{str(path)!r} does not exist; give a file that hpsearch backup wrote") from None
        except (OSError, tarfile.TarError) as error:
            raise _make_invalid_error(path, error) from None
        with tar:
            yield cls(path, tar)

    def unpack(self, folder: Path, *, progress: Callable[[str], None]) -> UnpackedArchive:
        """Extract the files to the private folder `folder`, and verify them against the index.

        Raises:
            StorageError: the archive is damaged, or contains an unexpected path.
        """
        found: dict[str, tuple[int, str]] = {}
        index: list[IndexEntry] | None = None
        with self._convert_errors():
            while (member := self._tar.next()) is not None:
                if index is not None:
                    raise ValueError(f"the entry {member.name!r} follows {INDEX}, which must be the last entry")
                if member.name == INDEX:
                    index = [_parse_index_entry(line) for line in self._content(member).read().splitlines()]
                    continue
                self._check_path(member)
                if member.name in found:
                    raise ValueError(f"it contains the entry {member.name!r} twice")
                target = folder / member.name
                if target.is_dir() or any(str(path) in found for path in PurePosixPath(member.name).parents):
                    raise ValueError(f"the entry {member.name!r} is also a folder, or its folder is also a file")
                target.parent.mkdir(parents=True, exist_ok=True)
                found[member.name] = (member.size, _copy(self._content(member), target))
                if len(found) % 1000 == 0:
                    progress(f"reading {self._path.name}: {len(found)} files")
            if index is None:
                raise ValueError("the end of the file is missing")
            held = {entry.path: (entry.size, entry.sha256) for entry in index if entry.held}
            if different := sorted(name for name in held.keys() | found.keys() if held.get(name) != found.get(name)):
                raise ValueError(f"{different[0]!r} is missing or does not match {INDEX}")
            required = {STUDIES_DUMP, *({MLFLOW_DUMP} if self.manifest.has_mlflow else ())}
            if missing := sorted(required - found.keys()):
                raise ValueError(f"it does not contain {missing[0]}")
        return UnpackedArchive(self.manifest, folder, index)

    def _read_manifest(self) -> Manifest:
        try:
            member = self._tar.next()
            if member is None or member.name != MANIFEST:
                raise ValueError(f"its first entry is not {MANIFEST}")
            found = json.loads(self._content(member).read())
            made_by, format_version = found["hpsearch"], int(found["format"])
        except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _make_invalid_error(self._path, error) from None
        if format_version > ARCHIVE_FORMAT:
            raise StorageError(
                f"{str(self._path)!r} has backup format {format_version}, and this hpsearch reads formats up to "
                f"{ARCHIVE_FORMAT}; install hpsearch {shlex.quote(str(made_by))} or newer"
            )
        with self._convert_errors():
            manifest = Manifest(**{field.name: found[_KEYS.get(field.name, field.name)] for field in fields(Manifest)})
            for name, kind in get_type_hints(Manifest).items():
                if not isinstance(getattr(manifest, name), kind):
                    raise ValueError(f"{MANIFEST} has an invalid value of {_KEYS.get(name, name)!r}")
            for version in (manifest.postgres_version, manifest.pg_dump_version):
                int(version.partition(".")[0])
            return manifest

    def _check_path(self, member: tarfile.TarInfo) -> None:
        # Stricter than the filters of tarfile: only regular files in the expected folders.
        path = PurePosixPath(member.name)
        is_known = member.name in {STUDIES_DUMP, MLFLOW_DUMP} or member.name.startswith((ARTIFACTS, CHECKPOINTS))
        if not is_known or ".." in path.parts or str(path) != member.name or not member.isreg():
            raise ValueError(f"it contains the unexpected entry {member.name!r}")

    def _content(self, member: tarfile.TarInfo) -> BinaryIO:
        if member.issparse():  # a small archive could fill the disk
            raise ValueError(f"the entry {member.name!r} is sparse")
        if (content := self._tar.extractfile(member)) is None:
            raise ValueError(f"the entry {member.name!r} is not a regular file")
        return content  # type: ignore[return-value]  # IO[bytes]

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, tarfile.TarError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageError(f"{str(self._path)!r} is damaged ({format_error(error)}); give another backup") from None


def _copy(content: BinaryIO, target: Path) -> str:
    """Copy the content of an archive member to `target`, and return the SHA-256 of the content."""
    hashed = hashlib.sha256()
    with target.open("xb") as file:
        while chunk := content.read(_CHUNK):
            hashed.update(chunk)
            file.write(chunk)
    return hashed.hexdigest()


def _parse_index_entry(line: bytes) -> IndexEntry:
    found = json.loads(line)
    return IndexEntry(str(found["path"]), int(found["size"]), found["sha256"], bool(found["held"]))


def _make_invalid_error(path: Path, error: Exception) -> StorageError:
    return StorageError(f"{str(path)!r} is not a backup of hpsearch ({format_os_error(error)}), or is damaged")
