"""Base class of the trackers in addition to MLflow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.consumer import Consumer, TrialOutcomes


class OptionalTracker(Consumer):
    """Base class of the trackers that a study selects by the setting `name`, and that need the package of that name.

    Args:
        setting: the value of the setting.
        study: the name of the study.
        owner: a unique identifier of the study, which differs from that of a later study with the same name.
        home: the home folder of hpsearch on this machine.
        outcomes: the outcomes of trials in the study's database.
    """

    def __init__(self, setting: str, study: str, owner: str, home: Path, outcomes: TrialOutcomes) -> None:
        super().__init__(outcomes)
        self._setting, self._study, self._owner, self._home = setting, study, owner, home

    @classmethod
    def check(cls, setting: str) -> None:
        """Check that this machine can send trials to the tracker.

        Raises:
            StorageError: the package is missing, or the setting does not work on this machine.
        """
        if importlib.util.find_spec(cls.name) is None:
            raise StorageError(
                f"--{cls.name} {setting}: the package {cls.name} is not installed; run on all machines: "
                f"./hpsearch add {cls.name} (or: pip install 'hpsearch[{cls.name}]')"
            )
