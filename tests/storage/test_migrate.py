from __future__ import annotations
import optuna
def test_plain_optuna_works_as_a_worker(database_url: str) -> None:
    study = optuna.create_study(study_name="s", storage=database_url)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    assert len(optuna.load_study(study_name="s", storage=database_url).trials) == 3
def test_b(database_url: str) -> None:
    assert optuna.get_all_study_names(database_url)==[]
def test_stack(stack):
    print(stack)
