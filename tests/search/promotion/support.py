"""A study whose trials have runs and models on a real MLflow server, without any training."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import mlflow
import optuna
from optuna.trial import TrialState, create_trial

from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import REASON, RUN_ID, SPEC
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.records.promotions import Promotion, read_promotions
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import spec_of


@dataclass(frozen=True)
class Tracked:
    """The study, the MLflow server, and a unique name for a registered model."""

    stored: StoredStudy
    tracking: Tracking
    name: str

    @property
    def storage(self) -> PostgresStorage:
        return self.stored.storage

    @property
    def client(self) -> mlflow.MlflowClient:
        return self.tracking.client

    def run_of(self, trial: int) -> str:
        return str(self.stored.trials()[trial].user_attrs[RUN_ID])

    def model_of(self, trial: int) -> str:
        return str(self.client.get_run(self.run_of(trial)).data.tags["hpsearch.model_id"])

    def promotions(self) -> list[Promotion]:
        return read_promotions(self.storage.engine, self.stored.study_id)

    def promotion_rows(self) -> list[tuple[int, str, int, str, str, bool]]:
        """Return for each promotion: trial, model, version, alias, author, whether it is current."""
        return [
            (p.trial_number, p.model_name, p.version, p.alias, p.promoted_by, p.ended_at is None)
            for p in self.promotions()
        ]

    def version(self, alias: str, model: str | None = None) -> mlflow.entities.model_registry.ModelVersion:
        return self.client.get_model_version_by_alias(model or self.name, alias)


@dataclass(frozen=True)
class Left:
    """The runs of a search on the MLflow server: the parent run, and one for each trial."""

    values: list[float | None]
    parent: str
    runs: list[str]


def leave(tracking: Tracking, files: Path, *, values: list[float | None]) -> Left:
    """Create the runs of a search and the models of its trials; a trial with value None has no model."""
    name = f"s-{secrets.token_hex(4)}"
    parent = tracking.ensure_study_run(name, 1, params={}, known_run_id=None)
    runs = [tracking.create_trial_run(name, number, parent=parent, tags={}) for number in range(len(values))]
    for number, (run, value) in enumerate(zip(runs, values, strict=True)):
        if value is not None:
            _leave(tracking, run, f"{name}-{number}", files)
    return Left(values, parent, runs)


def track(storage: PostgresStorage, tracking: Tracking, left: Left) -> Tracked:
    """Create a study with these runs: COMPLETE trials, and a PRUNED one for each None."""
    name = f"s-{secrets.token_hex(4)}"
    study = optuna.create_study(study_name=name, direction="maximize", storage=storage)
    spec = {**spec_of(name="median").model_dump(), "name": name, "n_trials": len(left.values)}
    storage.set_study_user_attr(study._study_id, SPEC, spec)
    storage.set_study_user_attr(study._study_id, RUN_ID, left.parent)
    for value, run in zip(left.values, left.runs, strict=True):
        attrs = {RUN_ID: run, REASON: "best accuracy" if value is not None else "median pruner at epoch 2"}
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        values = {} if value is None else {"value": value}
        study.add_trial(create_trial(state=state, user_attrs=attrs, **values))
    return Tracked(load_study(storage, name), tracking, name)


def unregister(tracking: Tracking, left: Left) -> None:
    """Remove the registered models of these runs, which would be promotions of the next study with these runs."""
    runs = ", ".join(f"'{run}'" for run in left.runs)
    for name in {version.name for version in tracking.client.search_model_versions(f"run_id IN ({runs})")}:
        tracking.client.delete_registered_model(name)


def _leave(tracking: Tracking, run_id: str, name: str, files: Path) -> None:
    """Log the artifacts of a trial: its configuration, a checkpoint and a model, with dummy content."""
    client = tracking.client
    config = files / "config.yaml"
    config.write_text("config: {lr: 0.1}\nseed: 7\nsplit_hash: abc\nenvironment: {git_sha: '123', git_dirty: true}\n")
    client.log_artifact(run_id, str(config))
    weights = files / "best.pt"
    weights.write_bytes(b"w" * 1000)
    client.log_artifact(run_id, str(weights), "checkpoints")
    model = client.create_logged_model(tracking.experiment_id, name=name, source_run_id=run_id)
    client.log_model_artifact(model.model_id, str(weights), "data")
    client.finalize_logged_model(model.model_id, "READY")
    client.set_tag(run_id, "hpsearch.model_id", model.model_id)


def train_finalists(tracked: Tracked, trials: list[int], *, winner: int) -> None:
    """Create the study of two finalists, trained on two seeds."""
    study_id = tracked.stored.study_id
    of = {"study": tracked.name, "study_id": study_id, "top": 2, "trials": trials, "seeds": [11, 12]}
    held = optuna.create_study(study_name=f"{tracked.name}-f", direction="maximize", storage=tracked.storage)
    spec = {**tracked.stored.spec.model_dump(), "name": held.study_name, "n_trials": 4, "finalists_of": of}
    tracked.storage.set_study_user_attr(held._study_id, SPEC, spec)
    for seed in range(2):
        for trial in trials:
            held.add_trial(create_trial(value=(0.82 if trial == winner else 0.72) + 0.02 * seed))
