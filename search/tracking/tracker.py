"""The trackers of a worker: one journal and one reader per tracking service."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.search.console import counted
from hpsearch.search.errors import SearchError
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
from hpsearch.storage.tensorboard.reader import TensorBoard, check_folder
from hpsearch.storage.tensorboard.reader import is_installed as has_tensorboard
from hpsearch.storage.trials.claims import Lost, Retired
from hpsearch.storage.trials.settle import Outcome
from hpsearch.storage.wandb_runs.reader import WandbRuns, check_account
from hpsearch.storage.wandb_runs.reader import is_installed as has_wandb


def check_readers(spec: StudySpec) -> None:
    """Refuse a study whose readers cannot be told anything from here, before it is created or joined.

    Raises:
        SearchError: a package is missing.
        StorageError: a folder cannot be written, or a key is missing.
    """
    if spec.tensorboard is not None:
        if not has_tensorboard():
            raise SearchError(
                f"--tensorboard {spec.tensorboard}: the package tensorboard is not installed: {_install('tensorboard')}"
            )
        check_folder(Path(spec.tensorboard))
    if spec.wandb is not None:
        if not has_wandb():
            raise SearchError(f"--wandb {spec.wandb}: the package wandb is not installed: {_install('wandb')}")
        check_account(spec.wandb)


def readers_of(study: StoredStudy, home: Path) -> list[Reader]:
    """Return the readers of a study beside MLflow; what they keep on this machine is in its `home`."""
    spec, readers = study.spec, list[Reader]()
    if spec.tensorboard is not None:
        readers.append(TensorBoard(Path(spec.tensorboard), spec.name, study.folder, TrialEnds(study.engine)))
    if spec.wandb is not None:
        folder = home / "wandb" / study.folder
        readers.append(WandbRuns(spec.wandb, spec.name, study.folder, folder, TrialEnds(study.engine)))
    return readers


def _install(extra: str) -> str:
    return f"./hpsearch add {extra} (or: pip install 'hpsearch[{extra}]') on all machines"


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
        self._tracking = tracking
        self._tags = tags or {}
        self._parent: str | None = None
        self._making = threading.Lock()
        links = RunLinks(study.engine)
        mlflow = Shipper(tracking, links, parent=self.parent, delivered=checkpoints.forget_trial)
        readers: list[Reader] = [mlflow, *readers_of(study, home)]
        self.outbox = Outbox(outbox_folder(home, study), [reader.name for reader in readers])
        self.sender = Sender(self.outbox, readers, refused=refused)
        self.system_metrics = SystemMetrics() if system_metrics else None

    def parent(self) -> str:
        """Return the study's run, made if it is missing; all processes of all machines get the same one."""
        with self._making:
            if self._parent is None:
                self._parent = open_parent_run(self._study, self._tracking)
            return self._parent

    def begin(self, name: str, *, trial_id: int, number: int, attempt: int, resumed: bool, **tags: str) -> Journal:
        """Begin the journal of an attempt, which is shipped from now on.

        Args:
            name: the journal's.
            trial_id: the trial.
            number: its number.
            attempt: the attempt, which is ignored in favour of a later one.
            resumed: whether the trial may have a run already.
            tags: of its run.
        """
        spec = self._study.spec
        head = journal_records.Open(
            study=spec.name,
            trial=trial_id,
            number=number,
            attempt=attempt,
            resumed=resumed,
            metric=f"val_{spec.metric}",
            began=int(time.time() * 1000),
            tags={tag_names.OBJECTIVE: spec.objective, tag_names.ATTEMPT: str(attempt), **self._tags, **tags},
        )
        journal = self.outbox.open(name, head)
        self.sender.add(journal)
        return journal

    @kill_point("log retired trial")
    def settled(self, trial: Lost | Retired) -> None:
        """End the run of a trial that no worker runs: its workers died, or it waited at a rung and will not go on."""
        name = f"{trial.number:04d}-{trial.attempt}-{type(trial).__name__.lower()}"
        journal = self.begin(name, trial_id=trial.trial_id, number=trial.number, attempt=trial.attempt, resumed=True)
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
