"""The digits objective, and where the worker that loads it spends its time, for bench_search.py."""

from __future__ import annotations

import os

from laps import FOLDER, Laps

import search.join
import search.worker
from objectives.digits import Digits as _Digits
from objectives.training.run_dir import RunDir
from objectives.training.trainer import Trainer
from search.checkpointing import TrialCheckpoints
from search.pruning import Judge
from search.session import TrialSession
from search.study_checkpoints import StudyCheckpoints
from search.trial_tracking import TrialTracking
from storage import models
from storage.claims import Claims
from storage.sender import Sender
from storage.study_storage import PostgresStorage


class Digits(_Digits):
    name = "digits"


def watched() -> Laps:
    """Watch what `hpsearch worker` does; whatever stands under no other label is the worker's own code."""
    laps = Laps()
    for owner, name, label in (
        (RunDir, "finish", "plots and report"),
        (Judge, "__call__", "pruner"),
        (TrialSession, "save", "checkpoints"),
        (Trainer, "_build", "building the run"),
        (Trainer, "_epoch", "training"),
        (Trainer, "_finish", "judging the best weights"),
        (Sender, "flush", "waiting for MLflow at the end"),
        (models, "export_model", "exporting the model"),
        (search.worker, "suggest", "suggesting"),
        (search.worker.Worker, "_wait", "waiting for others"),
        (search.join, "close_if_spent", "closing the study"),
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
    work = search.worker.Worker.work

    def begin(worker: search.worker.Worker) -> int:
        laps.begin()
        return work(worker)

    search.worker.Worker.work = begin
    return laps


if folder := os.environ.get(FOLDER):
    watched().write_at_exit(folder)
