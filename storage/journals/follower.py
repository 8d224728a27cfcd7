"""A reader of what is logged alone: parameters, epochs, other metrics, tags, and how the trial ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hpsearch.storage.journals.journal import Entry, Place
from hpsearch.storage.journals.journal_records import End
from hpsearch.storage.journals.reader import Failure
from hpsearch.storage.journals.trial_ends import TrialEnds


class Follower(ABC):
    """A reader that keeps to the rules for journals whose process has died; what it tells is a subclass's.

    Args:
        ends: what the study's database says of trials.
    """

    name: str
    title: str

    def __init__(self, ends: TrialEnds) -> None:
        self._ends = ends

    def ship(self, place: Place) -> bool:
        """Tell what there is; return whether the journal is over.

        Raises:
            NotYetError: a later attempt may tell all of it.
            Exception: see `failure`.
        """
        journal = place.journal
        entries = place.unsent()
        try:
            if not journal.live and self._ends.outlived(journal):
                self.leave(place)
                return True
            over = self.tell(place, entries)
        finally:
            place.returned()
        if journal.live or (over and not self.superseded(place)):
            return over
        # Its process died before it could say how it ended, where its trial has.
        if (ended := self._ends.ended(journal.head.trial)) is not None:
            self.end(place, End(ended.outcome, ended.reason, int(journal.path.stat().st_mtime * 1000), kept=False))
        self.leave(place)
        return True

    def superseded(self, place: Place) -> bool:
        """Whether the trial was given to another attempt, which has the last word on it."""
        return self._ends.superseded(place.journal.head.trial, place.journal.head.attempt)

    @abstractmethod
    def tell(self, place: Place, entries: Sequence[Entry]) -> bool:
        """Tell of these, and move the place when that will last; return whether the last of them ends the journal."""

    @abstractmethod
    def end(self, place: Place, end: End) -> None:
        """Tell how a trial ended, of a journal that does not."""

    @abstractmethod
    def leave(self, place: Place) -> None:
        """Let go of a journal, of which nothing more is told here."""

    @abstractmethod
    def failure(self, error: Exception) -> Failure:
        """Return what an error means that came of telling."""

    @abstractmethod
    def refused(self, place: Place) -> None:
        """Take note that a journal waits for a person."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, also of what `ship` waits for in another thread."""
