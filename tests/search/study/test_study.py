"""A stored study: warnings about its code, devices and checkpoints, and the trials that MLflow lacks."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from hpsearch import load_objective, source_hash
from hpsearch.objectives.template import write_template
from hpsearch.search.console import PlainConsole
from hpsearch.search.errors import SearchError
from hpsearch.search.run import fleet
from hpsearch.search.study.checkpoints import find_checkpoint_warning, store_checkpoint_url
from hpsearch.search.study.create import check_search_space, sample_search_space
from hpsearch.search.study.study import load_study
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import DEVICES, SOURCE_SHA256, SPEC, TRACKING
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import spec_of
from tests.search.finalists.support import search


def test_changed_code_of_a_study_is_reported(database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "wine.py"
    write_template(path)
    storage = open_storage(database_url, application_name="test")
    study_id = optuna.create_study(study_name="s", storage=storage)._study_id
    storage.set_study_user_attr(study_id, SPEC, spec_of(name="none").model_dump())
    storage.set_study_user_attr(study_id, SOURCE_SHA256, source_hash(load_objective(str(path))))
    assert load_study(storage, "s").source_warning(load_objective(str(path))) is None
    path.write_text(path.read_text().replace("1e-4", "1e-3"))
    warning = load_study(storage, "s").source_warning(load_objective(str(path)))
    assert warning is not None
    assert "has changed since study 's' was created" in warning


def test_an_objective_with_other_choices_than_the_trials_of_the_study_is_rejected(
    database_url: str, tmp_path: Path
) -> None:
    """New trials would fail one by one."""
    path = tmp_path / "wine.py"
    write_template(path)
    objective = load_objective(str(path))
    distributions, (params, *_) = sample_search_space(objective)
    distributions = {name: distributions[name] for name in params}
    other = CategoricalDistribution(["sgd"])
    storage = open_storage(database_url, application_name="test")
    trials = [optuna.trial.create_trial(value=0.5, params=params, distributions=distributions)]
    check_search_space(search(storage, "same", trials), objective)
    name = next(name for name, known in distributions.items() if not isinstance(known, CategoricalDistribution))
    trials = [optuna.trial.create_trial(value=0.5, params={name: "sgd"}, distributions={name: other})]
    with pytest.raises(SearchError, match=rf"^the search space of parameter '{name}' differs from .* study 'other' \("):
        check_search_space(search(storage, "other", trials), objective)


def test_a_trial_that_was_delivered_after_it_was_read_is_not_counted_as_missing(database_url: str) -> None:
    storage = open_storage(database_url, application_name="test")
    trial = optuna.trial.create_trial(value=0.5, user_attrs={TRACKING: "pending: on its way"})
    study = search(storage, "s", [trial])
    assert summarise(study).untracked == 1
    RunLinks(storage.engine).record_delivery(study.trials()[0]._trial_id, None)
    study.refresh()
    assert summarise(study).untracked == 0


def test_run_reads_the_trials_again_after_the_delivery(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(database_url, application_name="test")
    trial = optuna.trial.create_trial(value=0.5, user_attrs={TRACKING: "pending: on its way"})
    study = search(storage, "s", [trial])
    assert summarise(study).untracked == 1

    def deliver(*_: Any, **__: Any) -> int:
        RunLinks(storage.engine).record_delivery(study.trials()[0]._trial_id, None)
        return 0

    monkeypatch.setattr(fleet, "Tracker", lambda *_: SimpleNamespace(flush=deliver))
    monkeypatch.setattr(fleet, "open_checkpoints", lambda *_: None)
    services: Any = SimpleNamespace(open_tracking=lambda: None, home=None, checkpoint_url=None)
    fleet.flush_outbox(PlainConsole(file=io.StringIO()), services, study, interrupted=False)
    assert summarise(study).untracked == 0


def test_another_number_of_devices_than_in_the_first_run_is_reported(database_url: str) -> None:
    study = search(open_storage(database_url, application_name="test"), "s", [], budget=1)
    assert study.find_devices_warning(2) is None
    study.set_attr(DEVICES, 2)
    assert study.find_devices_warning(2) is None
    warning = study.find_devices_warning(1)
    assert warning is not None
    assert "was started with --devices 2, but this command trains each trial on 1 device;" in warning


def test_a_worker_with_other_checkpoints_than_the_study_is_warned(database_url: str, tmp_path: Path) -> None:
    storage = open_storage(database_url, application_name="test")
    study_id = optuna.create_study(study_name="s", storage=storage)._study_id
    storage.set_study_user_attr(study_id, SPEC, spec_of(name="none").model_dump())
    study = load_study(storage, "s")
    assert find_checkpoint_warning(study, None) is None
    assert "study 's' are in the home folder" in str(find_checkpoint_warning(study, str(tmp_path)))
    store_checkpoint_url(study, str(tmp_path))
    study = load_study(storage, "s")
    assert find_checkpoint_warning(study, str(tmp_path)) is None
    assert f"study 's' are at {tmp_path}; remove" in str(find_checkpoint_warning(study, "s3://bucket/other"))
    assert find_checkpoint_warning(study, "s3://key:secret@bucket/other") is None  # such a URL is not stored
