"""The digits objective for bench_search.py, whose import times the parts of the worker."""

from __future__ import annotations

import os

from laps import FOLDER, Laps

import hpsearch.search.worker.attempt
import hpsearch.search.worker.lifecycle
import hpsearch.search.worker.loop
from hpsearch.objectives.builtin.digits import Digits as _Digits
from hpsearch.objectives.training.reports.run_dir import RunDir
from hpsearch.objectives.training.trainer import Trainer
from hpsearch.search.pruners.study_pruner import StudyPruner
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.tracking.trial_run import TrialTracking
from hpsearch.search.worker.checkpoints import TrialCheckpoints
from hpsearch.search.worker.trial_session import TrialSession
from hpsearch.storage.journals.sender import Sender
from hpsearch.storage.mlflow import model_export
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claims import Claims


class Digits(_Digits):
    name = "digits"


def watch() -> Laps:
    """Time the parts of `hpsearch worker`; time under no label is the worker's own code."""
    laps = Laps()
    for owner, name, label in (
        (RunDir, "finish", "plots and report"),
        (StudyPruner, "__call__", "pruner"),
        (TrialSession, "save", "checkpoints"),
        (Trainer, "build", "building the run"),
        (Trainer, "run_epoch", "training"),
        (Trainer, "_finish", "judging the best weights"),
        (Sender, "flush", "waiting for MLflow at the end"),
        (model_export, "export_model", "exporting the model"),
        (hpsearch.search.worker.attempt, "suggest", "suggesting"),
        (hpsearch.search.worker.loop.Worker, "_wait", "waiting for others"),
        (hpsearch.search.worker.lifecycle, "publish_result", "closing the study"),
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
    work = hpsearch.search.worker.loop.Worker.run_trials

    def begin(worker: hpsearch.search.worker.loop.Worker) -> int:
        laps.begin()
        return work(worker)

    hpsearch.search.worker.loop.Worker.run_trials = begin
    return laps


if folder := os.environ.get(FOLDER):
    watch().write_at_exit(folder)
