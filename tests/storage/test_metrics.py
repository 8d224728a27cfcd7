from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial
from prometheus_client.parser import text_string_to_metric_families

import hpsearch
from hpsearch.search import services
from hpsearch.search.cli import run_command
from hpsearch.search.services import Services
from hpsearch.storage import metrics
from hpsearch.storage.attributes import INFEASIBLE, TRACKING, WANTED_WORKERS
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.embedded import state
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.worker_registry import WorkerIdentity, WorkerRegistration
from hpsearch.storage.web.token import METRICS_TOKEN_FILE, load_or_create_token, read_token
from tests.storage.trials.support import budget
from tests.waiting import wait_for
from tests.web import answers

_NAME = 'a "quoted\\" name\nhpsearch_trials{study="forged"} 1'  # label values must not add metrics

_LOST_ATTEMPTS = """
    INSERT INTO hpsearch_attempts
           (trial_id, attempt, claim_id, worker, process, lease, loss_weight, loss_cause, started_at, expires_at,
            ended_at, outcome)
    SELECT trial_id, attempt, gen_random_uuid(), 'gone', 'x', 9, weight, cause, now(), now(), now(), outcome
      FROM trials, (VALUES (1, 0.1, NULL, 'lost'), (2, 0.25, NULL, 'lost'), (3, 1, NULL, 'lost'),
                           (4, 1, 'out of memory', 'lost'), (5, 0.1, NULL, 'released')
                   ) losses (attempt, weight, cause, outcome) WHERE number = 0
"""


def _fill(storage: BaseStorage, engine: sa.Engine) -> None:
    """Write a study with trials of several states, a running and an idle worker, and two workers with no lease."""
    study = optuna.create_study(study_name=_NAME, storage=storage, direction="maximize")
    study.set_user_attr(WANTED_WORKERS, 4)
    budget(storage, study._study_id, n_trials=9)
    x = {"params": {"x": 0.5}, "distributions": {"x": FloatDistribution(0, 1)}}
    for value, violation in ((3.0, -1.0), (9.0, 0.5), (4.0, 0.0)):
        study.add_trial(create_trial(value=value, system_attrs={"constraints:m": violation}, **x))
    attrs = {INFEASIBLE: "diverged", TRACKING: "pending"}
    study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs=attrs, **x))
    study.add_trial(create_trial(state=TrialState.PRUNED, intermediate_values={0: 1.0, 2**31 - 1: 2.0}, **x))
    for name in ("running", "idle", "silent", "left"):
        identity = WorkerIdentity(name, "host", 1, None, None, "cpu", "1")
        registration = WorkerRegistration(engine, study._study_id, identity)
        registration.register()
        assert registration.count_on_machine() == 1, "they have the same process"
        if name == "left":
            registration.record_exit("done")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_workers SET seen_at = '2000-1-1' WHERE name = 'silent'"))
        connection.execute(sa.text(_LOST_ATTEMPTS))
    assert isinstance(Claims(engine, study._study_id, worker="running").claim(), Claim)


@pytest.fixture
def port(database_url: str) -> Iterator[int]:
    """Serve the metrics of the study, with the token `secret`, and return the port."""
    storage = open_storage(database_url, application_name="test")
    engine = make_engine(database_url, application_name="test")
    _fill(storage, engine)
    engine.dispose()
    port = state.choose_port()
    arguments = [sys.executable, "-m", "hpsearch", "serve", "metrics", "--port", str(port)]
    environment = {**os.environ, "HPSEARCH_STORAGE_URL": database_url, "HPSEARCH_WEB_TOKEN": "secret"}
    with subprocess.Popen(arguments, env=environment, cwd=Path(hpsearch.__file__).parents[1]) as process:
        try:
            wait_for(lambda: process.poll() is not None or answers(port), "the service to listen")
            assert process.poll() is None, "the service ended"
            yield port
        finally:
            process.terminate()


def test_a_scrape_returns_the_metrics_of_all_studies(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request)
    request.add_header("Authorization", "Bearer secret")
    with urllib.request.urlopen(request) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        assert labels.pop("study") == _NAME
        found[sample.name, *labels.values()] = sample.value
    zero = {("hpsearch_trials", "failed"): 0, ("hpsearch_trials", "waiting"): 0}
    assert found == zero | {
        ("hpsearch_workers", "running"): 1,
        ("hpsearch_workers", "idle"): 1,
        ("hpsearch_workers", "lost"): 1,
        ("hpsearch_wanted_workers",): 4,
        ("hpsearch_trials", "complete"): 3,
        ("hpsearch_trials", "pruned"): 1,
        ("hpsearch_trials", "infeasible"): 1,
        ("hpsearch_trials", "running"): 1,
        ("hpsearch_epochs_total",): 2**31,
        ("hpsearch_attempts_total", "lost"): 2,
        ("hpsearch_attempts_total", "lost_at_start"): 1,
        ("hpsearch_attempts_total", "out_of_memory"): 1,
        ("hpsearch_attempts_total", "released_at_start"): 1,
        ("hpsearch_untracked_trials",): 1,
        ("hpsearch_best_value", "0"): pytest.approx(4.0),
    }


def test_the_token_of_the_metrics_does_not_give_access_to_the_other_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus sends it to any process that has taken the port, also to one of another user."""
    served: list[str | None] = []
    embedded = Services(tmp_path, "postgresql://", "http://127.0.0.1:1", None, is_embedded=True)
    monkeypatch.setattr(services, "find_services", lambda _: embedded)
    monkeypatch.setattr(metrics, "serve_metrics", lambda *_, token, **_options: served.append(token))
    monkeypatch.delenv("HPSEARCH_WEB_TOKEN", raising=False)
    token = load_or_create_token(tmp_path)
    assert run_command(["serve", "metrics", "--port", str(state.choose_port())]) == 0
    assert served == [read_token(tmp_path, METRICS_TOKEN_FILE)]
    assert served[0] not in {None, token}
    assert (tmp_path / "metrics-token").stat().st_mode & 0o777 == 0o600


_DOCS = Path(__file__).parents[2] / "docs/metrics"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_answers_all_queries_of_the_dashboard_and_loads_the_alerts(port: int, tmp_path: Path) -> None:
    panels = json.loads((_DOCS / "grafana.json").read_text())["panels"]
    queries = [target["expr"].replace("$study", "(?s:.*)") for panel in panels for target in panel["targets"]]
    (tmp_path / "token").write_text("secret")
    (tmp_path / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s}}
rule_files: [{_DOCS / "alerts.yml"}]
scrape_configs:
  - job_name: hpsearch
    authorization: {{credentials_file: {tmp_path / "token"}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
""")
    own = state.choose_port()
    arguments = ["--config.file", "prometheus.yml", "--storage.tsdb.path", "data", "--log.level", "error"]
    command = ["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{own}"]

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/{path}") as response:
            return json.load(response)["data"]

    def is_ready() -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{own}/-/ready").status == 200
        except urllib.error.URLError:  # it does not listen yet, or replies with status 503
            return False

    def has_data(query: str) -> bool:
        return bool(ask(f"query?{urllib.parse.urlencode({'query': query})}")["result"])

    with subprocess.Popen(command, cwd=tmp_path) as process:
        try:
            wait_for(lambda: process.poll() is not None or is_ready(), "Prometheus to be ready")
            for query in queries:
                wait_for(lambda query=query: has_data(query), f"data of {query}")
            (group,) = ask("rules")["groups"]
        finally:
            process.terminate()
    assert len(queries) == 6
    assert {rule["name"] for rule in group["rules"]} == {"WorkersLost", "FleetTooSmall", "NoEpoch", "RecordsMissing"}
