"""What all attempts of a worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optuna

from hpsearch.objectives.base import BaseObjective
from hpsearch.search.pruning import StudyPruner
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.tracker import Tracker
from hpsearch.search.worker.leaving import Leaving
from hpsearch.search.worker.pulse import Pulse
from hpsearch.storage.rungs.rungs import Rungs
from hpsearch.storage.study_storage import PostgresStorage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.lease import LeaseKeeper


@dataclass(frozen=True)
class WorkerContext:
    """What all attempts of a worker share.

    Attributes:
        study: the study.
        sampled: the same, opened by Optuna for its sampler.
        objective: what is trained.
        claims: the worker's way to trials.
        lease: renews the lease of the trial that runs.
        pruner: decides on pruning.
        rungs: at which trials wait; None where they do not.
        tracker: takes what goes to MLflow.
        checkpoints: of the study.
        runs_dir: folder of the study's run directories on this machine.
        stopping: whether the worker was told to stop.
        leaving: until when it may stay then.
        pulse: beats while the worker gets on.
        save_every: seconds after which an epoch is saved in its midst; None for never.
        device: to train on; a GPU where there is one, unless given.
    """

    study: StoredStudy
    sampled: optuna.Study
    objective: BaseObjective
    claims: Claims
    lease: LeaseKeeper
    pruner: StudyPruner
    rungs: Rungs | None
    tracker: Tracker
    checkpoints: StudyCheckpoints
    runs_dir: Path
    stopping: Callable[[], bool]
    leaving: Leaving
    pulse: Pulse
    save_every: float | None
    device: str | None

    @property
    def spec(self) -> StudySpec:
        """The study's spec."""
        return self.study.spec

    @property
    def storage(self) -> PostgresStorage:
        """The study's storage."""
        return self.study.storage
