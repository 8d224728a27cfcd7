"""What a worker is answered when it asks for a trial, or reports on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Claim:
    """The right to run one trial."""

    trial_id: int
    number: int
    attempt: int

    @property
    def resumed(self) -> bool:
        """Whether the trial has been started before."""
        return self.attempt > 1


@dataclass(frozen=True)
class Lost:
    """A trial that was settled as FAIL just now, because too many of its workers died."""

    trial_id: int
    number: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Nothing:
    """No trial to take now. With `running` trials of others, one may yet come back; with none, the study is done."""

    running: int


@dataclass(frozen=True)
class Stopped:
    """The study was stopped: nothing is handed out until it is started again."""

    why: str


@dataclass(frozen=True)
class Reported:
    """What a report is answered with.

    Attributes:
        stopped: whether the study was stopped: the trial is to be given back.
        counted: whether the epoch was written; not when the study's budget in epochs was spent before.
        room: whether the study's budgets in epochs and seconds have room for the trial's next epoch.
    """

    stopped: bool
    counted: bool = True
    room: bool = True


class Checkpoint(Protocol):
    """Where a checkpoint is kept, and what it must be: see :mod:`hpsearch.storage.checkpoints.store`."""

    @property
    def path(self) -> str:
        """Where, in the store."""
        ...

    @property
    def sha256(self) -> str:
        """Of the file."""
        ...

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        ...
