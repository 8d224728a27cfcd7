"""Optional trackers, which receive a study's metrics in addition to MLflow, and their base class."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.consumer import Consumer, TrialOutcomes


class OptionalTracker(Consumer):
    """Base class of optional trackers.

    A tracker is enabled by the study setting with its `name`, and needs the Python package of the same name.

    Args:
        setting: the value of the setting, such as a folder or a project.
        study: the name of the study.
        owner: a unique identifier of the study; a later study with the same name has another identifier.
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
                f"--{cls.name} {setting}: the package {cls.name} is not installed; on all machines, run "
                f"./hpsearch add {cls.name} (or: pip install 'hpsearch[{cls.name}]')"
            )
