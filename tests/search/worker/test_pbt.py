"""A population that workers train: members copy others, and the schedules can be trained again."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.trial import TrialState

from hpsearch import Trainer
from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.search.api.study import Study
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import _get_schedule
from hpsearch.search.samplers.suggest import derive_training_seed
from hpsearch.storage.attributes import CONFIG_SCHEDULE, PARENT_TRIAL
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.rungs.generations import read_generations
from hpsearch.storage.study_storage.storage import open_storage

# They share the MLflow run of a study `s`, so one pytest process runs them.
pytestmark = pytest.mark.xdist_group("several workers")

OBJECTIVE = """
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Objective, Splits, Standardize, TrainConfig


class Wine(Objective):
    metric, direction, epochs = "loss", "minimize", 4

    def suggest(self, trial):
        hidden = trial.suggest_int("hidden", 4, 8)
        dropout = trial.suggest_float("dropout", 0.1, 0.5)
        lr = trial.suggest_float("lr", 1e-7, 0.1, log=True)
        return TrainConfig(lr=lr, batch_size=16, schedule="constant", model={"hidden": hidden, "dropout": dropout})

    def data(self, seed):
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed)

    def model(self, config, train):
        hidden, dropout = config.model["hidden"], nn.Dropout(config.model["dropout"])
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, hidden), dropout, nn.Linear(hidden, 3))
"""


def test_a_population_is_trained_and_its_schedules_are_trained_again(
    database_url: str, stack: StackInfo, tmp_path: Path
) -> None:
    path = tmp_path / "wine.py"
    path.write_text(OBJECTIVE)
    study = Study.create(
        spec={"objective": str(path), "name": "s", "n_trials": 4, "pruner": {"name": "pbt", "interval": 2}},
        storage_url=database_url,
        tracking_uri=stack.tracking_uri,
        home=str(tmp_path / "home"),
    )
    assert study.spec.sampler.name == "random"
    assert study.spec.pruner.options == {"interval": 2, "quantile": 0.25, "parameters": ["dropout", "lr"]}
    study.run_worker()
    trials = study.trials
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert all(sorted(trial.intermediate_values) == [0, 1, 2, 3] for trial in trials)
    assert not [*(tmp_path / "home" / "checkpoints").rglob("*.pt")]
    storage = open_storage(database_url, application_name="test")
    decisions = read_generations(storage.engine, storage.get_study_id_from_name("s"))
    [copied] = [each for each in decisions if each.parent is not None]
    child, parent = trials[copied.number], trials[copied.parent or 0]
    schedule = child.user_attrs[CONFIG_SCHEDULE]
    assert [(part["epoch"], part["trial"]) for part in schedule] == [(0, parent.number), (2, child.number)]
    assert schedule[0]["params"] == parent.params
    assert schedule[1]["params"] == copied.after
    assert copied.before == child.params
    assert schedule[1]["params"]["hidden"] == parent.params["hidden"]
    lineage = [*list(parent.intermediate_values.values())[:2], *list(child.intermediate_values.values())[2:]]
    assert child.value == min(lineage)
    described = " ".join(study.describe_trial(child.number).split())
    assert "parameters at the start" in described
    assert "schedule epochs trained by " in described
    assert f" 1 to 2 trial {parent.number} " in described
    assert f" 3 to 4 trial {child.number} " in described
    report = study.report(tmp_path / "report.html").read_text()
    assert "<h2>Lineage</h2>" in report
    assert "1 copies" not in report
    with pytest.raises(SearchError, match="study 's' cannot be extended, because pruner pbt has a fixed population"):
        study.extend(n_trials="+1")
    study.train_finalists(top=4, seeds=1, workers=0)
    finalists = storage.get_all_trials(storage.get_study_id_from_name("s.finalists"))
    by_parent = {trial.user_attrs[PARENT_TRIAL]: trial for trial in finalists}
    assert by_parent[child.number].user_attrs[CONFIG_SCHEDULE] == schedule
    assert CONFIG_SCHEDULE not in by_parent[parent.number].user_attrs
    assert _get_schedule(child, 2) == {CONFIG_SCHEDULE: schedule[:1]}, "of a refit that ends before the change"
    objective = load_objective(str(path))
    objective.set_metric("loss", "minimize")
    config = objective.configure(FixedTrial(parent.params))
    seeds = {"seed": derive_training_seed(study.spec, parent.number), "split_seed": 0}
    again = Trainer(objective, config, epochs=4, **seeds).fit()  # type: ignore[arg-type]  # an Objective
    assert [record.metrics["val_loss"] for record in again.history] == list(parent.intermediate_values.values())
