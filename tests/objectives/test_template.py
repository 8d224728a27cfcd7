import optuna
import pytest

from hpsearch import ObjectiveError, Trainer, load_objective
from hpsearch.objectives.template import write_template


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my_objective.py", "wine-2.py", "2.py", "objective.py", "with space.py", "class.py"])
def test_the_template_of_init_runs_unchanged(tmp_path, name):
    path = tmp_path / name
    write_template(path)
    text = path.read_text()
    assert len(text.splitlines()) <= 50
    assert f"`hpsearch run {name}`" in text
    objective = load_objective(str(path))
    trial = optuna.create_study().ask()
    config = objective.configure(trial)
    assert set(trial.params) == {"lr", "weight_decay", "batch_size", "width"}
    result = Trainer(objective, config, epochs=2, seed=0).fit()
    assert 0 <= result.best_value <= 1


@pytest.mark.slow
def test_a_short_search_with_the_template_finds_a_good_model(tmp_path):
    write_template(tmp_path / "a.py")
    objective = load_objective(str(tmp_path / "a.py"))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), direction=objective.direction)

    def run(trial):
        return Trainer(objective, objective.configure(trial), epochs=objective.epochs, seed=0).fit().best_value

    study.optimize(run, n_trials=8)
    assert study.best_value > 0.95


def test_init_does_not_overwrite_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text("precious")
    with pytest.raises(ObjectiveError, match=r"^mine.py already exists; choose another file name$"):
        write_template(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "message"), [("mine.txt", "must end in .py"), ("nowhere/mine.py", "cannot be written: No such file")]
)
def test_init_rejects_an_unusable_path(tmp_path, name, message):
    with pytest.raises(ObjectiveError, match=message):
        write_template(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
