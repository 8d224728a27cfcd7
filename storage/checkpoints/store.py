"""Checkpoint files in a folder, on a shared file system or in an object store, for resuming a trial on any machine.

All files are below one fsspec URL. A file is written once, under a name that contains the number of the attempt, and
never changed, so a worker that was frozen cannot replace files of a later attempt. The study's database records which
files are valid (:mod:`hpsearch.storage.checkpoints.pointers`).
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.redaction import redact
from hpsearch.storage.errors import (
    FULL_DISK_ERRORS,
    CheckpointStoreError,
    StorageError,
    StoredCheckpointError,
    check_encodable,
    format_error,
)
from hpsearch.storage.files import compute_sha256 as digest
from hpsearch.storage.files import link_or_copy, link_or_copy_durably
from hpsearch.storage.hdfs_library import load_hdfs_library
from hpsearch.storage.urls import redact_password

CHECKPOINT_URL_FLAG = "--checkpoint-url"

# Python packages with the drivers of protocols that fsspec does not contain.
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

# Object stores have no folders. A driver that is asked to create one may create a bucket from a mistyped URL.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "oss"}


@dataclass(frozen=True)
class StoredFile:
    """Stored file: path relative to the URL of the store, SHA-256 in hexadecimal, and size in bytes."""

    path: str
    sha256: str
    size: int


class CheckpointStore:
    """Store of checkpoint files below one URL.

    Args:
        url: fsspec URL (`file:///shared/checkpoints`, `s3://bucket/prefix`) or path.
        setting: name of the setting with the URL, for messages.

    Raises:
        StorageError: the protocol is unknown, its driver is not installed, or the URL cannot be parsed.
    """

    def __init__(self, url: str, *, setting: str = CHECKPOINT_URL_FLAG) -> None:
        if not isinstance(url, str):
            raise StorageError(f"{setting} {url!r} is not text; give a folder or a URL such as s3://bucket/prefix")
        check_encodable(url, setting)
        self._secret = url
        self.url = redact(url)
        self._head = f"{setting} {self.url!r}"
        self._fs, root = _open(url, self._head)
        self._root = root.rstrip("/")
        self._local = Path(root) if _is_local(self._fs) else None
        self._folders = url.partition("://")[0] not in _OBJECT_STORES

    def check(self, *, create: bool = True) -> None:
        """Check that files can be written and removed.

        Args:
            create: whether to create a missing folder; otherwise the nearest existing parent is checked.

        Raises:
            CheckpointStoreError: files cannot be written or removed.
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
        """Store a file under `name`, atomically and durably.

        If `local` and the store are on the same file system, the stored file is a hard link, and no content is copied.

        Args:
            local: file to store.
            name: path below the URL of the store.
            sha256: SHA-256 of the file; None to compute the hash.

        Raises:
            CheckpointStoreError: the disk is full, or the store is unavailable or rejects the file.
        """
        target = self._path(name)
        stored = StoredFile(name, sha256 or digest(local), local.stat().st_size)
        with self._translate_errors(f"cannot store {name}", missing="no such folder or bucket"):
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
        """Copy a stored file to `local`; an existing `local` is replaced only after size and checksum were verified.

        Raises:
            StoredCheckpointError: the file is missing, truncated or changed.
            CheckpointStoreError: the store is unavailable.
        """
        source = self._path(stored.path)
        local.parent.mkdir(parents=True, exist_ok=True)
        temporary = local.with_name(f".{local.name}.{os.getpid()}.tmp")
        try:
            with self._translate_errors(f"cannot read {stored.path}"):
                self._fetch(source, temporary)
            if not is_identical(temporary, stored):
                raise StoredCheckpointError(f"{stored.path} at {self.url} is damaged: its checksum differs")
            temporary.replace(local)
        except FileNotFoundError:
            raise StoredCheckpointError(f"{stored.path} does not exist at {self.url}") from None
        finally:
            temporary.unlink(missing_ok=True)

    def _fetch(self, source: str, target: Path) -> None:
        target.unlink(missing_ok=True)
        if self._local is None:
            self._fs.get_file(source, str(target))
        else:
            link_or_copy(Path(source), target)

    def find(self, folder: str) -> list[str]:
        """Return the paths of all files below `folder`; an empty list if the folder does not exist.

        Raises:
            CheckpointStoreError: the store is unavailable.
        """
        return sorted(self.sizes(folder))

    def sizes(self, folder: str | None = None) -> dict[str, int]:
        """Return the size in bytes of each file below `folder`, by path; None means all files of the store.

        Raises:
            CheckpointStoreError: the store is unavailable.
        """
        with self._translate_errors(f"cannot list {folder or 'its files'}"):
            self._fs.invalidate_cache()  # drivers of object stores cache listings
            found = self._fs.find(self._root if folder is None else self._path(folder), detail=True)
        return {self._name(path): int(i["size"] or 0) for path, i in found.items()}

    def remove(self, paths: list[str]) -> None:
        """Remove files; missing files are skipped.

        Raises:
            CheckpointStoreError: the store is unavailable.
        """
        for path in paths:
            with self._translate_errors(f"cannot remove {path}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._removable_path(path))

    def remove_folder(self, folder: str) -> None:
        """Remove the checkpoint files below a folder, and then the empty folders; a missing folder is skipped.

        Other files stay, because the URL and the folder may come from the database, where any worker can write them.

        Raises:
            CheckpointStoreError: the store is unavailable.
        """
        found = [path for path in self.find(folder) if is_removable_path(path)]
        if self._folders or has_magic(self._root):  # a call for several files would expand the pattern
            self.remove(found)
        elif found:
            with self._translate_errors(f"cannot remove {folder}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm([self._path(path) for path in found])  # one request for up to 1000 files
        if self._folders:
            self._remove_empty_folders(folder)

    def _remove_empty_folders(self, folder: str) -> None:
        path = self._removable_path(folder)
        with self._translate_errors(f"cannot list {folder}"):
            self._fs.invalidate_cache()
            below = self._fs.find(path, maxdepth=1, withdirs=True, detail=True)
        names = [self._name(each) for each, info in below.items() if info["type"] == "directory"]
        trials = [name for name in names if name != folder and PurePosixPath(name).name.isdecimal()]
        for name in (*trials, folder):
            with contextlib.suppress(Exception):  # it has other files; drivers have different error classes
                self._fs.rmdir(self._removable_path(name))

    def _path(self, name: str) -> str:
        """Return the path of `name` in the fsspec file system; raises StorageError if it is not below the URL."""
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or "\\" in name or ".." in parts:
            raise StorageError(f"{self._head}: {name!r} is not a relative path below the URL")
        return f"{self._root}/{'/'.join(parts)}"

    def _name(self, path: object) -> str:
        """Return the path below the URL of a path in the fsspec file system."""
        return str(path).removeprefix(self._root).lstrip("/")

    def _removable_path(self, name: str) -> str:
        """Return `_path(name)`; raises StorageError if a symbolic link leads out of the folder of the store."""
        path = self._path(name)
        if self._local is not None and not Path(path).parent.resolve().is_relative_to(self._local.resolve()):
            raise StorageError(f"{self._head}: {name!r} is behind a symbolic link; remove the link")
        return path

    @contextlib.contextmanager
    def _translate_errors(self, failure: str, *, missing: str | None = None) -> Iterator[None]:
        """Convert all errors of an fsspec driver to one-line errors without secrets.

        FileNotFoundError is raised unchanged, unless `missing` describes the missing object.
        """
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # drivers have different error classes
            if isinstance(error, IsADirectoryError) and missing is None:
                raise FileNotFoundError(str(error)) from None  # the file was replaced by a folder
            if isinstance(error, FileNotFoundError):
                if missing is None:
                    raise
                error = OSError(0, missing)
            reason = redact_password(format_error(getattr(error, "strerror", None) or error, 300), self._secret)
            # `from None`: the text of the cause may contain secrets.
            remedy = "; free disk space" if getattr(error, "errno", None) in FULL_DISK_ERRORS else ""
            raise CheckpointStoreError(f"{self._head} {failure} ({reason}){remedy}") from None


def get_part_path(checkpoint: str, file: str) -> str:
    """Return the path, below the URL of the store, of a file that belongs to a checkpoint, such as a shard."""
    return f"{checkpoint}.{file.lstrip('._')}"


def get_checkpoint_path(path: str) -> str:
    """Return the path of the checkpoint that a file belongs to; an unfinished copy (`.tmp`) is returned unchanged."""
    folder, _, name = path.rpartition("/")
    return path if name.endswith(".tmp") or ".pt." not in name else f"{folder}/{name.partition('.pt.')[0]}.pt"


# STUDY/0007/0004-1.pt (or 0004.120-1.pt), and its shards and metadata.
_LONGEST_NAME = 255  # bytes of a file name on most systems
_CHECKPOINT_PATH = re.compile(r"[A-Za-z0-9][\w.-]*/\d{4,}/[\d.]+-\d+\.pt(\.metadata|\.\d+_\d+\.distcp)?", re.ASCII)


def is_checkpoint_path(path: str) -> bool:
    """Return whether a path below the URL of a store is one that a worker gives to a checkpoint file."""
    return len(path) <= _LONGEST_NAME and _CHECKPOINT_PATH.fullmatch(path) is not None


def is_removable_path(path: str) -> bool:
    """Return whether a path is that of a checkpoint file or of its unfinished copy (`0004-1.pt.1a2b3c4d.tmp`)."""
    return is_checkpoint_path(re.sub(r"\.[0-9a-f]{8}\.tmp$", "", path))


def is_below(url: str, root: str) -> bool:
    """Return whether a checkpoint URL is `root` or below it; links in local folders are resolved."""
    local = [Path(value.removeprefix("file://")).expanduser() for value in (url, root) if _is_local_url(value)]
    if len(local) == 2:
        return local[0].resolve().is_relative_to(local[1].resolve())
    return not local and ".." not in url and f"{url.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")


def _is_local_url(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def is_identical(path: Path, stored: StoredFile) -> bool:
    """Return whether the local file at `path` has the size and checksum of `stored`."""
    try:
        return path.stat().st_size == stored.size and digest(path) == stored.sha256
    except FileNotFoundError:
        return False


def _open(url: str, head: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    protocol = url.partition("://")[0] if "://" in url else "file"
    if not url.strip():
        raise StorageError(f"{head} is empty; give a folder or a URL such as s3://bucket/prefix")
    if "::" in url and "://" in url:  # drivers of caches ignore the checks of this module
        raise StorageError(
            f"{head} contains '::'; give only the last URL of a chain, and a host's name instead of an IPv6 address"
        )
    if protocol == "file":
        path = Path(url.removeprefix("file://")).expanduser()
        if "://" in url and not path.is_absolute():
            raise StorageError(f"{head} is not an absolute path; write file:///FOLDER, with three slashes")
        return LocalFileSystem(), str(path.absolute())  # `url_to_fs` would cut a path at `::`
    if set("?#") & set(url):  # below `s3://bucket/file?versionId=`, every path leads to `file`
        raise StorageError(
            f"{head} contains ? or #, after which drivers ignore the rest of the URL; use a URL without them"
        )
    if "hdfs" in protocol:
        load_hdfs_library()
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError:
        package = _PACKAGES.get(protocol, f"PACKAGE, with fsspec's driver for {protocol}")
        raise StorageError(f"{head} needs a package that is not installed; run pip install {package}") from None
    except ValueError as error:
        if "not known" not in str(error):
            raise StorageError(f"{head} cannot be parsed: {redact_password(str(error), url)}") from None
        known = "file, s3, gs, abfs, sftp or another protocol of fsspec"
        raise StorageError(f"{head} has the unknown protocol {protocol!r}; use {known}") from None
    except Exception as error:  # the driver connected immediately, and failed
        reason = redact_password(format_error(error, 300), url)
        raise CheckpointStoreError(f"{head} cannot be used ({reason})") from None
    if protocol == "webhdfs":  # its HTTP client would send credentials in ~/.netrc to a host that only the study names
        fs.session.trust_env = False
        fs.session.verify = fs.session.verify and (os.environ.get("REQUESTS_CA_BUNDLE") or True)
    return fs, str(root)


def _is_local(fs: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)
