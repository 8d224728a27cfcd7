"""What a reader of journals is: something that is told of trials, such as MLflow, each by a thread of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hpsearch.storage.journals.journal import Place


class NotYetError(Exception):
    """Whether anybody needs this journal is known when its trial has ended."""


@dataclass(frozen=True)
class Failure:
    """What an error of a reader means.

    Attributes:
        text: the error in a line.
        passes: whether what failed may work later, as it is; else a person has to see to it.
        everything: whether nothing else need be tried now.
        expected: whether it is of a known kind, so that nobody needs its traceback.
    """

    text: str
    passes: bool
    everything: bool = False
    expected: bool = True


class Reader(Protocol):
    """Something that is told what journals hold. All but `close` is called by one thread.

    Attributes:
        name: of its thread, and of its files beside a journal.
        title: its name for a person.
    """

    name: str
    title: str

    def ship(self, place: Place) -> bool:
        """Bring on what there is from a place in a journal on; return whether this reader has all of the journal.

        Safe to repeat, whatever the time before came to.

        Raises:
            NotYetError: it may never be needed; to be asked again later.
            LockHeldError: another process is at the trial.
            Exception: something else went wrong, see `failure`.
        """
        ...

    def refused(self, place: Place) -> None:
        """Take note that a journal waits for a person, as its position says."""
        ...

    def failure(self, error: Exception) -> Failure:
        """Return what an error means that `ship` raised."""
        ...

    def close(self) -> None:
        """Let go of everything, also of what `ship` waits for in another thread."""
        ...
