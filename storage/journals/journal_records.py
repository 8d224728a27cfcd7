"""The records of a journal: one JSON object per line, with its type as `kind`.

A journal outlives the program that wrote it. Kinds and field names are stored: never rename one. Unknown fields are
ignored, and an unknown record is read as :class:`Unknown`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from hpsearch.storage.trials.finishing import Outcome


@dataclass(frozen=True)
class Record:
    """Base class of records.

    Attributes:
        kind: the type of the record in a journal; by default the name of the class in lower case.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str | None = None) -> None:
        cls.kind = kind or cls.__name__.lower()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of this record."""
        return {"kind": self.kind, **vars(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Return the record of a JSON object by `to_dict`."""
        return cls(**{field.name: stored[field.name] for field in fields(cls) if field.name in stored})


@dataclass(frozen=True)
class Header(Record, kind="open"):
    """The first record of a journal, which identifies the trial.

    Attributes:
        study: the name of the study.
        trial: the id of the trial in the database.
        number: the number of the trial.
        attempt: the number of the attempt.
        resumed: whether an earlier attempt may have created a run for the trial.
        metric: a metric that every epoch has; its history in a run shows which epochs the run contains.
        tags: tags of the run.
        began: the start of the attempt in unix milliseconds; None in journals of earlier versions.
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
    """Parameters to log to the run."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Epoch(Record):
    """The metrics of epoch `step`, at unix time `at` in seconds; not sent if the run already contains the epoch."""

    step: int
    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Metrics(Record):
    """Metrics other than those of epochs, at unix time `at` in seconds."""

    step: int
    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Tags(Record):
    """Tags to set on the run."""

    values: dict[str, str]


@dataclass(frozen=True)
class Artifacts(Record, kind="files"):
    """The statement that the files in the journal's artifact folder are complete and can be uploaded."""


@dataclass(frozen=True)
class Dataset(Record, kind="data"):
    """The dataset on which the trial was trained; `source` and `profile` are JSON texts, as in MLflow's `Dataset`."""

    name: str
    digest: str
    source: str
    profile: str


@dataclass(frozen=True)
class Model(Record):
    """The statement that the model in the journal's model folder is complete and can be uploaded.

    Attributes:
        name: the name of the model.
        step: the epoch of the model's weights.
        at: the unix time of this epoch in seconds.
        metrics: the metrics of this epoch.
        params: the parameters of the model.
        tags: the tags of the model.
    """

    name: str
    step: int
    at: float
    metrics: dict[str, float]
    params: dict[str, Any]
    tags: dict[str, str]


@dataclass(frozen=True)
class Problem(Record):
    """A description of data that are missing from the run, with the reason."""

    text: str


@dataclass(frozen=True)
class ArtifactsComplete(Record, kind="published"):
    """The statement that all artifacts of the trial are in the records before this record."""


@dataclass(frozen=True)
class Released(Record, kind="leave"):
    """The last record of an attempt that released its trial, whose run stays open for the next attempt."""


@dataclass(frozen=True)
class End(Record):
    """The last record of a trial that has ended.

    Attributes:
        outcome: the outcome of the trial.
        reason: the reason of the outcome, as text for users.
        at: the time of the end in unix milliseconds.
        is_checkpoint_kept: whether the trial's last checkpoint is kept until MLflow has the whole journal.
    """

    outcome: Outcome
    reason: str
    at: int
    is_checkpoint_kept: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of this record, with the outcome as the run's state tag in upper case."""
        stored = super().to_dict()
        kind, outcome, kept = (stored.pop(name) for name in ("kind", "outcome", "is_checkpoint_kept"))
        return {"kind": kind, "state": outcome.run_state.upper(), **stored, "kept": kept}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Return the record of a JSON object by `to_dict`."""
        return cls(Outcome.from_run_state(stored["state"]), stored["reason"], stored["at"], stored["kept"])


@dataclass(frozen=True)
class Unknown(Record):
    """A damaged record, or a record of a later version of hpsearch."""

    content: Any


Batchable = Params | Tags | Epoch | Metrics  # several of these are sent in one request, the others one by one

_RECORD_TYPES = {record.kind: record for record in Record.__subclasses__() if record is not Unknown}


def encode(record: Record) -> bytes:
    """Return a record as a line of the journal; values without a JSON type are written as text."""
    return json.dumps(record.to_dict(), separators=(",", ":"), default=str).encode() + b"\n"


def decode(line: bytes) -> Record:
    """Return the record of a line that `encode` wrote.

    Raises:
        ValueError: the line is not JSON.
    """
    stored = json.loads(line)
    try:
        return _RECORD_TYPES[stored["kind"]].from_dict(stored)
    except (KeyError, TypeError, ValueError):
        return Unknown(stored)
