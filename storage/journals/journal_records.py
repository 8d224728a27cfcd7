"""The records of a journal: one JSON object a line, told apart by their `kind`.

A journal outlives the program that wrote it: the names of kinds and fields stay, a field that is not known is passed
over, and a record that is not known is :class:`Unknown`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from hpsearch.storage.trials.settle import Outcome


@dataclass(frozen=True)
class Record:
    """What one line says; its kind is the name of its class in small letters."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of this record."""
        return {"kind": type(self).__name__.lower(), **vars(self)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Undo `to_dict`."""
        return cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})


@dataclass(frozen=True)
class Open(Record):
    """The first record: whose journal it is.

    Attributes:
        study: its name.
        trial: the trial's id in the database.
        number: the trial's number.
        attempt: the attempt at it.
        resumed: whether the trial may have a run already.
        metric: the one by which it is seen which epochs a run has.
        tags: of the run.
        began: when, in unix milliseconds.
    """

    study: str
    trial: int
    number: int
    attempt: int
    resumed: bool
    metric: str
    tags: dict[str, str]
    began: int | None = None


@dataclass(frozen=True)
class Params(Record):
    """Parameters of the run."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Epoch(Record):
    """The metrics of an epoch, `step`, at unix seconds `at`; sent unless the run has them from an earlier attempt."""

    step: int
    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Metrics(Record):
    """Other metrics, at unix seconds `at`."""

    step: int
    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Tags(Record):
    """Tags of the run."""

    values: dict[str, str]


@dataclass(frozen=True)
class Files(Record):
    """The files beside the journal are whole, and become the run's artifacts."""


@dataclass(frozen=True)
class Data(Record):
    """The dataset that the trial was trained on; `source` and `profile` are JSON."""

    name: str
    digest: str
    source: str
    profile: str


@dataclass(frozen=True)
class Model(Record):
    """The exported model beside the journal is whole; it is of epoch `step`, which had these metrics at `at`."""

    name: str
    step: int
    at: float
    metrics: dict[str, float]
    params: dict[str, Any]
    tags: dict[str, str]


@dataclass(frozen=True)
class Problem(Record):
    """What will not arrive, and why."""

    text: str


@dataclass(frozen=True)
class Published(Record):
    """All that the trial made stands before this."""


@dataclass(frozen=True)
class Leave(Record):
    """The last record of a trial that was given back: the run stays open for its next attempt."""


@dataclass(frozen=True)
class End(Record):
    """The last record of a trial that has ended.

    Attributes:
        outcome: how it ended.
        reason: why, for a person.
        at: when, in unix milliseconds.
        kept: whether the trial's last checkpoint is kept until all of the journal has arrived.
    """

    outcome: Outcome
    reason: str
    at: int
    kept: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of this record, with the outcome as a run's state in capitals."""
        found = super().to_dict()
        return {"kind": found.pop("kind"), "state": found.pop("outcome").run_state.upper(), **found}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Undo `to_dict`."""
        return cls(Outcome.of_run(found["state"]), found["reason"], found["at"], found["kept"])


@dataclass(frozen=True)
class Unknown(Record):
    """A record that this program does not know: one of a later version, or a damaged one."""

    found: Any


Logged = Params | Tags | Epoch | Metrics  # several of them go in one request; the others stand alone

_KINDS = {kind.__name__.lower(): kind for kind in Record.__subclasses__() if kind is not Unknown}


def encode(record: Record) -> bytes:
    """Return the line of a record; what JSON has nothing for is written as text."""
    return json.dumps(record.to_dict(), separators=(",", ":"), default=str).encode() + b"\n"


def decode(line: bytes) -> Record:
    """Undo `encode`.

    Raises:
        ValueError: the line is no JSON.
    """
    found = json.loads(line)
    try:
        return _KINDS[found["kind"]].from_dict(found)
    except (KeyError, TypeError, ValueError):
        return Unknown(found)
