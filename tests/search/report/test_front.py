"""The report of multi-objective studies, and of studies with infeasible trials."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpsearch.search.report import write_report
from hpsearch.search.report.figures import compute_hypervolume_history
from hpsearch.search.report.importances import Importances, compute_importances
from hpsearch.search.report.trials import compute_epoch_usage, select_shown_trials
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import list_violations
from hpsearch.storage.mlflow.server import PAGE_POLICY
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.search.report.support import BOUNDS, TRIALS, WAYS, study_of, trial


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


@pytest.fixture
def study(storage: PostgresStorage) -> StoredStudy:
    return study_of(storage, TRIALS, constraints=BOUNDS)


def page_of(study: StoredStudy, folder: Path) -> tuple[str, dict[str, Any]]:
    page = write_report(study, folder / "report.html", dashboard_url=None).read_text()
    data = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert data is not None
    return page, json.loads(data[1], parse_constant=pytest.fail)


def test_the_policy_of_mlflows_pages_permits_the_script_of_the_report(study: StoredStudy, tmp_path: Path) -> None:
    single = study_of(study.storage, [trial(0, (0.9,))], ways={"accuracy": "maximize"}, name="single")
    for each in (study, single):
        script = re.search(r"<script>(.*?)</script>", page_of(each, tmp_path)[0], re.DOTALL)
        assert script is not None
        digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in PAGE_POLICY


def test_the_page_shows_the_pareto_front_instead_of_the_best_trial(study: StoredStudy, tmp_path: Path) -> None:
    page, data = page_of(study, tmp_path)
    assert "The Pareto front in accuracy and latency_ms has 2 of 5 trials" in page
    assert "maximize accuracy, minimize latency_ms, latency_ms &lt;= 5, model_mb &lt;= 10" in page
    assert "Parameters of the best" not in page
    assert data["front"]["trials"] == [0, 1]
    assert data["front"]["bounds"] == [{"metric": 1, "limit": 5.0, "text": "latency_ms <= 5"}]
    assert "Bounds without an axis in the figure: model_mb &lt;= 10." in page
    assert data["chosen"] == 0, "not trial 3, which is out of bounds"
    assert [t["values"] for t in data["trials"]] == [list(t.values) for t in TRIALS]
    ways = re.findall(r'<th data-best="(\w+)">([\w ]+)</th>', page)
    assert ways == [("descending", "accuracy"), ("ascending", "latency_ms")]
    rows = re.search(r'id="on-front">(.*?)</table>', page, re.DOTALL)
    assert rows is not None
    assert re.findall(r'<tr data-trial="(\d)">', rows[1]) == ["0", "1"]


def test_trials_are_sorted_by_pareto_fronts_and_infeasible_ones_are_last(study: StoredStudy) -> None:
    assert [each.number for each in select_shown_trials(study)] == [0, 1, 2, 3, 4]


def test_violated_constraints_are_shown_also_for_trials_pruned_while_waiting(study: StoredStudy) -> None:
    violations = [list_violations(study.spec, each) for each in study.trials()]
    assert violations == [[], [], [], ["model_mb 12 is not <= 10"], ["latency_ms 6 is not <= 5"]]


def test_the_hypervolume_history_ends_at_that_of_the_pareto_front(study: StoredStudy) -> None:
    found = compute_hypervolume_history(
        study, [(0, 0), (3, 0), (0, 1), (1, 0), (4, 0), (4, 1), (1, 1), (2, 0), (2, 1), (3, 1)]
    )
    assert found is not None
    assert found.reference == [0.6, 4.5], "the worst of each metric among complete trials"
    whole = 0.1 * (4.5 - 1) + 0.2 * (4.5 - 4)
    assert found.points == [(3, pytest.approx(0.3 * 0.5 / whole), 0, 2), (7, pytest.approx(1.0), 1, 2)]


def test_the_hypervolume_decreases_if_a_best_epoch_worsens_another_metric(storage: PostgresStorage) -> None:
    better = {"accuracy": "maximize", "speed": "maximize"}  # in the first epoch it was twice the final value
    made = study_of(storage, [trial(0, (0.8, 2.0)), trial(1, (0.3, 5.0)), trial(2, (0.9, 1.0))], ways=better)
    found = compute_hypervolume_history(made, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
    assert found is not None
    shares = [share for _, share, _, _ in found.points]
    assert shares[:2] == [pytest.approx(0.1 * 3 / 0.5), pytest.approx(1.0)]


def test_identical_trials_have_no_hypervolume(storage: PostgresStorage, tmp_path: Path) -> None:
    made = study_of(storage, [trial(0, (0.8, 2.0))])
    assert compute_hypervolume_history(made, compute_epoch_usage(made).epoch_order) is None
    page, _ = page_of(made, tmp_path)
    assert "Shown when complete trials within bounds differ in every metric." in page
    assert "The Pareto front in accuracy and latency_ms has one of 1 trial: trial 0." in page


def test_each_metric_has_its_own_importances(storage: PostgresStorage) -> None:
    """One metric depends on the learning rate, which grows with the number; the other on the kind, which alternates."""
    trials = [trial(n, (n / 99, float(n % 2))) for n in range(99)]
    made = study_of(storage, trials)
    first, second = (compute_importances(made, place) for place in range(2))
    assert isinstance(first, Importances)
    assert isinstance(second, Importances)
    assert (first.shares[0][0], second.shares[0][0]) == ("lr", "kind")


def test_a_better_infeasible_trial_is_marked_and_not_the_best(storage: PostgresStorage, tmp_path: Path) -> None:
    trials = [trial(0, (0.8,)), trial(1, (0.9,), broken=["model_mb 12 is not <= 10"]), trial(2, (0.7,))]
    made = study_of(storage, trials, ways={"accuracy": "maximize"}, constraints={"model_mb": "<= 10"})
    page, data = page_of(made, tmp_path)
    assert "Trial 0 is the best of 3 trials: validation accuracy 0.8000." in page
    assert '<span class="broken" title="model_mb 12 is not &lt;= 10">out of bounds</span>' in page
    assert (data["chosen"], data["best"], data["front"]) == (0, [[0, 0.8]], None)
    assert [value for _, value, *_ in data["epoch_usage"]["best"]] == [0.4, 0.8]
    assert [t["broken"] for t in data["trials"]] == [[], ["model_mb 12 is not <= 10"], []]
    assert "complete trials that violate model_mb &lt;= 10" in page


def test_the_heading_mentions_that_all_trials_are_infeasible(storage: PostgresStorage, tmp_path: Path) -> None:
    made = study_of(storage, [trial(0, (0.8, 9.0), broken=["latency_ms 9 is not <= 5"])], constraints=BOUNDS)
    page, _ = page_of(made, tmp_path)
    assert "No complete trial satisfies the constraints latency_ms &lt;= 5 and model_mb &lt;= 10." in page
    assert 'id="front"' in page, "which shows how far they are"
    assert 'id="on-front"' not in page


def test_the_names_of_metrics_are_escaped(storage: PostgresStorage, tmp_path: Path) -> None:
    ways = {"<u>a": "maximize", "</script><b>": "minimize"}
    page, data = page_of(study_of(storage, TRIALS, ways=ways), tmp_path)
    assert page.count("<script") == 2
    assert not re.search(r"<u>a|</script><b>", page)
    assert [metric["name"] for metric in data["front"]["metrics"]] == list(ways)
    assert list(WAYS.values()) == list(ways.values())
