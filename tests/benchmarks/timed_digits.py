"""The digits objective, and where the worker that loads it spends its time, for bench_search.py."""

from __future__ import annotations

import os

from laps import FOLDER, Laps

import search.worker.attempt
import search.worker.join
import search.worker.loop
from objectives.digits import Digits as _Digits
from objectives.training.reports.run_dir import RunDir
from objectives.training.trainer import Trainer
from search.pruning import StudyPruner
from search.study.checkpoints import StudyCheckpoints
from search.tracking.trial_run import TrialTracking
from search.worker.checkpoints import TrialCheckpoints
from search.worker.session import TrialSession
from storage.journals.sender import Sender
from storage.mlflow import exported_model
from storage.study_storage import PostgresStorage
from storage.trials.claims import Claims


class Digits(_Digits):
    name = "digits"


def watched() -> Laps:
    """Watch what `hpsearch worker` does; whatever stands under no other label is the worker's own code."""
    laps = Laps()
    for owner, name, label in (
        (RunDir, "finish", "plots and report"),
        (StudyPruner, "__call__", "pruner"),
        (TrialSession, "save", "checkpoints"),
        (Trainer, "_build", "building the run"),
        (Trainer, "_epoch", "training"),
        (Trainer, "_finish", "judging the best weights"),
        (Sender, "flush", "waiting for MLflow at the end"),
        (exported_model, "export_model", "exporting the model"),
        (search.worker.attempt, "suggest", "suggesting"),
        (search.worker.loop.Worker, "_wait", "waiting for others"),
        (search.worker.join, "close_if_spent", "closing the study"),
    ):
        laps.watch(owner, name, label)
    for owner, label in (
        (Claims, "study database"),
        (PostgresStorage, "study database"),
        (TrialTracking, "tracking"),
        (Sender, "tracking"),
        (TrialCheckpoints, "checkpoints"),
        (StudyCheckpoints, "checkpoints"),
        (RunDir, "run files"),
    ):
        laps.watch_all(owner, label)
    work = search.worker.loop.Worker.work

    def begin(worker: search.worker.loop.Worker) -> int:
        laps.begin()
        return work(worker)

    search.worker.loop.Worker.work = begin
    return laps


if folder := os.environ.get(FOLDER):
    watched().write_at_exit(folder)
