"""The trackers of a worker: one journal and one reader per tracking service."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.search.console import counted
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.study import StoredStudy, outbox_folder, parent_of
from hpsearch.search.tracking.system_metrics import SystemMetrics
from hpsearch.storage.attributes import RUN_ID, RUN_URL, TRACKING_URI
from hpsearch.storage.database.locks import still_held, study_lock
from hpsearch.storage.journals import journal_records
from hpsearch.storage.journals.journal import Journal
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.journals.reader import Reader, TrialEnds
from hpsearch.storage.journals.sender import Sender
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.mlflow.shipper import Shipper
from hpsearch.storage.trackers.optional_tracker import OptionalTracker
from hpsearch.storage.trackers.tensorboard.reader import TensorBoard
from hpsearch.storage.trackers.wandb_runs.reader import WandbRuns
from hpsearch.storage.trials.claims import Claim, Lost, Retired
from hpsearch.storage.trials.settle import Outcome

TRACKERS: tuple[type[OptionalTracker], ...] = (TensorBoard, WandbRuns)  # in addition to MLflow


def check_readers(spec: StudySpec) -> None:
    """Check that this machine can send trials to every tracker of a study, before it is created or joined.

    Raises:
        StorageError: a package or a key is missing, or a folder cannot be written.
    """
    for tracker, setting in _optional_trackers(spec):
        tracker.check(setting)


def readers_of(study: StoredStudy, home: Path) -> list[Reader]:
    """Return the readers of a study in addition to MLflow; their files on this machine are in its `home`."""
    return [
        tracker(setting, study.spec.name, study.folder, home, TrialEnds(study.engine))
        for tracker, setting in _optional_trackers(study.spec)
    ]


def _optional_trackers(spec: StudySpec) -> list[tuple[type[OptionalTracker], str]]:
    """Return the trackers whose settings a study has, with the values of the settings."""
    settings = [(tracker, getattr(spec, tracker.name)) for tracker in TRACKERS]
    return [(tracker, setting) for tracker, setting in settings if setting is not None]


def open_parent_run(study: StoredStudy, tracking: Tracking) -> str:
    """Return the study's parent run, made if it is missing; all who ask at once get the same one.

    One that is there is found without the study's lock, which a frozen process may hold.

    Raises:
        StorageError: its run, or the experiment, was deleted; or somebody else is at it for long.
        MlflowException: the server does not answer, or refuses.
    """
    attrs = study.attrs
    known = attrs.get(RUN_ID)
    if known is not None and attrs.get(TRACKING_URI) == tracking.uri and tracking.has_run(known):
        if attrs.get(RUN_URL) != (url := tracking.run_url(known)):  # MLflow is shown under another address by now
            study.set_attr(RUN_URL, url)
        return str(known)
    return _ensure_parent_run(study, tracking)


def _ensure_parent_run(study: StoredStudy, tracking: Tracking) -> str:
    """Make the study's parent run under its lock, unless somebody else was faster.

    The runs of finalists are children of the run of the search that they are of.
    """
    spec = study.spec
    if spec.finalists_of is not None:
        parent = parent_of(study)
        run_id = open_parent_run(parent, tracking)
        for key in (RUN_ID, RUN_URL, TRACKING_URI):
            study.set_attr(key, parent.attrs[key])
        return run_id
    with study_lock(study.engine, study.study_id) as connection:
        run_id = tracking.study_run(
            spec.name,
            study.study_id,
            params=_parameters(spec.model_dump(exclude={"finalists_of"})),
            known=study.attrs.get(RUN_ID),
            may_create=lambda: still_held(connection),
        )
        still_held(connection)
        study.set_attr(RUN_ID, run_id)
        study.set_attr(RUN_URL, tracking.run_url(run_id))
        study.set_attr(TRACKING_URI, tracking.uri)
    return run_id


def _parameters(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec flat: ``sampler.n_startup_trials`` and so on."""
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            flat |= {key: value["name"]} if "name" in value else {}
            flat |= {f"{key}.{k}": v for k, v in value.items() if k != "name"}
        else:
            flat[key] = value
    return flat


_STARTING = 15.0  # seconds that a server may take to start


def pruning_tags(grounds: dict[str, object]) -> journal_records.Tags:
    """Return what notes on what grounds a trial was pruned: pruner, epoch (from 0), value, cut-off, peers, rung."""
    return journal_records.Tags({tag_names.PRUNING: json.dumps(grounds)})


class Tracker:
    """Logs the trials of one study, whether or not the tracking server answers, and other readers are there.

    Args:
        study: the study.
        tracking: its tracking server.
        checkpoints: of the study; those that were kept until a trial's model has arrived are removed then.
        home: where the outbox is.
        tags: for the run of every trial that this process trains.
        system_metrics: whether runs get the machine's load too.
        refused: whether to try again what a reader refused before.
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
        refused: bool = False,
    ) -> None:
        self._study = study
        self._tags = tags or {}
        parent = functools.cache(lambda: open_parent_run(study, tracking))
        mlflow = Shipper(tracking, RunLinks(study.engine), parent=parent, delivered=checkpoints.forget_trial)
        readers: list[Reader] = [mlflow, *readers_of(study, home)]
        self.outbox = Outbox(outbox_folder(home, study), [reader.name for reader in readers])
        self.sender = Sender(self.outbox, readers, refused=refused)
        self.system_metrics = SystemMetrics() if system_metrics else None

    def begin(self, trial: Claim | Lost | Retired, *, resumed: bool, suffix: str = "", **tags: str) -> Journal:
        """Begin the journal of an attempt, which is sent from now on.

        Args:
            trial: the trial and the attempt; the journals of later attempts have precedence.
            resumed: whether the trial may have a run already.
            suffix: the end of the journal's name.
            tags: of the trial's run.
        """
        spec = self._study.spec
        head = journal_records.Open(
            study=spec.name,
            trial=trial.trial_id,
            number=trial.number,
            attempt=trial.attempt,
            resumed=resumed,
            metric=f"val_{spec.metric}",
            began=int(time.time() * 1000),
            tags={tag_names.OBJECTIVE: spec.objective, tag_names.ATTEMPT: str(trial.attempt), **self._tags, **tags},
        )
        journal = self.outbox.open(f"{trial.number:04d}-{trial.attempt}{suffix}", head)
        self.sender.add(journal)
        return journal

    @kill_point("log retired trial")
    def settled(self, trial: Lost | Retired) -> None:
        """End the run of a trial that no worker runs: its workers died, or it waited at a rung and will not go on."""
        journal = self.begin(trial, resumed=True, suffix=f"-{type(trial).__name__.lower()}")
        if isinstance(trial, Retired) and trial.grounds:
            journal.append(pruning_tags(trial.grounds))
        outcome = Outcome.PRUNED if isinstance(trial, Retired) else Outcome.LOST
        journal.append(journal_records.End(outcome, trial.reason, int(time.time() * 1000), kept=False))
        self.sender.wake(at_once=True)

    def deliver(
        self,
        tell: Callable[[str], None],
        *,
        patience: float = math.inf,
        then: Callable[[], object] = lambda: None,
    ) -> int:
        """Ship what waits on this machine, and stop; return how many journals are left.

        What a living worker has is its own to ship, and is left too.

        Args:
            tell: is told how far it is.
            patience: seconds to go on for; a server that is away is waited for as if it were starting.
            then: called when all of it has arrived; it may begin journals, which are shipped too.
        """

        def told(sent: int, left: int) -> None:
            if sent or left:
                tell(f"telling {self.sender.titles} of {counted(sent + left, 'trial')}: {sent} done")

        self.sender.start()
        try:
            if not self.sender.flush(patience, told, starting=_STARTING):
                then()
                self.sender.flush(patience, told)
        finally:
            self.sender.close()
        return self.outbox.waiting()
