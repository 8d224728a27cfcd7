"""Send journals to MLflow: find or create the run of the trial, and log each record once.

All requests are safe to repeat. MLflow stores metric points with the same (key, time, step, value) only once. A run or
model that another process, or a request whose reply was lost, may have created is looked up before it is created.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import PENDING, REFUSED, RUN_ID, RUN_URL
from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.consumer import Consumer, Failure, RunRejectedError
from hpsearch.storage.journals.journal import MLFLOW, Cursor, JournalEntry
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.artifacts import make_artifact_attrs
from hpsearch.storage.mlflow.client import Tracking, make_metrics, sanitize_name
from hpsearch.storage.mlflow.health import check_server, describe_error, is_retryable, is_unreachable
from hpsearch.storage.mlflow.model import ensure_model
from hpsearch.storage.mlflow.run_links import RunLinks, TrialDeletedError
from hpsearch.storage.trials.finishing import Outcome

if TYPE_CHECKING:
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

# MLflow's limits for one request: entities in total, parameters or tags, characters.
_MAX_ENTITIES, _MAX_PARAMS_OR_TAGS, _MAX_CHARACTERS = 1000, 100, 400_000


@dataclass
class _Batch:
    """The content of one request. The metrics of an epoch are always in one request, so that all or none are stored."""

    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    entries: list[JournalEntry] = field(default_factory=list)

    def has_room_for(self, other: _Batch) -> bool:
        """Return whether this batch and `other` fit in one request; an empty batch has room for any batch."""
        both = (self, other)
        params_or_tags = max(sum(len(batch.params) for batch in both), sum(len(batch.tags) for batch in both))
        entities = sum(len(batch.metrics) + len(batch.params) + len(batch.tags) for batch in both)
        characters = sum(batch.character_count for batch in both)
        return not self.entries or (
            entities <= _MAX_ENTITIES and params_or_tags <= _MAX_PARAMS_OR_TAGS and characters <= _MAX_CHARACTERS
        )

    @property
    def character_count(self) -> int:
        return sum(len(str(value)) for value in (*self.params.values(), *self.tags.values()))

    def add(self, other: _Batch) -> None:
        self.metrics += other.metrics
        self.params.update(other.params)
        self.tags.update(other.tags)
        self.entries += other.entries


class MlflowConsumer(Consumer):
    """Sends the journals of one study to MLflow.

    Args:
        tracking: the tracking server.
        links: the links from trials to runs in the study's database.
        get_parent_run: a function that returns the id of the study's parent run, and creates the run if necessary.
        on_delivered: a function that is called with the number of a trial after MLflow has received its whole journal;
            only for trials whose last checkpoint was kept until then.
    """

    name, title = MLFLOW, "MLflow"

    def __init__(
        self,
        tracking: Tracking,
        links: RunLinks,
        *,
        get_parent_run: Callable[[], str],
        on_delivered: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(links)
        self._tracking = tracking
        self._links = links
        self._get_parent_run = get_parent_run
        self._on_delivered = on_delivered
        self._stored_epochs: dict[str, dict[int, float]] = {}  # per journal: metric value of each epoch in its run

    def check_service(self) -> None:
        """Check that the server answers within seconds, while other requests wait longer for the answer."""
        check_server(self._tracking.uri)

    def consume(self, cursor: Cursor) -> bool:
        """Send the pending records of a journal; return whether the journal is finished.

        A journal is finished when MLflow has all of its records, or when its study was deleted.
        """
        try:
            return super().consume(cursor)
        except TrialDeletedError:
            log.warning("%s: unsent records dropped, because their study was deleted", cursor.journal.folder)
            return True

    def classify_error(self, error: Exception) -> Failure:
        """Return the classification of an error that `consume` raised."""
        if isinstance(error, RunRejectedError):
            return Failure(str(error), is_transient=False)
        return Failure(
            describe_error(error),
            is_transient=is_retryable(error) or isinstance(error, StorageError),
            is_service_down=is_unreachable(error),
            is_expected=isinstance(error, StorageError | OSError) or type(error).__module__.startswith("mlflow"),
        )

    def on_rejected(self, cursor: Cursor) -> None:
        """Record the rejection as an attribute of the trial, if the trial has ended."""
        trial = cursor.journal.header.trial
        if self._links.read_outcome(trial) is not None:
            self._links.record_delivery(trial, f"{REFUSED}: {cursor.position.rejection}")

    @kill_point("send records")
    def write_records(self, cursor: Cursor, entries: Sequence[JournalEntry]) -> bool:
        """Send records in as few requests as possible; return whether the last record ends the journal."""
        batch = _Batch()
        for entry in entries:
            record = entry.record
            single = self._make_batch(cursor, entry, record) if isinstance(record, journal_records.Batchable) else None
            if single is None or not batch.has_room_for(single):
                self._send_batch(cursor, batch)
                batch = _Batch()
            if single is not None:
                batch.add(single)
                continue
            self._send_record(cursor, record)
            cursor.commit([entry])
            if isinstance(record, journal_records.End | journal_records.Released):
                return True
        self._send_batch(cursor, batch)
        return False

    def write_outcome(self, cursor: Cursor, end: journal_records.End) -> None:
        """End the run of a trial whose process died before it recorded the outcome."""
        if end.outcome is Outcome.COMPLETE and not cursor.position.has_all_artifacts:
            # This happens, for example, in an interrupted rebuild. The next `sync` rebuilds from the checkpoint.
            cursor.position.problem = f"{PENDING}: its process died before it had sent everything"
        self._end_run(cursor, end)

    def release(self, cursor: Cursor) -> None:
        """Drop the cached epochs of the journal's run."""
        self._stored_epochs.pop(cursor.journal.name, None)

    def _send_record(self, cursor: Cursor, record: journal_records.Record) -> None:
        """Send a record that is not sent in a batch."""
        match record:
            case journal_records.Header():
                self._open_run(cursor)
            case journal_records.Dataset():
                self._log_dataset(cursor, record)
            case journal_records.Artifacts():
                self._upload_artifacts(cursor)
            case journal_records.Model():
                trial_id, folder = cursor.journal.header.trial, cursor.journal.model_folder
                ensure_model(self._tracking, self._links, trial_id, self._run_id(cursor), record, folder)
            case journal_records.Problem(text):
                self._tracking.log(self._run_id(cursor), tags={tag_names.TRACKING: text})
                cursor.position.problem = cursor.position.problem or text
            case journal_records.ArtifactsComplete():
                cursor.position.has_all_artifacts = True
            case journal_records.End():
                if not self.is_superseded(cursor):  # otherwise the trial was retried in the meantime
                    self._end_run(cursor, record)
            case journal_records.Released():
                pass
            case _:
                raise ValueError(f"journal record {record} is unknown to this version of hpsearch; update hpsearch")

    # Records that are sent in batches.

    def _make_batch(self, cursor: Cursor, entry: JournalEntry, record: journal_records.Batchable) -> _Batch:
        match record:
            case journal_records.Params(values):
                return _Batch(params=values, entries=[entry])
            case journal_records.Tags(values):
                return _Batch(tags=values, entries=[entry])
            case journal_records.Epoch() if self._has_epoch(cursor, record):
                return _Batch(entries=[entry])
            case _:
                return _Batch(make_metrics(record.step, record.at, record.values), entries=[entry])

    def _send_batch(self, cursor: Cursor, batch: _Batch) -> None:
        if batch.metrics or batch.params or batch.tags:
            self._log(cursor, batch)
        if batch.entries:
            cursor.commit(batch.entries)

    @kill_point("log batch")
    def _log(self, cursor: Cursor, batch: _Batch) -> None:
        run_id = self._run_id(cursor)
        try:
            self._tracking.log(run_id, metrics=batch.metrics, params=batch.params, tags=batch.tags)
        except Exception as error:  # MLflow's client rejects requests with several types of errors
            if is_retryable(error):
                raise
            # MLflow rejects the whole batch because of one invalid value; the other values must not be lost.
            parts: list[dict[str, Any]] = [{"metrics": batch.metrics}, {"params": batch.params}]
            parts += [{"tags": {key: value}} for key, value in batch.tags.items()]
            for part in parts:
                try:
                    self._tracking.log(run_id, **part)
                except Exception as rejection:  # as above
                    self._record_rejection(cursor, ", ".join(part), rejection)

    def _record_rejection(self, cursor: Cursor, rejected: str, error: Exception) -> None:
        """Record that MLflow rejected a part of the run; raise `error` instead if a retry may succeed."""
        if is_retryable(error):
            raise error
        self._tracking.has_run(self._run_id(cursor))  # raises RunDeletedError if the deletion of the run is the cause
        problem = f"MLflow rejected {rejected}: {describe_error(error)}"
        log.warning("trial %d: %s", cursor.journal.header.number, problem)
        cursor.position.problem = cursor.position.problem or problem

    def _has_epoch(self, cursor: Cursor, record: journal_records.Epoch) -> bool:
        """Return whether the run already contains this epoch, with the same value.

        An earlier attempt may have sent the epoch, or this attempt before a crash. If an epoch was trained again, its
        metrics have a new time, so MLflow would store them twice.
        """
        key = cursor.journal.header.metric
        if not cursor.journal.header.resumed and cursor.journal.is_live:
            return False
        if cursor.journal.name not in self._stored_epochs:
            history = self._tracking.client.get_metric_history(self._run_id(cursor), sanitize_name(key))
            self._stored_epochs[cursor.journal.name] = {point.step: point.value for point in history}
        value = self._stored_epochs[cursor.journal.name].get(record.step)
        return value is not None and value == record.values.get(key)

    # The run.

    def _run_id(self, cursor: Cursor) -> str:
        """Return the id of the run, which is found or created at the first call.

        Raises:
            RunDeletedError: a user deleted the run.
        """
        if cursor.position.run_id is None:
            cursor.position.run_id = self._find_or_create_run(cursor)
            cursor.position.pending_creation = None  # the database has the run
            cursor.save()
        return cursor.position.run_id

    def _find_or_create_run(self, cursor: Cursor) -> str:
        header, parent = cursor.journal.header, self._get_parent_run()
        with self._links.lock_run(header.trial) as links:
            run_id = links.read_attr(RUN_ID)
            if run_id is not None and not self._tracking.has_run(run_id):
                run_id = None
            if run_id is None and (header.resumed or not cursor.journal.is_live or cursor.position.pending_creation):
                run_id = self._tracking.find_trial_run(header.study, header.number, parent=parent)
            if run_id is not None:
                self._tracking.reopen_run(run_id)
            else:
                cursor.position.pending_creation = "run"
                cursor.save()
                run_id = self._tracking.create_trial_run(
                    header.study, header.number, parent=parent, tags=header.tags, start_ms=header.began
                )
            links.set_attrs({RUN_ID: run_id, RUN_URL: self._tracking.run_url(run_id)})
        return run_id

    # Records that are sent one by one.

    def _open_run(self, cursor: Cursor) -> None:
        is_known = cursor.position.run_id is not None
        run_id = self._run_id(cursor)
        if is_known or cursor.journal.header.resumed:
            self._tracking.log(run_id, tags=cursor.journal.header.tags)  # a new run already has these tags

    def _log_dataset(self, cursor: Cursor, record: journal_records.Dataset) -> None:
        run_id = self._run_id(cursor)
        try:
            self._tracking.log_dataset(run_id, **vars(record))
        except Exception as error:  # a rejected dataset must not prevent the upload of the artifacts
            self._record_rejection(cursor, "data", error)

    def _upload_artifacts(self, cursor: Cursor) -> None:
        folder = cursor.journal.artifact_folder
        if not folder.is_dir():
            return
        run_id = self._run_id(cursor)
        self._upload(run_id, folder)
        with self._links.lock_run(cursor.journal.header.trial) as links:
            links.set_system_attrs(make_artifact_attrs(run_id, sorted(path.name for path in folder.iterdir())))

    @kill_point("upload files")
    def _upload(self, run_id: str, folder: Path) -> None:
        self._tracking.client.log_artifacts(run_id, str(folder))

    def _end_run(self, cursor: Cursor, end: journal_records.End) -> None:
        self._tracking.end_trial_run(self._run_id(cursor), end.outcome, end.reason, end_ms=end.at)
        problem = cursor.position.problem
        if cursor.journal.lost_records:
            problem = problem or f"incomplete: {cursor.journal.lost_records} records lost because the disk was full"
        self._links.record_delivery(cursor.journal.header.trial, problem)
        if end.is_checkpoint_kept and not (problem or "").startswith(PENDING):
            self._on_delivered(cursor.journal.header.number)
