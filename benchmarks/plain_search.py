"""The worker of a search as tutorials write it, for bench_search.py: Optuna's RDBStorage and MLflow's fluent API.

It uses hpsearch's training loop, so that only the code around the training differs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pytorch
import optuna
import torch

from benchmarks.laps import FOLDER, REST, Laps
from hpsearch import EpochRecord, Trainer, Verdict
from hpsearch.objectives.builtin.digits import Digits
from hpsearch.objectives.training.reproducibility.checkpoint import promotable
from hpsearch.objectives.training.session import MidEpochAction
from hpsearch.search.samplers.suggest import derive_seed


class PlainSession:
    """A session that reports to Optuna and MLflow after each epoch, and keeps the best weights in a file."""

    run_dir = shards = curve = None

    def __init__(self, trial: optuna.Trial, best: Path) -> None:
        self.trial, self.best = trial, best

    def restore(self) -> None:
        return None

    def save(self, state: dict[str, Any], *, best: bool) -> None:
        if best:
            torch.save(promotable(state), self.best)

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        return MidEpochAction.NONE

    def save_mid_epoch(self, state: dict[str, Any]) -> None:
        """Do nothing: mid-epoch checkpoints are never requested."""

    def report(self, record: EpochRecord) -> Verdict:
        mlflow.log_metrics(record.metrics, step=record.epoch)
        self.trial.report(record.metrics["val_accuracy"], record.epoch)
        return Verdict.PRUNE if self.trial.should_prune() else Verdict.CONTINUE

    def log(self, path: Path) -> None:
        pass


def run_trial(trial: optuna.Trial, epochs: int, requirements: list[str] | None) -> float:
    """Run one trial. Without `requirements`, MLflow infers them by loading the model in a separate process."""
    config = Digits().configure(trial)
    with mlflow.start_run(run_name=f"trial-{trial.number}", nested=True), tempfile.TemporaryDirectory() as folder:
        mlflow.log_params(trial.params)
        best = Path(folder) / "best.pt"
        result = Trainer(
            Digits(),
            config,
            epochs=epochs,
            seed=derive_seed(0, "trial", trial.number),
            split_seed=0,
            session=PlainSession(trial, best),
        ).fit()
        if result.status == "pruned":
            raise optuna.TrialPruned
        mlflow.log_metric("best_val_accuracy", result.best_value)
        mlflow.log_artifact(str(best))
        mlflow.pytorch.log_model(
            result.model, name="model", input_example=result.example.x.numpy(), pip_requirements=requirements
        )
    return result.best_value


def watch() -> Laps:
    """Time the calls of Optuna and MLflow, and the training."""
    laps = Laps()
    for name in ("start_run", "log_params", "log_metric", "log_metrics", "log_artifact"):
        laps.watch(mlflow, name, "tracking")
    laps.watch(mlflow.ActiveRun, "__exit__", "tracking")
    laps.watch(mlflow.pytorch, "log_model", "tracking")
    laps.watch(Digits, "configure", "suggesting")
    laps.watch(optuna.Study, "optimize", "study database")
    laps.watch(optuna.Trial, "report", "study database")
    laps.watch(optuna.Trial, "should_prune", "pruner")
    laps.watch(PlainSession, "save", "checkpoints")
    for name, label in (
        ("_build", "building the run"),
        ("_epoch", "training"),
        ("_finish", "judging the best weights"),
    ):
        laps.watch(Trainer, name, label)
    return laps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tracking", "study", "parent"):
        parser.add_argument(name)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--requirements", nargs="+")
    given = parser.parse_args()
    mlflow.set_tracking_uri(given.tracking)
    mlflow.set_experiment(given.study)
    study = optuna.load_study(
        study_name=given.study,
        storage=os.environ["BENCH_STORAGE"],
        sampler=optuna.samplers.TPESampler(seed=given.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
    )
    laps = watch()
    laps.write_at_exit(os.environ[FOLDER])

    def objective(trial: optuna.Trial) -> float:
        with laps(REST):
            return run_trial(trial, given.epochs, given.requirements)

    laps.begin()
    with mlflow.start_run(run_id=given.parent):
        study.optimize(objective, n_trials=given.trials)


if __name__ == "__main__":
    main()
