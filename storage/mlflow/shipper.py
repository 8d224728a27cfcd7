"""From a journal to MLflow: the trial's run is found or made, and what the journal holds is brought there once.

Everything is safe to repeat. A point of a metric is stored once by its (key, time, step, value); a run or a model is
looked for before it is created wherever another process, or a reply that was lost, may have made it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from storage.attributes import MODEL, PENDING, RUN_ID, RUN_URL
from storage.mlflow import exported_model, journal_records
from storage.mlflow.artifacts import artifact_attrs
from storage.mlflow.client import Tracking, allowed_name, epoch_metrics
from storage.mlflow.health import is_away, one_line
from storage.mlflow.model_of_run import create_model, fill_model
from storage.mlflow.outbox import Entry, Journal
from storage.mlflow.run_links import RunLinks, TrialGoneError
from storage.trials.outcome import Outcome

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


class NotYetError(Exception):
    """Whether anybody needs this journal is known when its trial has ended."""


class Shipper:
    """Ships journals of one study.

    Args:
        tracking: the tracking server.
        links: what the study's database notes of runs.
        parent: returns the study's parent run, made if need be.
        delivered: is told the number of a trial whose checkpoint was kept until all of it had arrived, once it has.
    """

    def __init__(
        self,
        tracking: Tracking,
        links: RunLinks,
        *,
        parent: Callable[[], str],
        delivered: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._tracking = tracking
        self._links = links
        self._parent = parent
        self._delivered = delivered
        self._known: dict[str, dict[int, float]] = {}  # of a journal with care: the epochs that its run has

    def ship(self, journal: Journal) -> bool:
        """Ship what is there; return whether the journal is over, and can be removed.

        Raises:
            NotYetError: it may never be needed; let go of it, and look again later.
            Exception: something is away (see `storage.mlflow.health.is_away`, or the database), or the server will
                never have the rest.
        """
        entries = journal.unsent()
        try:
            if not journal.live and self._outlived(journal):
                return True
            over = self._ship(journal, entries)
        except TrialGoneError:
            log.warning("%s: its study was deleted", journal.folder)
            return True
        finally:
            journal.returned()
        if not journal.live and (not over or self._superseded(journal)):
            self._end_for(journal)  # its process died before it could say how it ended
            over = True
        return over

    def refused(self, journal: Journal) -> None:
        """Note at a trial that has ended what MLflow will not have of it."""
        if self._links.ended(journal.head.trial) is not None:
            self._links.delivered(journal.head.trial, f"refused: {journal.position.refused}")

    def _superseded(self, journal: Journal) -> bool:
        return self._links.superseded(journal.head.trial, journal.head.attempt)

    def _outlived(self, journal: Journal) -> bool:
        """Whether a later attempt has reported all of the trial again, so that this one's journal has nothing to add.

        Raises:
            NotYetError: a later attempt is at it, and may yet die before it does.
        """
        if not self._superseded(journal):
            return False
        ended = self._links.ended(journal.head.trial)
        if ended is None:
            raise NotYetError
        return ended.outcome is not Outcome.FAILED

    def _ship(self, journal: Journal, entries: list[Entry]) -> bool:
        batch = _Batch()
        for entry in entries:
            record = entry.record
            more = self._batch_of(journal, entry, record) if isinstance(record, journal_records.Logged) else None
            if more is None or not batch.takes(more):
                self._send(journal, batch)
                batch = _Batch()
            if more is not None:
                batch.add(more)
                continue
            self._deliver(journal, record)
            journal.moved([entry])
            if isinstance(record, journal_records.End | journal_records.Leave):
                return True
        self._send(journal, batch)
        return False

    def _deliver(self, journal: Journal, record: journal_records.Record) -> None:
        """Bring a record that stands alone to MLflow."""
        match record:
            case journal_records.Open():
                self._open(journal)
            case journal_records.Data():
                self._log_data(journal, record)
            case journal_records.Files():
                self._upload_files(journal)
            case journal_records.Model():
                self._make_model(journal, record)
            case journal_records.Problem(text):
                self._tracking.log(self._run(journal), tags={"hpsearch.tracking": text})
                journal.position.problem = journal.position.problem or text
            case journal_records.Published():
                journal.position.published = True
            case journal_records.End():
                if not self._superseded(journal):  # else it was given another go meanwhile
                    self._conclude(journal, record)
            case journal_records.Leave():
                pass
            case _:
                raise ValueError(f"a record of a kind that this version does not know: {record}")

    # What is logged: it is gathered, and goes in few requests.

    def _batch_of(self, journal: Journal, entry: Entry, record: journal_records.Logged) -> _Batch:
        match record:
            case journal_records.Params(values):
                return _Batch(params=values, entries=[entry])
            case journal_records.Tags(values):
                return _Batch(tags=values, entries=[entry])
            case journal_records.Epoch() if self._has(journal, record):
                return _Batch(entries=[entry])
            case _:
                return _Batch(epoch_metrics(record.step, record.at, record.values), entries=[entry])

    def _send(self, journal: Journal, batch: _Batch) -> None:
        """Send what was gathered."""
        if batch.metrics or batch.params or batch.tags:
            self._log(journal, batch)
        if batch.entries:
            journal.moved(batch.entries)

    def _log(self, journal: Journal, batch: _Batch) -> None:
        run = self._run(journal)
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
                    self._note_refusal(journal, ", ".join(part), refusal)

    def _note_refusal(self, journal: Journal, what: str, error: Exception) -> None:
        """Note what MLflow will not have, in the `except` of what tried; raise again where it may have it later."""
        if is_away(error):
            raise error
        self._tracking.has_run(self._run(journal))  # if it was deleted, that is all there is to say
        self._note(journal, f"MLflow refuses {what}: {one_line(error)}")

    def _note(self, journal: Journal, problem: str) -> None:
        log.warning("trial %d: %s", journal.head.number, problem)
        journal.position.problem = journal.position.problem or problem

    def _has(self, journal: Journal, record: journal_records.Epoch) -> bool:
        """Whether the run has this epoch from an earlier attempt, or from one whose journal did not say how far it was.

        A repetition with the same time changes nothing; an epoch that was trained again has another time, and would
        stand there twice.
        """
        key = journal.head.metric
        if not journal.head.resumed and journal.live:
            return False
        if journal.name not in self._known:
            history = self._tracking.client.get_metric_history(self._run(journal), allowed_name(key))
            self._known[journal.name] = {point.step: point.value for point in history}
        value = self._known[journal.name].get(record.step)
        return value is not None and value == record.values.get(key)

    # The run.

    def _run(self, journal: Journal) -> str:
        """Return the run, which is found or made when it is first needed.

        Raises:
            RunDeletedError: somebody deleted it.
        """
        if journal.position.run is None:
            journal.position.run = self._find_or_make(journal)
            journal.moved([])
        return journal.position.run

    def _find_or_make(self, journal: Journal) -> str:
        head, parent = journal.head, self._parent()
        with self._links.locked(head.trial) as noted:
            run = noted.read(RUN_ID)
            if run is not None and not self._tracking.has_run(run):
                run = None
            if run is None and (head.resumed or not journal.live or journal.position.creating):
                run = self._tracking.find_trial_run(head.study, head.number, parent=parent)
            if run is not None:
                self._tracking.reopen(run)
            else:
                self._creating(journal, "run")
                run = self._tracking.create_trial_run(
                    head.study, head.number, parent=parent, tags=head.tags, began=head.began
                )
            noted.note({RUN_ID: run, RUN_URL: self._tracking.run_url(run)})
        self._creating(journal, None)  # it is noted for good: until then the next try looks for it first
        return run

    def _creating(self, journal: Journal, what: str | None) -> None:
        if journal.position.creating != what:
            journal.position.creating = what
            journal.moved([])

    # What stands alone in a journal.

    def _open(self, journal: Journal) -> None:
        known = journal.position.run is not None
        run = self._run(journal)
        if known or journal.head.resumed:
            self._tracking.log(run, tags=journal.head.tags)  # a new run was made with them

    def _log_data(self, journal: Journal, record: journal_records.Data) -> None:
        run = self._run(journal)
        try:
            self._tracking.log_data(
                run, name=record.name, digest=record.digest, source=record.source, profile=record.profile
            )
        except Exception as error:  # what MLflow refuses of it must not keep the files from it
            self._note_refusal(journal, "data", error)

    def _upload_files(self, journal: Journal) -> None:
        if not journal.files.is_dir():
            return
        run = self._run(journal)
        self._tracking.client.log_artifacts(run, str(journal.files))
        with self._links.locked(journal.head.trial) as noted:
            noted.note_system(artifact_attrs(run, sorted(path.name for path in journal.files.iterdir())))

    def _make_model(self, journal: Journal, record: journal_records.Model) -> None:
        client, experiment, run = self._tracking.client, self._tracking.experiment_id, self._run(journal)
        with self._links.locked(journal.head.trial) as noted:
            model = noted.read(MODEL)
            if model is None and (journal.head.resumed or not journal.live or journal.position.creating):
                model = exported_model.find_model(client, experiment, run)
            if model is None:
                self._creating(journal, "model")
                model = create_model(self._tracking, run, record)
            exported_model.link_model(client, model, run, step=record.step)
            noted.note({MODEL: model})
        self._creating(journal, None)
        fill_model(self._tracking, model, run, record, journal.model)

    def _conclude(self, journal: Journal, end: journal_records.End) -> None:
        self._tracking.end_trial_run(self._run(journal), end.outcome, end.reason, at=end.at)
        problem = journal.position.problem
        if journal.lost:
            problem = problem or f"incomplete: {journal.lost} records found no room on the disk"
        self._links.delivered(journal.head.trial, problem)
        if end.kept and not (problem or "").startswith(PENDING):
            self._delivered(journal.head.number)

    def _end_for(self, journal: Journal) -> None:
        """End the run of a trial that was settled by a process that died before it wrote so in the journal."""
        if (ended := self._links.ended(journal.head.trial)) is not None:
            at = int(journal.path.stat().st_mtime * 1000)
            if ended.outcome is Outcome.COMPLETE and not journal.position.published:
                # Such as a remake that was interrupted: its checkpoint is all there is, and the next `sync` takes it.
                journal.position.problem = f"{PENDING}: the process that sent it died before all was written down"
            kept = ended.outcome is not Outcome.FAILED  # the checkpoints of a failed trial stay: it may be tried again
            self._conclude(journal, journal_records.End(ended.outcome, ended.reason, at, kept))
