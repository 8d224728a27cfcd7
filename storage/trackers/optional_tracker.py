"""Base class of the trackers in addition to MLflow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.reader import Reader, TrialEnds


class OptionalTracker(Reader):
    """A tracker of the studies that have the setting of its `name`; it needs the Python package of that name.

    Args:
        setting: the value of the setting.
        study: the study's name.
        owner: an identifier that no other study has, not even a later one of the same name.
        home: the folder of hpsearch on this machine.
        ends: the states of trials in the study's database.
    """

    def __init__(self, setting: str, study: str, owner: str, home: Path, ends: TrialEnds) -> None:
        super().__init__(ends)
        self._setting, self._study, self._owner, self._home = setting, study, owner, home

    @classmethod
    def check(cls, setting: str) -> None:
        """Check that this machine can send trials to the tracker.

        Raises:
            StorageError: the package is missing, or the setting cannot be used on this machine.
        """
        if importlib.util.find_spec(cls.name) is None:
            raise StorageError(
                f"--{cls.name} {setting}: the package {cls.name} is not installed: ./hpsearch add {cls.name} "
                f"(or: pip install 'hpsearch[{cls.name}]') on all machines"
            )
