"""Exceptions of this package, and one-line error texts."""

from __future__ import annotations

import errno
import shlex

from hpsearch.causes import iterate_causes


def check_encodable(text: str, setting: str) -> None:
    """Check that a text has no bytes that are not UTF-8: the database and MLflow do not accept them.

    Raises:
        StorageError: it has such bytes, for example those of a path in another encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StorageError(f"{setting} {text!a} is not valid UTF-8; use another name") from None


def format_error(error: object, length: int | None = None) -> str:
    """Return the text of an error as one line of at most `length` characters, without SQLAlchemy's SQL statement."""
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    return text[:length] or type(error).__name__


def format_os_error(error: Exception) -> str:
    """Return the text of an error as one line; an OSError is reduced to its text, without error number and file."""
    return format_error(getattr(error, "strerror", None) or error)


FULL_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def find_full_disk(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk that an error is, or that caused it; None if there is none."""
    full = (each for each in iterate_causes(error) if isinstance(each, OSError) and each.errno in FULL_DISK_ERRORS)
    return next(full, None)


def suggest_disk_remedy(error: OSError, otherwise: str) -> str:
    """Return the remedy for a failed write: free disk space if the disk is full, else the text `otherwise`."""
    return "free disk space" if error.errno in FULL_DISK_ERRORS else otherwise


class StorageError(Exception):
    """Unusable storage or service; the message is one line with the setting, its value and the remedy."""


class StudyNotFoundError(KeyError):
    """Study that does not exist, for example because another command has deleted it."""


class DamagedStudyError(StorageError):
    """Study with an attribute in the database that is not valid JSON, or has invalid contents."""

    def __init__(self, study: str, key: str, fault: str = "") -> None:
        super().__init__(
            f"the settings of study {study!r} in the database are damaged (attribute {key!r}{fault and f': {fault}'}); "
            "restore a backup, use the version of hpsearch that created the study, or delete the study with: "
            f"hpsearch delete {shlex.quote(study)}"
        )


class ServiceUnavailableError(StorageError):
    """Service that does not answer at the moment; a later retry of the command may succeed."""


class ClaimLostError(Exception):
    """Trial that this attempt does not own any more, so that the database rejects the writes of the attempt."""


class StoredCheckpointError(Exception):
    """Stored checkpoint that is missing, truncated or changed; the worker resumes from the previous checkpoint."""


class CheckpointStoreError(StorageError):
    """Checkpoint store that is full, unavailable or rejects the request; a retry may succeed."""


class UnsafeCheckpointError(CheckpointStoreError):
    """Checkpoint that can run code, and whose origin the user has to confirm; a retry does not succeed before."""
