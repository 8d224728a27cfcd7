"""The file of a backup: a tar with its manifest first and, last, an index of all that is in it.

By the index a file that was cut off, at whatever place, is told from a whole one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from hpsearch.storage.errors import StorageError, one_line, reason

FORMAT = 1
MANIFEST, INDEX = "manifest.json", "index.jsonl"
STUDIES_DUMP, MLFLOW_DUMP = "studies.dump", "mlflow.dump"
ARTIFACTS, CHECKPOINTS = "artifacts/", "checkpoints/"

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """What a backup is of.

    Attributes:
        made_at: when the studies were as they are in it, in UTC.
        hpsearch: the version that made it.
        postgres, dumped_by: versions of the server and of pg_dump; of two the newer one.
        schema, optuna_schema, mlflow_schema: revisions of the tables; the last is None without MLflow's database.
        home: the home folder that it was made in.
        studies, trials, runs, models: how many there are; models are registered ones.
        files: whether the artifacts' files are in it, or only their index.
        format: of the archive.
    """

    made_at: str
    hpsearch: str
    postgres: str
    dumped_by: str
    schema: str | None
    optuna_schema: str | None
    mlflow_schema: str | None
    home: str
    studies: int
    trials: int
    runs: int
    models: int
    files: bool
    format: int = FORMAT

    @property
    def with_mlflow(self) -> bool:
        """Whether MLflow's database is in it."""
        return self.mlflow_schema is not None


@dataclass(frozen=True)
class Entry:
    """A file of the index.

    Attributes:
        path: in the archive.
        size: in bytes.
        sha256: of its content, in hexadecimal; None where it was not at hand.
        held: whether the archive has it.
    """

    path: str
    size: int
    sha256: str | None
    held: bool


class _Exactly:
    """Reads so many bytes of a file that others may be writing, zeros for those that are gone, and hashes them."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data = self._file.read(size).ljust(size, b"\0")
        self._left -= size
        self.hash.update(data)
        return data


class Writer:
    """Writes an archive."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._index: list[Entry] = []

    def manifest(self, manifest: Manifest) -> None:
        """Write the manifest, which comes first."""
        self._text(MANIFEST, json.dumps(asdict(manifest), indent=2) + "\n")

    def file(self, name: str, path: Path) -> bool:
        """Write a file; False where it is gone."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            size = os.fstat(file.fileno()).st_size
            exactly = _Exactly(file, size)
            self._add(name, size, exactly)
        self._index.append(Entry(name, size, exactly.hash.hexdigest(), held=True))
        return True

    def note(self, name: str, size: int, sha256: str | None) -> None:
        """Write a file into the index alone."""
        self._index.append(Entry(name, size, sha256, held=False))

    def index(self) -> None:
        """Write the index, which comes last."""
        self._text(INDEX, "".join(json.dumps(asdict(entry)) + "\n" for entry in self._index))

    def _text(self, name: str, text: str) -> None:
        data = text.encode()
        self._add(name, len(data), io.BytesIO(data))

    def _add(self, name: str, size: int, content: _Exactly | io.BytesIO) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        self._tar.addfile(member, content)


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    """Yield a writer to `path`, a new file for this user alone; all of it is on the disk at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            yield Writer(tar)
        file.flush()
        os.fsync(file.fileno())


class Unpacked:
    """An archive whose files were found whole, and lie below a folder.

    Attributes:
        manifest: what it is of.
        folder: where its files are, by their paths in it.
        index: all of its files, and those that it only knows of.
    """

    def __init__(self, manifest: Manifest, folder: Path, index: list[Entry]) -> None:
        self.manifest, self.folder, self.index = manifest, folder, index

    def held(self, kind: str) -> Iterator[tuple[PurePosixPath, Path]]:
        """Yield the files of a kind, `ARTIFACTS` or `CHECKPOINTS`: their paths below it, and where they lie."""
        for entry in self.index:
            if entry.held and entry.path.startswith(kind):
                yield PurePosixPath(entry.path.removeprefix(kind)), self.folder / entry.path


class Reader:
    """Reads an archive; every mistake in it is a StorageError in one line.

    Attributes:
        manifest: what it is of.
    """

    def __init__(self, path: Path, tar: tarfile.TarFile) -> None:
        self._path, self._tar = path, tar
        self.manifest = self._read_manifest()

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """Yield a reader of the archive at `path`.

        Raises:
            StorageError: there is no file, it is none of ours, is of a newer format, or is damaged.
        """
        try:
            tar = tarfile.open(path, "r:")  # noqa: SIM115 it is closed below
        except FileNotFoundError:
            raise StorageError(f"{str(path)!r} does not exist: give the file that hpsearch backup wrote") from None
        except (OSError, tarfile.TarError) as error:
            raise _no_backup(path, error) from None
        with tar:
            yield cls(path, tar)

    def unpack(self, folder: Path, *, progress: Callable[[str], None]) -> Unpacked:
        """Bring its files below `folder`, which is this user's alone, and make sure that it is whole.

        Raises:
            StorageError: it is damaged, or a path in it leads elsewhere.
        """
        found: dict[str, tuple[int, str]] = {}
        index: list[Entry] | None = None
        with self._damaged():
            while (member := self._tar.next()) is not None:
                if index is not None:
                    raise ValueError(f"{member.name!r} comes after its end")
                if member.name == INDEX:
                    index = [_entry(line) for line in self._content(member).read().splitlines()]
                    continue
                self._check_path(member)
                if member.name in found:
                    raise ValueError(f"{member.name!r} is in it twice")
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                found[member.name] = (member.size, _copy(self._content(member), target))
                if len(found) % 1000 == 0:
                    progress(f"reading {self._path.name}: {len(found)} files")
            if index is None:
                raise ValueError("its end is missing")
            held = {entry.path: (entry.size, entry.sha256) for entry in index if entry.held}
            if different := sorted(name for name in held.keys() | found.keys() if held.get(name) != found.get(name)):
                raise ValueError(f"{different[0]!r} is not what its index says")
            wanted = {STUDIES_DUMP, *({MLFLOW_DUMP} if self.manifest.with_mlflow else ())}
            if missing := sorted(wanted - found.keys()):
                raise ValueError(f"it has no {missing[0]}")
        return Unpacked(self.manifest, folder, index)

    def _read_manifest(self) -> Manifest:
        try:
            member = self._tar.next()
            if member is None or member.name != MANIFEST:
                raise ValueError("it has no manifest")
            found = json.loads(self._content(member).read())
            made_by, kind = found["hpsearch"], int(found["format"])
        except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise _no_backup(self._path, error) from None
        if kind > FORMAT:
            raise StorageError(
                f"{str(self._path)!r} is of a newer format ({kind}; this hpsearch reads up to {FORMAT}): "
                f"install hpsearch {made_by} or newer"
            )
        with self._damaged():
            manifest = Manifest(**{field.name: found[field.name] for field in fields(Manifest)})
            for told in (manifest.postgres, manifest.dumped_by):
                int(str(told).partition(".")[0])
            return manifest

    def _check_path(self, member: tarfile.TarInfo) -> None:
        # Stricter than tarfile's own filters: no links at all, and nowhere but where such files belong.
        path = PurePosixPath(member.name)
        kinds = (ARTIFACTS, CHECKPOINTS)
        known = member.name in {STUDIES_DUMP, MLFLOW_DUMP} or member.name.startswith(kinds)
        if not known or ".." in path.parts or "\\" in member.name or str(path) != member.name or not member.isreg():
            raise ValueError(f"{member.name!r} does not belong there")

    def _content(self, member: tarfile.TarInfo) -> BinaryIO:
        content = self._tar.extractfile(member)
        if content is None:
            raise ValueError(f"{member.name!r} is no file")
        return content  # type: ignore[return-value]  # IO[bytes]

    @contextmanager
    def _damaged(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{str(self._path)!r} is damaged ({one_line(error)}): take another backup") from None


def _copy(content: BinaryIO, target: Path) -> str:
    """Write a member's content and return its hash."""
    hashed = hashlib.sha256()
    with target.open("xb") as file:
        while chunk := content.read(_CHUNK):
            hashed.update(chunk)
            file.write(chunk)
    return hashed.hexdigest()


def _entry(line: bytes) -> Entry:
    found = json.loads(line)
    return Entry(str(found["path"]), int(found["size"]), found["sha256"], bool(found["held"]))


def _no_backup(path: Path, error: Exception) -> StorageError:
    return StorageError(f"{str(path)!r} is no backup of hpsearch ({reason(error)}), or is damaged")
