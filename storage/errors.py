"""Errors of this package, and error texts in one line."""


def format_error(error: object, length: int | None = None) -> str:
    """Return the text of an error as one line of at most `length` characters, without the SQL statement."""
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    return text[:length] or type(error).__name__


def format_os_error(error: Exception) -> str:
    """Return the text of an error as one line, without the number and the file of an operating system error."""
    return format_error(getattr(error, "strerror", None) or error)


class StorageError(Exception):
    """Unusable storage or service; the text is one line with the setting, its value and the remedy."""


class ServiceUnavailableError(StorageError):
    """Service that does not answer at the moment; the same command may succeed later."""


class ClaimLostError(Exception):
    """Trial that this attempt does not own any more, so that its writes are rejected."""


class StoredCheckpointError(Exception):
    """Stored checkpoint that is missing, truncated or changed; the worker resumes from the previous one."""


class CheckpointStoreError(StorageError):
    """Checkpoint store that is full, unavailable or rejects the request; a retry may succeed."""
