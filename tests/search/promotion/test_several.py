"""Promotion in multi-objective studies: the user chooses the trial; an infeasible trial must be named explicitly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evaluate_test import choose_candidate
from hpsearch.search.promotion.evidence_update import refresh_evidence
from hpsearch.search.promotion.promote import promote
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.cleanup import find_garbage
from hpsearch.search.study.study import load_study
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import close_study, log_confirmation, study_note
from hpsearch.storage.attributes import REASON, RUN_ID, SPEC, VIOLATIONS
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.records.test_evaluations import record_test_evaluation, write_scores
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.history import read_finalist_studies
from tests.factories import WAYS
from tests.search.promotion.support import Left, Tracked, unregister

pytestmark = pytest.mark.xdist_group("several promoted")  # the tests share a registry and a model name

OUT = "latency_ms 20 is not <= 10"

# Trials 0 and 1 are the Pareto front; 2 is better than both in one metric, but infeasible; 3 was pruned.
VALUES = [[0.9, 5.0], [0.95, 9.0], [0.99, 20.0], None]


@pytest.fixture
def several(database_url: str, tracking: Tracking, _left: Left) -> Iterator[Tracked]:
    """Create a finished search of two metrics; all tests share its runs and models."""
    storage, name = open_storage(database_url, application_name="test"), "several-promoted"
    study = optuna.create_study(study_name=name, directions=list(WAYS.values()), storage=storage)
    base = {"name": name, "objective": "digits", "n_trials": len(VALUES), "epochs": 4}
    spec = parse_spec({**base, "directions": WAYS, "constraints": {"latency_ms": "<= 10"}})
    storage.set_study_user_attr(study._study_id, SPEC, spec.model_dump())
    storage.set_study_user_attr(study._study_id, RUN_ID, _left.parent)
    for values, run in zip(VALUES, _left.runs, strict=True):
        attrs: dict[str, object] = {RUN_ID: run, REASON: "why"}
        if values is not None and values[1] > 10:
            attrs[VIOLATIONS] = [OUT]
        state = TrialState.PRUNED if values is None else TrialState.COMPLETE
        study.add_trial(create_trial(state=state, values=values, user_attrs=attrs))
    yield Tracked(load_study(storage, name), tracking, name)
    unregister(tracking, _left)


def confirm(several: Tracked, means: dict[int, list[float]]) -> None:
    """Create the study of the finalists, trained on two seeds."""
    stored, trials = several.stored, list(means)
    of = {"study": several.name, "study_id": stored.study_id, "top": 2, "trials": trials, "seeds": [11, 12]}
    name = f"{several.name}-f"
    held = optuna.create_study(study_name=name, directions=list(WAYS.values()), storage=several.storage)
    spec = {**stored.spec.model_dump(), "name": name, "n_trials": 2 * len(trials), "finalists_of": of}
    several.storage.set_study_user_attr(held._study_id, SPEC, spec)
    for _ in range(2):
        for trial in trials:
            held.add_trial(create_trial(values=means[trial]))


def test_a_trial_of_the_pareto_front_must_be_named(several: Tracked) -> None:
    with pytest.raises(SearchError) as error:
        promote(several.stored, several.tracking)
    assert str(error.value) == (
        f"the Pareto front of study {several.name!r} has 2 trials (1, 0); choose one with --trial, or with a "
        "preference such as --prefer latency_ms"
    )
    assert several.promotion_rows() == []
    done = promote(several.stored, several.tracking, trial=0)
    assert (done.trial, done.version, done.unconfirmed_reason) == (0, 1, "no finalists were trained")
    tags = several.version("champion").tags
    assert (tags["hpsearch.metric"], tags["hpsearch.value"]) == ("val_accuracy", "0.9")


def test_the_only_trial_of_a_pareto_front_is_promoted_by_default(several: Tracked) -> None:
    confirm(several, {0: [0.95, 4.0], 1: [0.9, 9.0]})
    assert promote(several.stored, several.tracking).trial == 0


def test_an_infeasible_trial_is_promoted_only_if_named(several: Tracked) -> None:
    with pytest.raises(SearchError) as error:
        promote(several.stored, several.tracking, trial=2)
    assert str(error.value) == (f"--trial 2 is infeasible ({OUT}); add --infeasible to promote it")
    assert several.promotion_rows() == []
    assert promote(several.stored, several.tracking, trial=2, infeasible=True).trial == 2


def test_the_test_set_opens_for_the_promoted_trial_of_the_pareto_front(several: Tracked) -> None:
    stored, engine = several.stored, several.storage.engine
    confirm(several, {0: [0.9, 5.0], 1: [0.95, 9.0]})
    with pytest.raises(SearchError, match=r"choose one with --trial \(1, 0\)"):
        choose_candidate(stored, trial=None, unconfirmed=False)
    assert (
        promote(stored, several.tracking, trial=0).unconfirmed_reason == "the model was not evaluated on the test set"
    )
    (finalists,) = read_finalist_studies(engine, stored.study_id)
    candidate = choose_candidate(stored, trial=None, unconfirmed=False)
    assert (candidate.trial.number, candidate.finalists) == (0, finalists)
    other = choose_candidate(stored, trial=1, unconfirmed=False)
    assert (other.trial.number, other.finalists) == (1, finalists), (
        "the named trial has precedence over the promoted one"
    )
    opening = record_test_evaluation(
        engine, stored.study_id, trial_number=0, model_sha256="0" * 64, opened_by="me", finalists=finalists
    )
    write_scores(engine, stored.study_id, opening, {"accuracy": 0.875})
    refresh_evidence(stored, several.tracking)
    found = several.version("champion")
    assert (found.tags["hpsearch.confirmed"], found.tags["hpsearch.unconfirmed"]) == ("true", "")
    assert json.loads(found.tags["hpsearch.finalists"])["front"] == [1, 0]
    promote(stored, several.tracking, trial=1)
    assert several.version("champion").tags["hpsearch.unconfirmed"] == "the test set was evaluated with trial 0"


def test_the_test_set_does_not_open_for_a_dominated_promoted_trial(several: Tracked) -> None:
    promote(several.stored, several.tracking, trial=2, infeasible=True)
    confirm(several, {0: [0.9, 5.0], 1: [0.95, 9.0]})
    with pytest.raises(SearchError, match=r"choose one with --trial \(1, 0\)"):
        choose_candidate(several.stored, trial=None, unconfirmed=False)
    refresh_evidence(several.stored, several.tracking)
    assert several.version("champion").tags["hpsearch.unconfirmed"] == "the winner among the finalists is trial 1 or 0"


def test_the_pareto_front_is_sent_to_mlflow_and_the_dashboard(several: Tracked) -> None:
    stored = several.stored
    close_study(stored, summarise(stored), several.tracking)
    tags = several.client.get_run(stored.attrs[RUN_ID]).data.tags
    assert json.loads(tags["hpsearch.front"]) == {
        "1": {"accuracy": 0.95, "latency_ms": 9.0},
        "0": {"accuracy": 0.9, "latency_ms": 5.0},
    }
    assert (tags["hpsearch.best_trial"], tags["hpsearch.out_of_bounds"]) == ("1", "1")
    note = study_note(stored, summarise(stored))
    assert "maximize accuracy and minimize latency_ms" in note
    assert "\n| trial | accuracy | latency_ms |\n|---|---|---|\n| trial 1 | 0.95 | 9 |\n| trial 0 | 0.9 | 5 |\n" in note
    assert "1 complete trial out of bounds: `latency_ms <= 10` is violated." in note
    confirm(several, {0: [0.96, 5.0], 1: [0.95, 4.0]})
    for trial in load_study(several.storage, f"{several.name}-f").trials():
        assert trial.datetime_complete is not None
    log_confirmation(stored, several.tracking)
    tags = several.client.get_run(stored.attrs[RUN_ID]).data.tags
    assert (tags["hpsearch.finalists_front"], tags["hpsearch.winner"]) == ("0, 1", "")
    assert several.client.get_run(several.run_of(0)).data.tags["hpsearch.finalist"] == "front"


def test_cleanup_keeps_the_models_of_the_pareto_front(several: Tracked, tmp_path: Path) -> None:
    found, problems = find_garbage(several.stored, home=tmp_path, tracking=several.tracking, keep_top=1)
    assert problems == []
    assert [(garbage.kind, garbage.trials) for garbage in found] == [
        ("models and best checkpoints except those of the Pareto front and the best 1 trials", (2,))
    ]
