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
from storage.mlflow import exported_model
from storage.mlflow.artifacts import artifact_attrs
from storage.mlflow.client import MODEL_ID, State, Tracking, allowed_name, epoch_metrics
from storage.mlflow.health import is_away, one_line
from storage.mlflow.outbox import Entry, Journal
from storage.mlflow.run_links import Ended, RunBook, TrialGoneError

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
    text: int = 0

    def takes(self, metrics: int, named: int, text: int) -> bool:
        most_named = max(len(self.params), len(self.tags)) + named <= _MOST_NAMED
        count = len(self.metrics) + len(self.params) + len(self.tags) + metrics + named
        return not self.entries or (count <= _MOST_METRICS and most_named and self.text + text <= _MOST_TEXT)


class NotYetError(Exception):
    """Whether anybody needs this journal is known when its trial has ended."""


class Shipper:
    """Ships journals of one study.

    Args:
        tracking: the tracking server.
        book: what the study's database notes of runs.
        parent: returns the study's parent run, made if need be.
        delivered: is told the number of a trial whose checkpoint was kept until all of it had arrived, once it has.
    """

    def __init__(
        self,
        tracking: Tracking,
        book: RunBook,
        *,
        parent: Callable[[], str],
        delivered: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._tracking = tracking
        self._book = book
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
        if self._book.ended(journal.head["trial"]) is not None:
            self._book.delivered(journal.head["trial"], f"refused: {journal.position.refused}")

    def _superseded(self, journal: Journal) -> bool:
        return self._book.superseded(journal.head["trial"], journal.head["attempt"])

    def _outlived(self, journal: Journal) -> bool:
        """Whether a later attempt has reported all of the trial again, so that this one's journal has nothing to add.

        Raises:
            NotYetError: a later attempt is at it, and may yet die before it does.
        """
        if not self._superseded(journal):
            return False
        ended = self._book.ended(journal.head["trial"])
        if ended is None:
            raise NotYetError
        return ended.state != "FAIL"

    def _ship(self, journal: Journal, entries: list[Entry]) -> bool:
        batch = _Batch()
        for entry in entries:
            record = entry.record
            if record["kind"] in _LOGGED:
                self._add(journal, batch, entry)
                continue
            batch = self._send(journal, batch)
            getattr(self, f"_{record['kind']}")(journal, record)
            journal.moved([entry])
            if record["kind"] in {"end", "leave"}:
                return True
        self._send(journal, batch)
        return False

    # What is logged: it is gathered, and goes in few requests.

    def _add(self, journal: Journal, batch: _Batch, entry: Entry) -> None:
        record = entry.record
        values: dict[str, Any] = record["values"]
        if record["kind"] == "epoch" and self._has(journal, record):
            values = {}
        is_metric = record["kind"] in {"epoch", "metrics"}
        metrics, named = (len(values), 0) if is_metric else (0, len(values))
        text = 0 if is_metric else sum(len(str(value)) for value in values.values())
        if not batch.takes(metrics, named, text):
            self._send(journal, batch)
        if is_metric:
            batch.metrics += epoch_metrics(record["step"], record["at"], values)
        else:
            target: dict[str, Any] = batch.params if record["kind"] == "params" else batch.tags
            target.update(values)
        batch.text += text
        batch.entries.append(entry)

    def _send(self, journal: Journal, batch: _Batch) -> _Batch:
        """Send what was gathered, and empty it."""
        if batch.entries:
            if batch.metrics or batch.params or batch.tags:
                self._log(journal, batch)
            journal.moved(batch.entries)
        batch.metrics, batch.params, batch.tags, batch.entries, batch.text = [], {}, {}, [], 0
        return batch

    def _log(self, journal: Journal, batch: _Batch) -> None:
        run = self._run(journal)
        try:
            self._tracking.log(run, metrics=batch.metrics, params=batch.params, tags=batch.tags)
        except Exception as error:  # MLflow refuses by several types; what is away is raised again
            if is_away(error):
                raise
            self._tracking.has_run(run)  # if it was deleted, that is all there is to say
            # One thing in it is refused: the others must not be lost with it.
            parts: list[dict[str, Any]] = [{"metrics": batch.metrics}, {"params": batch.params}]
            parts += [{"tags": {key: value}} for key, value in batch.tags.items()]
            for part in parts:
                try:
                    self._tracking.log(run, **part)
                except Exception as refusal:  # as above
                    if is_away(refusal):
                        raise
                    self._note(journal, f"MLflow refuses {', '.join(part)}: {one_line(refusal)}")

    def _note(self, journal: Journal, problem: str) -> None:
        log.warning("trial %d: %s", journal.head["number"], problem)
        journal.position.problem = journal.position.problem or problem

    def _has(self, journal: Journal, record: dict[str, Any]) -> bool:
        """Whether the run has this epoch from an earlier attempt, or from one whose journal did not say how far it was.

        A repetition with the same time changes nothing; an epoch that was trained again has another time, and would
        stand there twice.
        """
        key = journal.head["metric"]
        if not journal.head["resumed"] and journal.live:
            return False
        if journal.name not in self._known:
            history = self._tracking.client.get_metric_history(self._run(journal), allowed_name(key))
            self._known[journal.name] = {point.step: point.value for point in history}
        value = self._known[journal.name].get(record["step"])
        return value is not None and value == record["values"].get(key)

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
        with self._book.opening(head["trial"]) as page:
            run = page.read(RUN_ID)
            if run is not None and not self._tracking.has_run(run):
                run = None
            if run is None and (head["resumed"] or not journal.live or journal.position.creating):
                run = self._tracking.find_trial_run(head["study"], head["number"], parent=parent)
            if run is not None:
                self._tracking.reopen(run)
            else:
                self._creating(journal, "run")
                run = self._tracking.create_trial_run(
                    head["study"], head["number"], parent=parent, tags=head["tags"], began=head.get("began")
                )
            page.note({RUN_ID: run, RUN_URL: self._tracking.run_url(run)})
        self._creating(journal, None)  # it is noted for good: until then the next try looks for it first
        return run

    def _creating(self, journal: Journal, what: str | None) -> None:
        if journal.position.creating != what:
            journal.position.creating = what
            journal.moved([])

    # What stands alone in a journal.

    def _open(self, journal: Journal, _record: dict[str, Any]) -> None:
        known = journal.position.run is not None
        run = self._run(journal)
        if known or journal.head["resumed"]:
            self._tracking.log(run, tags=journal.head["tags"])  # a new run was made with them

    def _data(self, journal: Journal, record: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tags = [InputTag("mlflow.data.context", "training")]
        dataset = Dataset(record["name"], record["digest"], "code", record["source"], profile=record["profile"])
        self._tracking.client.log_inputs(self._run(journal), [DatasetInput(dataset, tags)])

    def _files(self, journal: Journal, _record: dict[str, Any]) -> None:
        if not journal.files.is_dir():
            return
        run = self._run(journal)
        self._tracking.client.log_artifacts(run, str(journal.files))
        with self._book.opening(journal.head["trial"]) as page:
            page.note_system(artifact_attrs(run, sorted(path.name for path in journal.files.iterdir())))

    def _model(self, journal: Journal, record: dict[str, Any]) -> None:
        client, experiment, run = self._tracking.client, self._tracking.experiment_id, self._run(journal)
        with self._book.opening(journal.head["trial"]) as page:
            model = page.read(MODEL)
            if model is None and (journal.head["resumed"] or not journal.live or journal.position.creating):
                model = exported_model.find_model(client, experiment, run)
            if model is None:
                self._creating(journal, "model")
                params = {key: str(value) for key, value in record["params"].items()}
                name, tags = record["name"], record["tags"]
                model = exported_model.create_model(client, experiment, run, name=name, params=params, tags=tags)
            exported_model.link_model(client, model, run, step=record["step"])
            page.note({MODEL: model})
        self._creating(journal, None)
        # The points are in the run already: sent again with the model's id they are linked to it.
        linked = epoch_metrics(record["step"], record["at"], record["metrics"], model)
        self._tracking.log(run, metrics=linked, tags={MODEL_ID: model})
        exported_model.upload_model(client, model, run, journal.model)

    def _problem(self, journal: Journal, record: dict[str, Any]) -> None:
        self._tracking.log(self._run(journal), tags={"hpsearch.tracking": record["text"]})
        journal.position.problem = journal.position.problem or record["text"]

    def _published(self, journal: Journal, _record: dict[str, Any]) -> None:
        """All that the trial made stands before this."""
        journal.position.published = True

    def _leave(self, journal: Journal, _record: dict[str, Any]) -> None:
        """The trial was given back: the run stays open for its next attempt."""

    def _end(self, journal: Journal, record: dict[str, Any]) -> None:
        if not self._superseded(journal):
            self._conclude(journal, record)  # else it was given another go meanwhile

    def _conclude(self, journal: Journal, record: dict[str, Any]) -> None:
        head = journal.head
        self._tracking.end_trial_run(self._run(journal), record["state"], record["reason"], at=record["at"])
        problem = journal.position.problem
        if journal.lost:
            problem = problem or f"incomplete: {journal.lost} records found no room on the disk"
        self._book.delivered(head["trial"], problem)
        if record["kept"] and not (problem or "").startswith(PENDING):
            self._delivered(head["number"])

    def _end_for(self, journal: Journal) -> None:
        """End the run of a trial that was settled by a process that died before it wrote so in the journal."""
        if (ended := self._book.ended(journal.head["trial"])) is not None:
            at = int(journal.path.stat().st_mtime * 1000)
            if ended.state == "COMPLETE" and not journal.position.published:
                # Such as a remake that was interrupted: its checkpoint is all there is, and the next `sync` takes it.
                journal.position.problem = f"{PENDING}: the process that sent it died before all was written down"
            kept = ended.state != "FAIL"  # the checkpoints of a failed trial stay: it may be tried again
            self._conclude(journal, {"state": state_of(ended), "reason": ended.reason, "at": at, "kept": kept})


_LOGGED = {"params", "epoch", "metrics", "tags"}


def state_of(ended: Ended) -> State:
    """Return how a trial ended in the words of its run."""
    states: dict[str, State] = {"COMPLETE": "COMPLETE", "PRUNED": "PRUNED", "FAIL": "FAIL"}
    return "INFEASIBLE" if ended.infeasible else states[ended.state]
