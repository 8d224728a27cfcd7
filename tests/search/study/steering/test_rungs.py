"""How a study whose trials wait at rungs is shown."""

from __future__ import annotations

import optuna
import pytest

from search.curves.foreseen import CHOSEN
from search.pruning import study_rungs
from search.publish.note import study_note
from search.study.study import load_study
from search.study.summary import summarise
from storage.attributes import SPEC
from storage.study_storage import PostgresStorage
from storage.trials.claims import Claims, Retired
from tests.search.pruning.test_reasons import spec_of
from tests.search.study.steering.support import Say, take


@pytest.fixture
def study(storage: PostgresStorage) -> optuna.Study:
    study = optuna.create_study(study_name="s", direction="maximize", storage=storage)
    spec = spec_of(name="asha", reduction_factor=2)
    storage.set_study_user_attr(study._study_id, SPEC, {**spec.model_dump(), "n_trials": 4})
    return study


@pytest.fixture
def claims(study: optuna.Study, storage: PostgresStorage) -> Claims:
    rungs = study_rungs(load_study(storage, "s").spec)
    return Claims(storage.engine, study._study_id, worker="host:1", rungs=rungs)


def test_who_waits_who_went_on_and_who_never_will(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    held = [take(claims) for _ in range(4)]
    for claim, value in zip(held, (0.3, 0.4, 0.2, 0.1), strict=True):
        claims.report(claim, 0, value)
        claims.reach(claim, 0, value)
    take(claims)  # trial 0 goes on
    shown = " ".join(say("show", "s").split())
    assert "rung 0, 1 epoch: 4 reached it, 2 went on, 2 wait" in shown
    assert "paused at rung 0, epoch 1: rank 3 of 3 then" in shown
    stored = load_study(storage, "s")
    assert "- rung 0, 1 epoch: 4 reached it, 2 went on, 2 wait" in study_note(stored, summarise(stored)).splitlines()
    while isinstance(claims.claim(), Retired):
        pass
    shown = " ".join(say("show", "s").split())
    assert "rung 0, 1 epoch: 4 reached it, 2 went on" in shown
    assert "rank 4 of 4 at rung 0, where the best 2 of 4 trials go on" in shown


def test_a_larger_budget_has_places_for_more(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    held = [take(claims) for _ in range(4)]
    for claim, value in zip(held, (0.3, 0.4, 0.2, 0.1), strict=True):
        claims.report(claim, 0, value)
        claims.reach(claim, 0, value)
    take(claims)
    while isinstance(claims.claim(), Retired):
        pass
    states = [t.state.name for t in storage.get_all_trials(load_study(storage, "s").study_id)]
    assert states == ["RUNNING", "RUNNING", "PRUNED", "PRUNED"]
    say("extend", "s", "--trials", "6")
    states = [t.state.name for t in storage.get_all_trials(load_study(storage, "s").study_id)]
    assert states == ["RUNNING", "RUNNING", "WAITING", "PRUNED"]


def test_why_a_trial_has_its_configuration(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    chosen, drawn = take(claims), take(claims)
    note = {"foreseen": 0.96214, "band": [0.94811, 0.97123], "best": 0.95814, "near": 17}
    storage.set_trial_system_attr(chosen.trial_id, CHOSEN, note)
    line = "   curves  foreseen 0.9621 (0.9481 to 0.9712), best then 0.9581; near trial 17"
    assert line in say("show", "s", "--trial", str(chosen.number)).splitlines()
    assert "curves" not in say("show", "s", "--trial", str(drawn.number))
