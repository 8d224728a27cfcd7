"""Where checkpoints are kept so that any machine can go on from them: a folder, a shared volume, or an object store.

Everything lies under one URL of fsspec's. A file is written once, under a name that holds the attempt that wrote it,
and is never changed: a worker that was frozen and wakes up can replace nothing of the attempt after it. Which of the
files count is said by the study's database alone (:mod:`hpsearch.storage.checkpoints.pointers`).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.storage.errors import CheckpointStoreError, StorageError, StoredCheckpointError, format_error
from hpsearch.storage.files import compute_sha256 as digest
from hpsearch.storage.files import link_or_copy, link_or_copy_durably
from hpsearch.storage.urls import redact, redact_password

CHECKPOINT_URL_FLAG = "--checkpoint-url"

# What pip calls the driver of a protocol that fsspec does not bring along.
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "hdfs": "pyarrow",
    "webdav": "webdav4[fsspec]",
    "oss": "ossfs",
    "smb": "smbprotocol",
    "http": "aiohttp",
    "https": "aiohttp",
}

# Object stores have no folders; being asked for one, a driver may make a bucket out of a slip of the pen.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "oss"}


@dataclass(frozen=True)
class StoredFile:
    """A file under the URL: its path from there, the SHA-256 of its content in hexadecimal, its bytes."""

    path: str
    sha256: str
    size: int


class CheckpointStore:
    """Files under one URL.

    Args:
        url: of fsspec's kind (`file:///shared/checkpoints`, `s3://bucket/prefix`), or a plain path.
        setting: where it was given, for messages.

    Raises:
        StorageError: the protocol is unknown, its driver is not installed, or the URL cannot be read.
    """

    def __init__(self, url: str, *, setting: str = CHECKPOINT_URL_FLAG) -> None:
        self._secret = url
        self.url = redact(url)
        self._head = f"{setting} {self.url!r}"
        self._fs, root = _open(url, self._head)
        self._root = root.rstrip("/")
        self._local = Path(root) if _is_local(self._fs) else None
        self._folders = url.partition("://")[0] not in _OBJECT_STORES

    def check(self, *, create: bool = True) -> None:
        """Make sure that files can be written and removed.

        Args:
            create: whether a missing folder is created; otherwise the nearest existing parent is checked.

        Raises:
            CheckpointStoreError: they cannot.
        """
        folder = self._root
        with self._translate_errors("cannot be written", missing="no such folder or bucket"):
            if self._folders and create:
                self._fs.makedirs(folder, exist_ok=True)
            while self._folders and not create and folder and not self._fs.exists(folder):
                folder = folder.rpartition("/")[0]
            probe = f"{folder}/.hpsearch-{uuid.uuid4().hex}"
            self._fs.pipe_file(probe, b"hpsearch")
            self._fs.rm_file(probe)

    @kill_point("upload checkpoint")
    def put(self, local: Path, *, name: str, sha256: str | None = None) -> StoredFile:
        """Keep a file under `name`; durable, and whole or not there, when this returns.

        In a folder of the same file system it is a hard link: nothing is written twice.

        Args:
            local: the file.
            name: of it under the URL.
            sha256: of its content, where that is known.

        Raises:
            CheckpointStoreError: the disk is full, the store is away or refuses.
        """
        target = self._path(name)
        stored = StoredFile(name, sha256 or digest(local), local.stat().st_size)
        with self._translate_errors(f"did not take {name}", missing="no such folder or bucket"):
            if self._local is not None:
                link_or_copy_durably(local, Path(target))
            else:
                self._upload(local, target)
        return stored

    def _upload(self, local: Path, target: str) -> None:
        try:
            self._fs.put_file(str(local), target)
        except FileNotFoundError:
            if not self._folders:
                raise
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(local), target)

    def get(self, stored: StoredFile, local: Path) -> None:
        """Bring a file to `local`, which is replaced once size and checksum are found right.

        Raises:
            StoredCheckpointError: there is no such file, or it is torn or was changed.
            CheckpointStoreError: the store does not answer.
        """
        source = self._path(stored.path)
        local.parent.mkdir(parents=True, exist_ok=True)
        temporary = local.with_name(f".{local.name}.{os.getpid()}.tmp")
        try:
            with self._translate_errors(f"does not give {stored.path}"):
                self._fetch(source, temporary)
            if not is_identical(temporary, stored):
                raise StoredCheckpointError(f"{stored.path} under {self.url} is torn or changed: its checksum differs")
            temporary.replace(local)
        except FileNotFoundError:
            raise StoredCheckpointError(f"{stored.path} is not under {self.url}") from None
        finally:
            temporary.unlink(missing_ok=True)

    def _fetch(self, source: str, target: Path) -> None:
        target.unlink(missing_ok=True)
        if self._local is None:
            self._fs.get_file(source, str(target))
        else:
            link_or_copy(Path(source), target)

    def find(self, folder: str) -> list[str]:
        """Return the paths of all files in `folder` and below; none where there is no such folder.

        Raises:
            CheckpointStoreError: the store does not answer.
        """
        return sorted(self.sizes(folder))

    def sizes(self, folder: str | None = None) -> dict[str, int]:
        """Return the files in `folder`, by default the whole place, and below: path to bytes.

        Raises:
            CheckpointStoreError: the store does not answer.
        """
        with self._translate_errors(f"cannot list {folder or 'its files'}"):
            self._fs.invalidate_cache()  # object stores remember listings
            found = self._fs.find(self._root if folder is None else self._path(folder), detail=True)
        return {str(path).removeprefix(self._root).lstrip("/"): int(i["size"] or 0) for path, i in found.items()}

    def remove(self, paths: list[str]) -> None:
        """Remove files; those that are not there are passed over.

        Raises:
            CheckpointStoreError: the store does not answer.
        """
        for path in paths:
            with self._translate_errors(f"cannot remove {path}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(path))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it.

        Raises:
            CheckpointStoreError: the store does not answer.
        """
        path = self._path(folder)
        with self._translate_errors(f"cannot remove {folder}"), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(path, recursive=True)

    def _path(self, name: str) -> str:
        """Return the path of `name` as the file system takes it: never one outside of the URL."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or "\\" in name or ".." in parts:
            raise StorageError(f"{self._head}: {name!r} is not a name below it")
        return f"{self._root}/{'/'.join(parts)}"

    @contextlib.contextmanager
    def _translate_errors(self, what: str, *, missing: str | None = None) -> Iterator[None]:
        """Turn whatever a driver raises into one line without secrets.

        A missing file stays what it is, unless there is a word for what is `missing`.
        """
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # every driver has errors of its own
            if isinstance(error, FileNotFoundError):
                if missing is None:
                    raise
                error = OSError(0, missing)
            reason = redact_password(format_error(getattr(error, "strerror", None) or error, 300), self._secret)
            # `from None`: the text of the cause may hold what the line leaves out.
            raise CheckpointStoreError(f"{self._head} {what} ({reason})") from None


def get_part_path(checkpoint: str, file: str) -> str:
    """Return the path under the URL of a file that is a part of a checkpoint: it goes where the checkpoint goes."""
    return f"{checkpoint}.{file.lstrip('._')}"


def get_checkpoint_path(path: str) -> str:
    """Return the checkpoint that a file is, or is a part of; a copy that was never finished is of none but itself."""
    folder, _, name = path.rpartition("/")
    return path if name.endswith(".tmp") or ".pt." not in name else f"{folder}/{name.partition('.pt.')[0]}.pt"


def is_identical(path: Path, stored: StoredFile) -> bool:
    """Whether the local file at `path` has the very content of `stored`."""
    try:
        return path.stat().st_size == stored.size and digest(path) == stored.sha256
    except FileNotFoundError:
        return False


def _open(url: str, head: str) -> tuple[Any, str]:
    import fsspec

    protocol = url.partition("://")[0] if "://" in url else "file"
    if not url.strip():
        raise StorageError(f"{head} is empty: give a folder or a URL such as s3://bucket/prefix, or leave it out")
    if protocol == "file":
        path = Path(url.removeprefix("file://")).expanduser()
        if "://" in url and not path.is_absolute():
            raise StorageError(f"{head} is not absolute: write file:///FOLDER, with three slashes")
        url = f"file://{path.absolute()}"
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError:
        package = _PACKAGES.get(protocol, f"that has fsspec's driver for {protocol}")
        raise StorageError(f"{head} needs a package that is not installed: pip install {package}") from None
    except ValueError as error:
        if "not known" not in str(error):
            raise StorageError(f"{head} cannot be read: {redact_password(str(error), url)}") from None
        known = "file, s3, gs, abfs, sftp and others of fsspec's"
        raise StorageError(f"{head}: unknown protocol {protocol!r}: it may be {known}") from None
    except Exception as error:  # a driver that connects at once
        raise CheckpointStoreError(
            f"{head} cannot be used ({redact_password(format_error(error, 300), url)})"
        ) from None
    return fs, str(root)


def _is_local(fs: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)
