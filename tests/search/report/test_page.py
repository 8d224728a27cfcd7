"""The report of a study: its content for every kind of study, and the escaping of names and texts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.report import trials as shown
from hpsearch.search.report import write_report
from hpsearch.search.report.figures import compute_importances
from hpsearch.storage.attributes import INFEASIBLE, REASON
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
            ["Trial 0, the only trial so far: validation accuracy 0.5000", "Shown with two or more complete trials"],
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
    study = search(open_storage(database_url, application_name="test"), "s", [trial(n, 0.5) for n in range(3)])
    assert compute_importances(study) == "Not available: all 3 complete trials have the same value."
