"""From a journal to MLflow: the trial's run is found or made, and what the journal holds is brought there once.

Everything is safe to repeat. A point of a metric is stored once by its (key, time, step, value); a run or a model is
looked for before it is created wherever another process, or a reply that was lost, may have made it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import PENDING, RUN_ID, RUN_URL
from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import MLFLOW, Entry, Place
from hpsearch.storage.journals.reader import Failure, Reader, RefusedError
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.artifacts import artifact_attrs
from hpsearch.storage.mlflow.client import Tracking, allowed_name, epoch_metrics
from hpsearch.storage.mlflow.health import describe_error, is_away, unreachable
from hpsearch.storage.mlflow.model import make_model
from hpsearch.storage.mlflow.run_links import RunLinks, TrialGoneError
from hpsearch.storage.trials.settle import Outcome

if TYPE_CHECKING:
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

# MLflow takes this many things in one request, and a request of this many characters.
_MOST_METRICS, _MOST_NAMED, _MOST_TEXT = 1000, 100, 400_000


@dataclass
class _Batch:
    """What goes in one request; the metrics of an epoch are not divided, so that all or none of them arrive."""

    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def takes(self, more: _Batch) -> bool:
        """Whether all of it goes in one request; into an empty one anything does, for it cannot be divided."""
        both = (self, more)
        named = max(sum(len(batch.params) for batch in both), sum(len(batch.tags) for batch in both))
        count = sum(len(batch.metrics) + len(batch.params) + len(batch.tags) for batch in both)
        text = sum(batch.text for batch in both)
        return not self.entries or (count <= _MOST_METRICS and named <= _MOST_NAMED and text <= _MOST_TEXT)

    @property
    def text(self) -> int:
        """How many characters its parameters and tags have."""
        return sum(len(str(value)) for value in (*self.params.values(), *self.tags.values()))

    def add(self, more: _Batch) -> None:
        """Take what another has."""
        self.metrics += more.metrics
        self.params.update(more.params)
        self.tags.update(more.tags)
        self.entries += more.entries


class Shipper(Reader):
    """Ships journals of one study: MLflow as one of its readers.

    Args:
        tracking: the tracking server.
        links: what the study's database notes of runs.
        parent: returns the study's parent run, made if need be.
        delivered: is told the number of a trial whose checkpoint was kept until all of it had arrived, once it has.
    """

    name, title = MLFLOW, "MLflow"

    def __init__(
        self,
        tracking: Tracking,
        links: RunLinks,
        *,
        parent: Callable[[], str],
        delivered: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(links)
        self._tracking = tracking
        self._links = links
        self._parent = parent
        self._delivered = delivered
        self._known: dict[str, dict[int, float]] = {}  # of a journal with care: the epochs that its run has

    def ship(self, place: Place) -> bool:
        """Send the unsent records of a journal; return whether all of it has arrived, or its study was deleted."""
        try:
            return super().ship(place)
        except TrialGoneError:
            log.warning("%s: its study was deleted", place.journal.folder)
            return True

    def failure(self, error: Exception) -> Failure:
        """Return the meaning of an error raised by `ship`."""
        if isinstance(error, RefusedError):
            return Failure(str(error), passes=False)
        return Failure(
            describe_error(error),
            passes=is_away(error) or isinstance(error, StorageError),
            everything=unreachable(error),
            expected=isinstance(error, StorageError | OSError) or type(error).__module__.startswith("mlflow"),
        )

    def refused(self, place: Place) -> None:
        """Note at a trial that has ended what MLflow will not have of it."""
        trial = place.journal.head.trial
        if self._links.ended(trial) is not None:
            self._links.delivered(trial, f"refused: {place.position.refused}")

    @kill_point("send records")
    def tell(self, place: Place, entries: Sequence[Entry]) -> bool:
        """Send records, those that are logged in as few requests as possible."""
        batch = _Batch()
        for entry in entries:
            record = entry.record
            more = self._batch_of(place, entry, record) if isinstance(record, journal_records.Logged) else None
            if more is None or not batch.takes(more):
                self._send(place, batch)
                batch = _Batch()
            if more is not None:
                batch.add(more)
                continue
            self._deliver(place, record)
            place.moved([entry])
            if isinstance(record, journal_records.End | journal_records.Leave):
                return True
        self._send(place, batch)
        return False

    def end(self, place: Place, end: journal_records.End) -> None:
        """End the run of a trial whose process died before it recorded the end."""
        if end.outcome is Outcome.COMPLETE and not place.position.published:
            # For example an interrupted rebuild: only the checkpoint has the weights; the next `sync` uses it.
            place.position.problem = f"{PENDING}: the process that sent it died before all was written down"
        self._conclude(place, end)

    def leave(self, place: Place) -> None:
        """Forget the epochs of its run."""
        self._known.pop(place.journal.name, None)

    def _deliver(self, place: Place, record: journal_records.Record) -> None:
        """Bring a record that stands alone to MLflow."""
        match record:
            case journal_records.Open():
                self._open(place)
            case journal_records.Data():
                self._log_data(place, record)
            case journal_records.Files():
                self._upload_files(place)
            case journal_records.Model():
                self._make_model(place, record)
            case journal_records.Problem(text):
                self._tracking.log(self._run(place), tags={tag_names.TRACKING: text})
                place.position.problem = place.position.problem or text
            case journal_records.Published():
                place.position.published = True
            case journal_records.End():
                if not self.superseded(place):  # else it was given another go meanwhile
                    self._conclude(place, record)
            case journal_records.Leave():
                pass
            case _:
                raise ValueError(f"a record of a kind that this version does not know: {record}")

    # What is logged: it is gathered, and goes in few requests.

    def _batch_of(self, place: Place, entry: Entry, record: journal_records.Logged) -> _Batch:
        match record:
            case journal_records.Params(values):
                return _Batch(params=values, entries=[entry])
            case journal_records.Tags(values):
                return _Batch(tags=values, entries=[entry])
            case journal_records.Epoch() if self._has(place, record):
                return _Batch(entries=[entry])
            case _:
                return _Batch(epoch_metrics(record.step, record.at, record.values), entries=[entry])

    def _send(self, place: Place, batch: _Batch) -> None:
        """Send what was gathered."""
        if batch.metrics or batch.params or batch.tags:
            self._log(place, batch)
        if batch.entries:
            place.moved(batch.entries)

    @kill_point("log batch")
    def _log(self, place: Place, batch: _Batch) -> None:
        run = self._run(place)
        try:
            self._tracking.log(run, metrics=batch.metrics, params=batch.params, tags=batch.tags)
        except Exception as error:  # MLflow refuses by several types; what is away is raised again
            if is_away(error):
                raise
            # One thing in it is refused: the others must not be lost with it.
            parts: list[dict[str, Any]] = [{"metrics": batch.metrics}, {"params": batch.params}]
            parts += [{"tags": {key: value}} for key, value in batch.tags.items()]
            for part in parts:
                try:
                    self._tracking.log(run, **part)
                except Exception as refusal:  # as above
                    self._note_refusal(place, ", ".join(part), refusal)

    def _note_refusal(self, place: Place, what: str, error: Exception) -> None:
        """Note what MLflow will not have, in the `except` of what tried; raise again where it may have it later."""
        if is_away(error):
            raise error
        self._tracking.has_run(self._run(place))  # if it was deleted, that is all there is to say
        self._note(place, f"MLflow refuses {what}: {describe_error(error)}")

    def _note(self, place: Place, problem: str) -> None:
        log.warning("trial %d: %s", place.journal.head.number, problem)
        place.position.problem = place.position.problem or problem

    def _has(self, place: Place, record: journal_records.Epoch) -> bool:
        """Whether the run has this epoch from an earlier attempt, or from one whose journal did not say how far it was.

        A repetition with the same time changes nothing; an epoch that was trained again has another time, and would
        stand there twice.
        """
        key = place.journal.head.metric
        if not place.journal.head.resumed and place.journal.live:
            return False
        if place.journal.name not in self._known:
            history = self._tracking.client.get_metric_history(self._run(place), allowed_name(key))
            self._known[place.journal.name] = {point.step: point.value for point in history}
        value = self._known[place.journal.name].get(record.step)
        return value is not None and value == record.values.get(key)

    # The run.

    def _run(self, place: Place) -> str:
        """Return the run, which is found or made when it is first needed.

        Raises:
            RunDeletedError: somebody deleted it.
        """
        if place.position.run is None:
            place.position.run = self._find_or_make(place)
            place.position.creating = None  # the database has the run
            place.save()
        return place.position.run

    def _find_or_make(self, place: Place) -> str:
        head, parent = place.journal.head, self._parent()
        with self._links.locked(head.trial) as noted:
            run = noted.read(RUN_ID)
            if run is not None and not self._tracking.has_run(run):
                run = None
            if run is None and (head.resumed or not place.journal.live or place.position.creating):
                run = self._tracking.find_trial_run(head.study, head.number, parent=parent)
            if run is not None:
                self._tracking.reopen(run)
            else:
                place.position.creating = "run"
                place.save()
                run = self._tracking.create_trial_run(
                    head.study, head.number, parent=parent, tags=head.tags, began=head.began
                )
            noted.note({RUN_ID: run, RUN_URL: self._tracking.run_url(run)})
        return run

    # What stands alone in a journal.

    def _open(self, place: Place) -> None:
        known = place.position.run is not None
        run = self._run(place)
        if known or place.journal.head.resumed:
            self._tracking.log(run, tags=place.journal.head.tags)  # a new run was made with them

    def _log_data(self, place: Place, record: journal_records.Data) -> None:
        run = self._run(place)
        try:
            self._tracking.log_data(
                run, name=record.name, digest=record.digest, source=record.source, profile=record.profile
            )
        except Exception as error:  # what MLflow refuses of it must not keep the files from it
            self._note_refusal(place, "data", error)

    def _upload_files(self, place: Place) -> None:
        if not place.journal.files.is_dir():
            return
        run = self._run(place)
        self._upload(run, place.journal.files)
        with self._links.locked(place.journal.head.trial) as noted:
            noted.note_system(artifact_attrs(run, sorted(path.name for path in place.journal.files.iterdir())))

    @kill_point("upload files")
    def _upload(self, run: str, folder: Path) -> None:
        self._tracking.client.log_artifacts(run, str(folder))

    def _make_model(self, place: Place, record: journal_records.Model) -> None:
        make_model(self._tracking, self._links, place.journal.head.trial, self._run(place), record, place.journal.model)

    def _conclude(self, place: Place, end: journal_records.End) -> None:
        self._tracking.end_trial_run(self._run(place), end.outcome, end.reason, at=end.at)
        problem = place.position.problem
        if place.journal.lost:
            problem = problem or f"incomplete: {place.journal.lost} records found no room on the disk"
        self._links.delivered(place.journal.head.trial, problem)
        if end.kept and not (problem or "").startswith(PENDING):
            self._delivered(place.journal.head.number)
