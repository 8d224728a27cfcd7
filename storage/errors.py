"""The errors of this package, and errors as one line."""


def one_line(error: object, length: int | None = None) -> str:
    """Return an error as one line of at most `length` characters; a database error without its statement."""
    text = " ".join(str(getattr(error, "orig", None) or error).split())
    return text[:length] or type(error).__name__


def reason(error: Exception) -> str:
    """Return an error as one line; an error of the operating system without its number and its file."""
    return one_line(getattr(error, "strerror", None) or error)


class StorageError(Exception):
    """A storage or service that cannot be used: one line which names the setting, its value and the remedy."""


class AwayError(StorageError):
    """A service that does not answer now: whoever starts the command again may have more luck."""


class ClaimLostError(Exception):
    """Another worker has taken the trial, or somebody ended it from outside: nothing of it may be written."""


class StoredCheckpointError(Exception):
    """A stored checkpoint that is missing, torn or changed: go on from the one before it."""


class CheckpointStoreError(StorageError):
    """The place where checkpoints are kept is full, away or refuses: it may be another time."""
