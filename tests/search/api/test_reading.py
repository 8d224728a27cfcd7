"""The properties and tables of `Study`, without any training."""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch import (
    LengthGroupedSampler,
    ObjectiveError,
    SearchError,
    StorageError,
    Study,
    TrainConfig,
    Trainer,
    delete_study,
    fingerprint_files,
    list_studies,
    load_model,
    load_objective,
)
from hpsearch.objectives.builtin.digits import Digits
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.data.dataset import Stream
from hpsearch.search.api.actions import find_objective_reference
from hpsearch.search.fleet.fork_server import can_fork
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE, REASON
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import SPACE
from tests.search.finalists.support import params, search


def ended(number: int, state: TrialState, value: float, **attrs: object) -> FrozenTrial:
    values = {0: 0.5}
    return create_trial(
        state=state,
        value=value,
        params=params(number),
        distributions=SPACE,
        user_attrs=attrs,
        intermediate_values=values,
    )


@pytest.fixture
def stored(database_url: str) -> StoredStudy:
    trials = [
        ended(0, TrialState.COMPLETE, 0.8),
        ended(1, TrialState.COMPLETE, 0.9),
        ended(2, TrialState.PRUNED, 0.5, **{REASON: "the loss is nan", INFEASIBLE: True}),
    ]
    return search(open_storage(database_url, application_name="test"), "s", trials, budget=4)


@pytest.fixture
def study(stored: StoredStudy, database_url: str) -> Study:
    return Study.open("s", storage_url=database_url)


def test_a_study_is_opened_from_environment_variables(
    stored: StoredStudy, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    assert Study.open("s").spec == stored.spec
    with pytest.raises(SearchError, match="no study 't'; known: s"):
        Study.open("t")


def test_trials_returns_a_table(study: Study) -> None:
    frame = study.trials_dataframe()
    assert list(frame.columns) == [
        *("number", "state", "value", "params_kind", "params_lr", "epochs", "duration", "worker", "reason")
    ]
    assert frame["state"].tolist() == ["COMPLETE", "COMPLETE", "INFEASIBLE"]
    assert frame["reason"].tolist() == ["", "", "the loss is nan"]
    assert frame["params_lr"].tolist() == [trial.params["lr"] for trial in study.trials]


def test_returned_objects_are_copies(study: Study) -> None:
    study.trials[0].params.clear()
    assert study.trials[0].params


def test_the_best_trial_and_the_reason_of_another(study: Study) -> None:
    assert study.best_trial.number == study.optuna_study.best_trial.number == 1
    assert study.summary().infeasible == 1
    assert "trial 2 of study s: infeasible" in study.describe_trial(2)
    assert "the loss is nan" in study.describe_trial(2)
    with pytest.raises(SearchError, match="--trial 3: study 's' has no such trial"):
        study.describe_trial(3)


def test_list_studies_has_a_row_for_each_study(study: Study, database_url: str) -> None:
    study.stop()
    (row,) = list_studies(storage_url=database_url)
    assert (row.name, row.finished_trials, row.budget, row.best_value, row.best_number) == ("s", 3, 4, 0.9, 1)
    assert row.is_stopped
    assert row.promotions == ()


def test_a_study_has_a_notebook_view(study: Study) -> None:
    assert repr(study) == "Study('s')"
    assert "best: trial 1, val accuracy 0.9000" in study._repr_html_()


def test_changes_of_a_study_are_visible_at_once(study: Study) -> None:
    assert study.stop() is None
    assert study.stop() is not None
    assert study.start() is not None
    assert (study.extend("+2").new_budget, study.spec.n_trials) == (6, 6)
    with pytest.raises(SearchError, match="'s' has already started 3 trials"):
        study.extend(2)


def test_a_deleted_study_raises_an_error(study: Study, database_url: str) -> None:
    assert delete_study("s", storage_url=database_url) == ["s"]
    with pytest.raises(SearchError, match="no study 's'"):
        study.summary()


class Here(Objective):
    """A class in this test file, which workers can import."""


def test_the_reference_of_a_class_is_usable_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_objective_reference("wine.py") == "wine.py"
    assert find_objective_reference(Digits) == "digits"
    assert find_objective_reference(Here) == f"{__name__}:Here"
    with pytest.raises(SearchError, match=r"class Wine is defined in __main__.*%%writefile wine.py"):
        find_objective_reference(type("Wine", (Objective,), {"__module__": "__main__"}))


def test_an_objective_file_is_reloaded_after_a_change(folder: Path) -> None:
    path = folder / "wine.py"
    before = load_objective(str(path))
    path.write_text(path.read_text().replace("epochs = 20", "epochs = 7"))
    assert (before.epochs, load_objective(str(path)).epochs) == (20, 7)


def test_a_wrong_setting_is_an_error_before_services_start() -> None:
    with pytest.raises(SearchError, match="unknown sampler 'tpee'; did you mean 'tpe'"):
        Study.create("digits", sampler="tpee")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_trials": 0}, "n_trials must be at least 1, not 0"),
        ({"metric": ""}, "metric must have at least 1 character, not ''"),
        ({"warm_start": "a,a"}, "warm_start names a twice; remove one of them"),
        ({"n_trial": 5}, "create(n_trial=5): unknown argument; did you mean 'n_trials'?"),
        (
            {"checkpoints_url": "x"},
            "create(checkpoints_url='x'): unknown argument; did you mean 'checkpoint_url' or 'tracking_uri'?",
        ),
    ],
)
def test_errors_name_keywords(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SearchError) as error:
        Study.create("digits", **settings)
    assert str(error.value) == said


def test_an_invalid_objective_is_rejected() -> None:
    with pytest.raises(
        SearchError, match=r"^objective=42 is invalid; give a name such as 'digits' or 'wine.py', or a class$"
    ):
        Study.create(42)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(SearchError, match=r"^objective=<class 'int'> is invalid; give"):
        Study.create(int)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"worker": 2}, "run(worker=2): unknown argument; did you mean 'workers'?"),
        ({"workers": True}, "run(workers=True) is invalid; give a number from 0 to 512"),
        ({"workers": "x"}, "run(workers='x') is invalid; give a number from 0 to 512"),
        ({"workers": 10**6}, "run(workers=1000000) is invalid; give a number from 0 to 512"),
        ({"workers": 0, "lease": "x"}, "lease must be a valid number, not 'x'"),
    ],
)
def test_wrong_options_of_workers_are_rejected(study: Study, how: dict[str, Any], said: str) -> None:
    with pytest.raises(SearchError) as error:
        study.run(**how)
    assert str(error.value) == said


@pytest.mark.skipif(not can_fork(), reason="workers are new interpreters here, which such a process may start")
def test_a_daemonic_process_may_not_start_workers(study: Study) -> None:
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)

    def run() -> None:
        with pytest.raises(SearchError) as error:
            study.run(workers=1)
        sent.send(str(error.value))

    process = context.Process(target=run, daemon=True)
    process.start()
    process.join()
    assert received.recv().startswith("Study.run cannot start workers, because this process is daemonic; start the")


@pytest.mark.parametrize("executable", ["", None])
def test_an_embedded_interpreter_may_not_start_workers(
    study: Study, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(SearchError, match=r"cannot start workers, because sys\.executable is .*; set it to the path"):
        study.run(workers=1)


@pytest.mark.parametrize("given", [pd.DataFrame({"width": [16]}), 5, [5]], ids=["table", "number", "list"])
def test_configurations_of_another_type_are_rejected(study: Study, given: Any) -> None:
    remedy = r"give a dictionary, a list of dictionaries such as table\.to_dict\('records'\), or a file$"
    for enqueue in (study.enqueue_trial, lambda rows: Study.create("digits", name="new", enqueue=rows)):
        with pytest.raises(SearchError, match=rf"is not supported; {remedy}"):
            enqueue(given)


def test_a_parameter_name_that_is_no_text_is_rejected() -> None:
    with pytest.raises(SearchError, match=r"configuration 1: the parameter name 1 is not text; use names of the"):
        Study.create("digits", name="new", enqueue=[{1: 0.5}])  # type: ignore[dict-item]  # the mistake


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: load_objective(5), "objective 5 is not text; give a name such as 'digits' or 'wine.py'"),
        (lambda: TrainConfig.from_dict(None), "a configuration is a dictionary, not None"),
        (
            lambda: Trainer(Digits(), TrainConfig(), epochs="3", seed=0),
            "epochs must be an integer, not '3'",
        ),
        (
            lambda: Trainer(Digits(), TrainConfig(), epochs=1, seed=0, run_dir="/proc/x"),
            "run_dir '/proc/x' cannot be created: ",
        ),
        (lambda: Stream([], length="x"), "must be from 1 to 1,000,000,000, not 'x'"),
        (lambda: LengthGroupedSampler([1, 2], 0), "batch_size and pool must be at least 1, not 0 and 50"),
        (lambda: fingerprint_files(".", ""), "pattern '' is invalid"),
        (lambda: load_model(None), "None is not a model version; give NAME@ALIAS"),
        (lambda: list_studies(home=5), "--home 5 is not a path"),
        (lambda: list_studies(storage_url=5), "--storage-url 5 is not text"),
    ],
)
def test_a_value_of_another_type_is_an_error_of_one_line(call: Callable[[], object], words: str) -> None:
    with pytest.raises((SearchError, StorageError, ObjectiveError)) as raised:
        call()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_wrong_arguments_change_nothing(study: Study) -> None:
    with pytest.raises(SearchError, match=r"^spec=5 is invalid; give a dictionary of settings, or a file$"):
        Study.create("digits", spec=5)  # type: ignore[arg-type]  # the mistake
    for number in ("0", None, True, np.int64(99)):
        with pytest.raises(SearchError, match=rf"^--trial {re.escape(repr(number))}: study 's' has no such trial"):
            study.retry(number)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(SearchError, match=r"^promote\(trail=2\): unknown argument; did you mean 'trial'\?$"):
        study.promote(trail=2)  # type: ignore[call-arg]  # the mistake
    with pytest.raises(SearchError, match=r"^gc\(keep_top=-1\) is invalid; give a number such as keep_top=5$"):
        study.gc(-1, dry_run=False)
    for name in (5, "a\0"):
        for function in (Study.open, delete_study):
            with pytest.raises(SearchError, match="is not the name of a study; give a text, such as 'digits'"):
                function(name)  # type: ignore[operator]  # the mistake


def test_errors_about_budgets_name_the_keyword(study: Study) -> None:
    with pytest.raises(SearchError, match=r"^n_trials '5\+' is invalid; give \+N for N more trials"):
        study.extend("5+")


def test_a_study_in_a_new_home_is_unknown_and_starts_no_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    with pytest.raises(SearchError, match="no study 's'; the database has no studies yet"):
        Study.open("s")
    assert not (tmp_path / "home").exists()
