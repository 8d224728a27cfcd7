"""The tracking of a study's trials: workers write journals, and consumers send these to the tracking services."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.search.console import pluralize
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.folders import get_outbox_folder
from hpsearch.search.study.study import StoredStudy, load_parent_study
from hpsearch.search.tracking.system_metrics import SystemMetrics
from hpsearch.storage.attributes import RUN_ID, RUN_URL, TRACKING_URI
from hpsearch.storage.database.locks import check_lock_held, study_lock
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.consumer import Consumer, TrialOutcomes
from hpsearch.storage.journals.journal import Journal
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.journals.sender import Sender
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking, check_mlflow_variables
from hpsearch.storage.mlflow.consumer import MlflowConsumer
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.rungs.rungs import PrunedTrial
from hpsearch.storage.trackers import OptionalTracker
from hpsearch.storage.trackers.tensorboard.consumer import TensorBoardConsumer
from hpsearch.storage.trackers.wandb_runs.consumer import WandbConsumer
from hpsearch.storage.trials.claim_results import Claim, RetriesExhausted
from hpsearch.storage.trials.finishing import Outcome

OPTIONAL_TRACKERS: tuple[type[OptionalTracker], ...] = (TensorBoardConsumer, WandbConsumer)  # in addition to MLflow


def check_trackers(spec: StudySpec) -> None:
    """Check, before a study is created or joined, that this machine can send records to each of its trackers.

    Raises:
        StorageError: a package or a key is missing, a folder cannot be written, or a variable of MLflow is invalid.
    """
    check_mlflow_variables()
    for tracker, setting in _list_optional_trackers(spec):
        tracker.check(setting)


def make_optional_trackers(study: StoredStudy, home: Path) -> list[Consumer]:
    """Return the consumers that send a study's journals to trackers other than MLflow. Their files are in `home`."""
    return [
        tracker(setting, study.spec.name, study.folder, home, TrialOutcomes(study.engine))
        for tracker, setting in _list_optional_trackers(study.spec)
    ]


def _list_optional_trackers(spec: StudySpec) -> list[tuple[type[OptionalTracker], str]]:
    """Return the optional trackers that a study uses, each with the value of its setting."""
    settings = [(tracker, getattr(spec, tracker.name)) for tracker in OPTIONAL_TRACKERS]
    return [(tracker, setting) for tracker, setting in settings if setting is not None]


def open_parent_run(study: StoredStudy, tracking: Tracking) -> str:
    """Return the id of the study's parent run; create the run if it is missing. Concurrent calls return the same run.

    Finding an existing run does not need the study's lock, because a frozen process may hold the lock.

    Raises:
        StorageError: the run or the experiment was deleted, or another process holds the lock for too long.
        MlflowException: the server does not answer, or rejects the request.
    """
    attrs = study.attrs
    run_id = attrs.get(RUN_ID)
    if run_id is not None and attrs.get(TRACKING_URI) == tracking.uri and tracking.has_run(run_id):
        if attrs.get(RUN_URL) != (url := tracking.run_url(run_id)):  # the address of MLflow's UI has changed
            study.set_attr(RUN_URL, url)
        return str(run_id)
    return _ensure_parent_run(study, tracking)


def _ensure_parent_run(study: StoredStudy, tracking: Tracking) -> str:
    """Find or create the study's parent run while holding the study's lock, and return the run's id.

    A finalist or refit study uses the parent run of its search.
    """
    spec = study.spec
    if spec.finalists_of is not None:
        parent = load_parent_study(study)
        run_id = open_parent_run(parent, tracking)
        for key in (RUN_ID, RUN_URL, TRACKING_URI):
            study.set_attr(key, parent.attrs[key])
        return run_id
    with study_lock(study.engine, study.study_id) as connection:
        run_id = tracking.ensure_study_run(
            spec.name,
            study.study_id,
            params=_flatten(spec.model_dump(exclude={"finalists_of"})),
            known_run_id=study.attrs.get(RUN_ID),
            before_create=lambda: check_lock_held(connection),
        )
        check_lock_held(connection)
        study.set_attr(RUN_ID, run_id)
        study.set_attr(RUN_URL, tracking.run_url(run_id))
        study.set_attr(TRACKING_URI, tracking.uri)
    return run_id


def _flatten(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec as a dictionary with flat keys, such as ``sampler.n_startup_trials``."""
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            flat |= {key: value["name"]} if "name" in value else {}
            flat |= {f"{key}.{k}": v for k, v in value.items() if k != "name"}
        else:
            flat[key] = value
    return flat


_STARTUP_SECONDS = 15.0  # maximum time in which a server starts


def make_pruning_tags(decision: dict[str, object]) -> journal_records.Tags:
    """Return the run tags for a pruning decision: pruner, epoch (from 0), value, cutoff, peers, rung."""
    return journal_records.Tags({tag_names.PRUNING: json.dumps(decision)})


class Tracker:
    """Writer of the journals of a study's trials, and sender of these journals to all trackers.

    Args:
        study: the study.
        tracking: client of the study's tracking server.
        checkpoints: checkpoints of the study. The last checkpoint of a trial is removed when MLflow has the trial's
            model.
        home: home folder, which contains the outbox.
        tags: tags for the run of every trial that this process trains.
        system_metrics: whether to log the system metrics of this machine.
        should_retry_rejected: whether to retry journals that a consumer rejected earlier.
    """

    def __init__(
        self,
        study: StoredStudy,
        tracking: Tracking,
        checkpoints: StudyCheckpoints,
        home: Path,
        *,
        tags: dict[str, str] | None = None,
        system_metrics: bool = False,
        should_retry_rejected: bool = False,
    ) -> None:
        self._study = study
        self._tags = tags or {}
        parent = functools.cache(lambda: open_parent_run(study, tracking))
        links = RunLinks(study.engine)
        mlflow = MlflowConsumer(tracking, links, get_parent_run=parent, on_delivered=checkpoints.delete_trial)
        consumers: list[Consumer] = [mlflow, *make_optional_trackers(study, home)]
        self.outbox = Outbox(get_outbox_folder(home, study), [consumer.name for consumer in consumers])
        self.sender = Sender(self.outbox, consumers, should_retry_rejected=should_retry_rejected)
        self.system_metrics = SystemMetrics() if system_metrics else None

    def open_journal(
        self, trial: Claim | RetriesExhausted | PrunedTrial, *, resumed: bool, suffix: str = "", **tags: str
    ) -> Journal:
        """Open the journal of an attempt, and start sending its records.

        Args:
            trial: the trial and the attempt. Records of a later attempt have precedence.
            resumed: whether the trial may already have an MLflow run.
            suffix: suffix of the journal's name.
            tags: further tags of the trial's run.
        """
        spec = self._study.spec
        header = journal_records.Header(
            study=spec.name,
            trial=trial.trial_id,
            number=trial.number,
            attempt=trial.attempt,
            resumed=resumed,
            metric=f"val_{spec.metric}",
            began=int(time.time() * 1000),
            tags={tag_names.OBJECTIVE: spec.objective, tag_names.ATTEMPT: str(trial.attempt), **self._tags, **tags},
        )
        journal = self.outbox.open(f"{trial.number:04d}-{trial.attempt}{suffix}", header)
        self.sender.add(journal)
        return journal

    @kill_point("log retired trial")
    def end_run_without_worker(self, trial: RetriesExhausted | PrunedTrial) -> None:
        """End the run of a trial without a worker: its workers died, or it was pruned while it waited."""
        suffix = "-retired" if isinstance(trial, PrunedTrial) else "-lost"
        journal = self.open_journal(trial, resumed=True, suffix=suffix)
        if isinstance(trial, PrunedTrial) and trial.decision:
            journal.append(make_pruning_tags(trial.decision))
        outcome = Outcome.PRUNED if isinstance(trial, PrunedTrial) else Outcome.LOST
        journal.append(journal_records.End(outcome, trial.reason, int(time.time() * 1000), is_checkpoint_kept=False))
        self.sender.wake(is_urgent=True)

    def flush(
        self,
        on_progress: Callable[[str], None],
        *,
        timeout_seconds: float = math.inf,
        then: Callable[[], object] = lambda: None,
    ) -> int:
        """Send the pending journals on this machine, stop the sender, and return the number of unsent trials.

        Trials of running workers count as unsent; these workers send their own journals.

        Args:
            on_progress: function that is called with a line of text about the progress.
            timeout_seconds: maximum time to wait, including the time in which a server starts.
            then: function that is called when all journals are sent. The journals that `then` creates are sent too.
        """

        def print_progress(sent: int, left: int) -> None:
            if sent or left:
                on_progress(f"sending {pluralize(sent + left, 'trial')} to {self.sender.consumer_titles}: {sent} done")

        self.sender.start()
        try:
            if not self.sender.flush(timeout_seconds, print_progress, startup_seconds=_STARTUP_SECONDS):
                then()
                self.sender.flush(timeout_seconds, print_progress)
        finally:
            self.sender.close()
        return len(self.outbox.find_trial_numbers())
