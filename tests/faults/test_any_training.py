"""A killed worker changes no bit of any training: the recipes with search, kills, finalists and test set."""

from __future__ import annotations

import optuna
import pytest
import torch
from optuna.trial import TrialState

from hpsearch import LoopObjective, load_objective
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.search.finalists import read_finalists
from hpsearch.search.samplers.suggest import derive_training_seed
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.history import read_attempts
from tests.docs.recipes import RECIPES, name_in
from tests.faults.harness import Arena
from tests.faults.orders import Order, write

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("trainings")]

NAME, TRIALS, EPOCHS = "any", 6, 4

# Another recipe is a harder case of these.
LIKE_OTHERS = (
    *("Regression", "Imbalanced binary classification", "Images from a folder"),
    *("Fine-tuning: freeze and unfreeze layers", "Existing training script"),
)

_IMAGES = RECIPES["Images from a folder"]
CASES = {
    **{title: RECIPES[title] for title in RECIPES if title not in LIKE_OTHERS},
    "2,000 images, two processes": _IMAGES.replace("range(120)", "range(2000)").replace("workers=1", "workers=2"),
}

# The others use the same code paths, so only soak tests run them.
OFTEN = ("Variable-length sequences",)


@pytest.mark.parametrize(
    "title", [title if title in OFTEN else pytest.param(title, marks=pytest.mark.soak) for title in CASES]
)
def test_a_killed_worker_changes_no_bit(arena: Arena, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.name = NAME
    arena.home.mkdir()
    arena.home.chmod(0o755)
    monkeypatch.setenv("HPSEARCH_HOME", str(arena.home))
    path = arena.folder / "recipe.py"
    path.write_text(CASES[title])
    reference = f"{path}:{name_in(CASES[title])}"
    write(
        arena.orders,
        [Order("report", "kill", trial=1, nth=2), Order("save checkpoint", "kill", trial=4, nth=3, when="after")],
    )
    few = ("--trials", str(TRIALS), "--epochs", str(EPOCHS), "--retries", "2", "--workers", "0")
    arena.run("run", reference, "--name", NAME, "--sampler", "random", "--pruner", "median",
              "--pruner-option", "n_startup_trials=2", "--pruner-option", "n_warmup_steps=1", *few)  # fmt: skip
    arena.work(2)
    storage = open_storage(arena.storage_url, application_name="test")
    try:
        study = load_study(storage, NAME)
        assert arena.has_obeyed(0), "a worker died in mid-trial"
        assert_as_undisturbed(study, reference)
        assert_confirmed(arena, study, reference)
    finally:
        storage.engine.dispose()


def assert_as_undisturbed(study: StoredStudy, reference: str) -> None:
    """Assert that each trial has the values of a run without faults, up to the epoch where it was pruned."""
    objective = load_objective(reference)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for trial in study.trials():
            assert trial.state in {TrialState.COMPLETE, TrialState.PRUNED}, trial.user_attrs
            config = objective.configure(optuna.trial.FixedTrial(trial.params))
            seed = derive_training_seed(study.spec, trial.number)
            alone = fit(objective, config, RunPlan(EPOCHS, seed, study.spec.seed), device="cpu")
            expected = {r.epoch: r.metrics[f"val_{objective.metric}"] for r in alone.history}
            assert trial.intermediate_values.items() <= expected.items(), trial.number
    finally:
        torch.set_num_threads(threads)
    assert len(study.trials()) == TRIALS
    trial_id = study.trials()[1]._trial_id
    attempts = read_attempts(study.engine, [trial_id])[trial_id]
    assert [attempt.outcome for attempt in attempts][:1] == ["lost"]


def assert_confirmed(arena: Arena, study: StoredStudy, reference: str) -> None:
    """Train the finalists and open the test set, or check the error of one line."""
    write(arena.orders, [])
    arena.run("finalists", NAME, "--top", "1", "--seeds", "1", "--workers", "0")
    arena.name = f"{NAME}.finalists"
    arena.work(1)
    found = read_finalists(study)
    assert found is not None
    assert found.winner == found.rows[0].trial
    objective = load_objective(reference)
    if isinstance(objective, LoopObjective) and not objective.defines("test"):
        said = arena.run("evaluate-test", NAME, "--yes", code=2)
        assert "is a function without test();" in said or "has no test(); define test()" in said
    else:
        assert f"test {objective.metric} " in arena.run("evaluate-test", NAME, "--yes")
