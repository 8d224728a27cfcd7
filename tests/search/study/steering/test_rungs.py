"""`show` for a study whose trials wait at rungs."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial

from hpsearch.search.freeze_thaw.forecast import forecast_final_values
from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY, Forecast
from hpsearch.search.pruners.study_pruner import make_rungs
from hpsearch.search.report import write_report
from hpsearch.search.report.show import format_best_forecast, make_forecast_table
from hpsearch.search.report.top import format_best
from hpsearch.search.report.trials import estimate_epoch_ends
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import study_note
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.rungs.rungs import PrunedTrial
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.history import RunInterval, read_progress
from tests.factories import spec_of
from tests.search.study.steering.support import Say, take


@pytest.fixture
def study(storage: PostgresStorage) -> optuna.Study:
    study = optuna.create_study(study_name="s", direction="maximize", storage=storage)
    spec = spec_of(name="asha", min_resource=1, reduction_factor=2, min_complete=1)
    storage.set_study_user_attr(study._study_id, SPEC, {**spec.model_dump(), "n_trials": 4})
    return study


@pytest.fixture
def claims(study: optuna.Study, storage: PostgresStorage) -> Claims:
    rungs = make_rungs(load_study(storage, "s").spec)
    return Claims(storage.engine, study._study_id, worker="host:1", rungs=rungs)


def test_show_lists_waiting_promoted_and_pruned_trials_per_rung(
    say: Say, claims: Claims, storage: PostgresStorage
) -> None:
    held = [take(claims) for _ in range(4)]
    for claim, value in zip(held, (0.3, 0.4, 0.2, 0.1), strict=True):
        claims.report(claim, 0, value)
        claims.report_rung(claim, 0, value)
    promoted = take(claims)
    shown = " ".join(say("show", "s").split())
    assert "rung 0, 1 epoch: 4 reached, 2 promoted, 2 paused" in shown
    assert "paused at rung 0, epoch 1, with rank 3 of 3" in shown
    stored = load_study(storage, "s")
    assert "- rung 0, 1 epoch: 4 reached, 2 promoted, 2 paused" in study_note(stored, summarise(stored)).splitlines()
    claims.finish_attempt(promoted, Outcome.COMPLETE, value=0.3)
    while isinstance(claims.claim(), PrunedTrial):
        pass
    shown = " ".join(say("show", "s").split())
    assert "rung 0, 1 epoch: 4 reached, 2 promoted, 2 pruned" in shown
    assert "0.1 < 0.3 at epoch 1" in shown


def test_the_best_unfinished_trial_is_shown_until_a_trial_is_complete(claims: Claims, storage: PostgresStorage) -> None:
    held = [take(claims) for _ in range(2)]
    for claim, value in zip(held, (0.3, math.nan), strict=True):
        claims.report(claim, 0, value)
        claims.report_rung(claim, 0, value)
    stored = load_study(storage, "s")
    progress = read_progress(stored.engine, stored.study_id, "maximize")
    assert format_best(progress, "accuracy") == "best so far accuracy 0.3 (trial 0, epoch 1)"
    claims.finish_attempt(take(claims), Outcome.COMPLETE, value=0.2)
    progress = read_progress(stored.engine, stored.study_id, "maximize")
    assert format_best(progress, "accuracy") == "best accuracy 0.2 (trial 0)"


def test_a_larger_budget_allows_more_promotions(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    held = [take(claims) for _ in range(4)]
    for claim, value in zip(held, (0.3, 0.4, 0.2, 0.1), strict=True):
        claims.report(claim, 0, value)
        claims.report_rung(claim, 0, value)
    claims.finish_attempt(take(claims), Outcome.COMPLETE, value=0.3)
    while isinstance(claims.claim(), PrunedTrial):
        pass
    states = [t.state.name for t in storage.get_all_trials(load_study(storage, "s").study_id)]
    assert states == ["COMPLETE", "RUNNING", "PRUNED", "PRUNED"]
    say("extend", "s", "--trials", "6")
    states = [t.state.name for t in storage.get_all_trials(load_study(storage, "s").study_id)]
    assert states == ["COMPLETE", "RUNNING", "WAITING", "PRUNED"]


def test_show_trial_prints_the_reason_of_its_configuration(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    chosen, drawn = take(claims), take(claims)
    note = {"foreseen": 0.96214, "band": [0.94811, 0.97123], "best": 0.95814, "near": 17}
    storage.set_trial_system_attr(chosen.trial_id, SUGGESTION_REASON_KEY, note)
    line = "freeze_thaw  forecast 0.9621 (0.9481 to 0.9712), best then 0.9581; near trial 17"
    assert line in say("show", "s", "--trial", str(chosen.number)).splitlines()
    assert "freeze_thaw" not in say("show", "s", "--trial", str(drawn.number))


@pytest.fixture
def paused(claims: Claims, storage: PostgresStorage) -> StoredStudy:
    """Ten trials reached the first rung; the first and best of them was promoted and is near its end."""
    stored = load_study(storage, "s")
    stored.set_attr(SPEC, {**stored.spec.model_dump(), "n_trials": 10})
    held = [take(claims) for _ in range(10)]
    for number, claim in enumerate(held):
        storage.set_trial_param(claim.trial_id, "x", number / 10, FloatDistribution(0.0, 1.0))
        claims.report(claim, 0, 0.5 - number / 20)
        claims.report_rung(claim, 0, 0.5 - number / 20)
    first = take(claims)
    for epoch in range(1, 19):
        claims.report(first, epoch, 0.5 + epoch / 100)
    return load_study(storage, "s")


def test_show_has_forecasts_for_running_and_waiting_trials(say: Say, paused: StoredStudy, tmp_path: Path) -> None:
    shown = say("show", "s").splitlines()
    table = shown[shown.index("forecast after epoch 20") + 1 :]
    assert table[0].split() == ["trial", "state", "epochs", "best", "so", "far", "forecast", "90", "%", "interval"]
    assert re.match(r" +0 +running +19 +0\.68 +0\.\d+ +0\.68 to [01]", table[1])
    assert max(map(len, table[:11])) <= 80
    assert re.search(r"^ forecast  0\.\d+ \(0\S* to 0\.\d+\)$", say("show", "s", "--trial", "3"), re.MULTILINE)
    note = study_note(paused, summarise(paused))
    assert re.search(r"^- trial 0 \(running\): forecast of the final accuracy: 0\.", note, re.MULTILINE)
    page = write_report(paused, tmp_path / "report.html", dashboard_url=None).read_text()
    data = json.loads(re.search(r'id="data">(.*)</script>', page)[1])
    assert data["forecasts"][0]["trial"] == 0
    assert [data["trials"][number]["pauses"] for number in (0, 9)] == [[1], [1]]
    assert data["epoch_usage"]["epochs"] == 28
    assert data["epoch_usage"]["best"][-1] == [28, 0.68, 0, 19]
    assert "1 promoted, 9 paused" in page


def test_a_trial_that_ends_during_the_forecast_is_shown_with_it(
    paused: StoredStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials are read once, so that a later state does not appear in the table."""

    def end_meanwhile(*arguments: Any, **settings: Any) -> dict[int, Forecast]:
        found = forecast_final_values(*arguments, **settings)
        with paused.engine.begin() as connection:
            connection.execute(sa.text("UPDATE trials SET state = 'PRUNED' WHERE state = 'RUNNING'"))
        return found

    monkeypatch.setattr("hpsearch.search.freeze_thaw.forecast.forecast_final_values", end_meanwhile)
    assert str(format_best_forecast(paused)).startswith("trial 0 (running): forecast of the final")
    with paused.engine.begin() as connection:
        connection.execute(sa.text("UPDATE trials SET state = 'RUNNING' WHERE number = 0"))
    table = make_forecast_table(paused, every=True)
    assert table is not None
    assert next(iter(table.columns[1].cells)) == "running"


def test_the_time_of_epochs_is_estimated_from_their_trials() -> None:
    """An attempt before a pause trained the epochs to that rung. Other epochs have equal durations."""
    stretches = [(0, 10, None), (20, 30, 0), (100, 140, None)]
    found = [RunInterval(0, *(datetime.fromtimestamp(at, tz=UTC) for at in each[:2]), each[2]) for each in stretches]
    trial = create_trial(value=1.0, intermediate_values=dict.fromkeys(range(4), 1.0))
    assert list(estimate_epoch_ends(trial, found, (2, 8))) == [(10, 0), (30, 1), (120, 2), (140, 3)]
