"""The one error of this package that is meant for the user."""


class StorageError(Exception):
    """A storage or service that cannot be used: one line which names the setting, its value and the remedy."""
