"""The report of a study: its content for every kind of study, and the escaping of names and texts."""

from __future__ import annotations

import json
import math
import re
from importlib.resources import files
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.console import format_command
from hpsearch.search.report import trials as shown
from hpsearch.search.report import update_report, write_report
from hpsearch.search.report.importances import Importances, compute_importances
from hpsearch.search.report.show import format_summary
from hpsearch.search.services import Services
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import INFEASIBLE, PENDING, REASON, RUN_URL, TRACKING
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.finalists.support import search

HOSTILE = "</script><script>alert(1)</script>"
SPACE = {
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "width": IntDistribution(8, 64),
    "nesterov": CategoricalDistribution((True, False)),
    HOSTILE: CategoricalDistribution((HOSTILE, "<u>", None)),
}


def trial(number: int, value: float | None, state: TrialState = TrialState.COMPLETE, **attrs: object) -> FrozenTrial:
    params = {
        "lr": 1e-3 / (number + 1),
        "width": 8 + number,
        "nesterov": number % 2 == 0,
        HOSTILE: (HOSTILE, "<u>", None)[number % 3],
    }
    values = {} if value is None else {"value": value, "intermediate_values": {0: value / 2, 1: value, 2: math.nan}}
    return create_trial(state=state, params=params, distributions=SPACE, user_attrs=attrs, **values)  # type: ignore[arg-type]


STUDIES = {
    "every kind": [
        *(trial(number, 0.5 + number / 10) for number in range(4)),
        trial(4, 0.2, TrialState.PRUNED),
        trial(5, 0.1, TrialState.PRUNED, **{INFEASIBLE: True, REASON: HOSTILE}),
        trial(6, None, TrialState.FAIL, **{REASON: HOSTILE}),
        trial(7, math.inf),
    ],
    "one trial": [trial(0, 0.5)],
    "failures alone": [trial(n, None, TrialState.FAIL, **{REASON: HOSTILE}) for n in range(2)],
    "nothing yet": [],
}


@pytest.fixture
def page(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> str:
    study = search(open_storage(database_url, application_name="test"), "s", STUDIES[request.param], budget=9)
    return write_report(study, tmp_path / "report.html", dashboard_url=None).read_text()


@pytest.mark.parametrize("page", STUDIES, indirect=True)
def test_names_of_users_are_escaped_and_the_data_are_valid_json(page: str) -> None:
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "<u>" not in page
    data = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert data is not None
    json.loads(data[1], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (
            "every kind",
            ["Trial 7 is the best of 8 trials", "5 complete", "1 pruned", "1 infeasible", "1 failed", "8 / 9"],
        ),
        (
            "one trial",
            [
                "Trial 0, the only trial so far: validation accuracy 0.5000",
                "Shown with 20 or more complete or pruned trials; the study has 1.",
            ],
        ),
        ("failures alone", ["No trial is complete yet. Last failure: trial 1: ", "2 failed"]),
        ("nothing yet", ["No trial is complete yet.", "0 / 9"]),
    ],
    indirect=["page"],
)
def test_the_heading_summarizes_the_study(page: str, said: list[str]) -> None:
    for words in said:
        assert words in page


def test_the_report_of_many_trials_shows_the_best_and_the_latest(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "MAX_SHOWN_TRIALS", 3)
    trials = [trial(0, 0.5), trial(1, 0.9), trial(2, None, TrialState.FAIL), trial(3, None, TrialState.FAIL)]
    study = search(open_storage(database_url, application_name="test"), "s", trials)
    assert [t.number for t in shown.select_shown_trials(study)] == [1, 0, 3]
    assert (
        "3 of 4: the best complete trials" in write_report(study, tmp_path / "r.html", dashboard_url=None).read_text()
    )


def test_a_single_parameter_has_no_importance(database_url: str) -> None:
    def alone(number: int) -> FrozenTrial:
        params, space = {"lr": 1e-3 / (number + 1)}, {"lr": SPACE["lr"]}
        return create_trial(value=number, params=params, distributions=space)

    study = search(open_storage(database_url, application_name="test"), "s", [alone(number) for number in range(3)])
    assert compute_importances(study) == "Not available: the study has only one parameter."


def test_equal_values_give_no_importances(database_url: str) -> None:
    """Optuna's evaluator assigns equal importances."""
    study = search(open_storage(database_url, application_name="test"), "s", [trial(n, 0.5) for n in range(20)])
    assert compute_importances(study) == "Not available: all 20 trials have the same value."


def test_importances_need_trials_and_mark_conditional_parameters(database_url: str) -> None:
    def made(number: int) -> FrozenTrial:
        space = {"width": IntDistribution(8, 64), "kind": CategoricalDistribution(("sgd", "adam"))}
        kind = ("sgd", "adam")[number % 2]
        params = {"width": 8 + number, "kind": kind, f"{kind}_lr": 1e-4 * (1 + number * 7 % 20)}
        space[f"{kind}_lr"] = FloatDistribution(1e-5, 1e-1, log=True)  # type: ignore[assignment]
        return create_trial(value=number, params=params, distributions=space)  # type: ignore[arg-type]

    storage = open_storage(database_url, application_name="test")
    assert compute_importances(search(storage, "few", [made(n) for n in range(19)])) == (
        "Shown with 20 or more complete or pruned trials; the study has 19."
    )
    found = compute_importances(search(storage, "enough", [made(n) for n in range(20)]))
    assert isinstance(found, Importances)
    assert found.shares[0][0] == "width"
    assert (found.n_trials, found.n_best) == (20, 5)
    assert found.trials_by_conditional == {"sgd_lr": 10, "adam_lr": 10}


def test_pruned_trials_count_for_importances(database_url: str) -> None:
    """They are worse than complete ones, whatever their values, and better the longer they trained."""

    def made(number: int) -> FrozenTrial:
        space = {"width": IntDistribution(0, 100), "lr": FloatDistribution(0.0, 1.0)}
        params = {"width": 40 if number % 5 == 0 else number % 40, "lr": number * 7 % 20 / 20}
        epochs = dict.fromkeys(range(1 + number % 5), 0.9)
        if number % 5 == 0:
            return create_trial(value=0.1 + number / 100, params=params, distributions=space)
        return create_trial(state=TrialState.PRUNED, params=params, distributions=space, intermediate_values=epochs)

    found = compute_importances(search(open_storage(database_url, application_name="t"), "s", [*map(made, range(25))]))
    assert isinstance(found, Importances)
    assert (found.n_trials, found.n_best, found.has_pruned, found.shares[0][0]) == (25, 5, True, "width")


def test_the_report_and_the_summary_read_what_mlflow_received_meanwhile(database_url: str, tmp_path: Path) -> None:
    pending = {TRACKING: f"{PENDING}: records not yet sent from host", RUN_URL: ""}
    study = search(open_storage(database_url, application_name="test"), "s", [trial(0, 0.5, **pending)])
    before = summarise(study)
    [line] = [line for line in format_summary(study, before, dashboard_url=None) if "MLflow lacks" in line]
    assert line.startswith("MLflow lacks data of 1 trial, such as trial 0: pending: records not yet sent from host")
    assert line.endswith(f"; send them with: {format_command('sync', 's')}")
    links = RunLinks(study.engine)
    links.record_delivery(study.trials()[0]._trial_id, None)
    links.set_attr_of_trials([study.trials()[0]._trial_id], RUN_URL, "http://mlflow/run")
    report = update_report(Services(tmp_path, "", None, None), study)
    assert "http://mlflow/run" in report.read_text()
    assert summarise(study).untracked == 0
    assert not any("MLflow lacks" in line for line in format_summary(study, before, dashboard_url=None))


def test_marks_have_enough_contrast_to_be_seen() -> None:
    """WCAG 2.2 demands 3:1 for parts of figures."""
    style = (files("hpsearch.search.report") / "templates" / "report.css").read_text()
    for theme in style.split(":root")[1:3]:
        colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", theme))
        page = _parse_color(colors["page"])
        states = ("accent", "best", "pruned", "infeasible", "failed", "running", "waiting", "paused")
        marks = {(name, 1.0): _parse_color(colors[name]) for name in states}
        for name, opacity in re.findall(r"stroke: var\(--(\w+)\)[^}]*opacity: ([\d.]+)", style):
            mark, share = _parse_color(colors[name]), float(opacity)
            marks[name, share] = [share * c + (1 - share) * below for c, below in zip(mark, page, strict=True)]
        light = {key: _compute_luminance(mark) + 0.05 for key, mark in marks.items()}
        ground = _compute_luminance(page) + 0.05
        ratios = {key: max(each, ground) / min(each, ground) for key, each in light.items()}
        assert {key: ratio for key, ratio in ratios.items() if ratio < 3} == {}


def _parse_color(color: str) -> list[float]:
    return [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def _compute_luminance(channels: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
