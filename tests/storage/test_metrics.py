from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.storages import BaseStorage
from optuna.trial import TrialState, create_trial
from prometheus_client.parser import text_string_to_metric_families

import hpsearch
from hpsearch.storage.attributes import INFEASIBLE, TRACKING
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.embedded import state
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.worker_registry import WorkerIdentity, WorkerRegistration
from tests.storage.trials.support import budget
from tests.waiting import wait_for
from tests.web import answers

_NAME = 'a "quoted\\" name\nhpsearch_trials{study="forged"} 1'  # label values must not add metrics


def _fill(storage: BaseStorage, engine: sa.Engine) -> None:
    """Write a study with trials of several states, a running and an idle worker, and two workers with no lease."""
    study = optuna.create_study(study_name=_NAME, storage=storage, direction="maximize")
    budget(storage, study._study_id, n_trials=9)
    x = {"params": {"x": 0.5}, "distributions": {"x": FloatDistribution(0, 1)}}
    for value, violation in ((3.0, -1.0), (9.0, 0.5), (4.0, 0.0)):
        study.add_trial(create_trial(value=value, system_attrs={"constraints:m": violation}, **x))
    attrs = {INFEASIBLE: "diverged", TRACKING: "pending"}
    study.add_trial(create_trial(state=TrialState.PRUNED, user_attrs=attrs, **x))
    study.add_trial(create_trial(state=TrialState.PRUNED, intermediate_values={0: 1.0, 1: 2.0}, **x))
    for name in ("running", "idle", "silent", "left"):
        identity = WorkerIdentity(name, "host", 1, None, None, "cpu", "1")
        registration = WorkerRegistration(engine, study._study_id, identity)
        registration.register()
        assert registration.count_on_machine() == 1, "they have the same process"
        if name == "left":
            registration.record_exit("done")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_workers SET seen_at = '2000-1-1' WHERE name = 'silent'"))
    assert isinstance(Claims(engine, study._study_id, worker="running").claim(), Claim)


def test_prometheus_reads_the_metrics_of_all_studies(database_url: str) -> None:
    storage = open_storage(database_url, application_name="test")
    engine = make_engine(database_url, application_name="test")
    _fill(storage, engine)
    engine.dispose()
    port = state.choose_port(None)
    arguments = [sys.executable, "-m", "hpsearch", "serve", "metrics", "--port", str(port)]
    environment = {**os.environ, "HPSEARCH_STORAGE_URL": database_url, "HPSEARCH_WEB_TOKEN": "secret"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    with subprocess.Popen(arguments, env=environment, cwd=Path(hpsearch.__file__).parents[1]) as process:
        try:
            wait_for(lambda: process.poll() is not None or answers(port), "the service to listen")
            assert process.poll() is None, "the service ended"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request)
            request.add_header("Authorization", "Bearer secret")
            with urllib.request.urlopen(request) as response:
                families = list(text_string_to_metric_families(response.read().decode()))
        finally:
            process.terminate()
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
        ("hpsearch_trials", "complete"): 3,
        ("hpsearch_trials", "pruned"): 1,
        ("hpsearch_trials", "infeasible"): 1,
        ("hpsearch_trials", "running"): 1,
        ("hpsearch_epochs_total",): 2,
        ("hpsearch_untracked_trials",): 1,
        ("hpsearch_best_value", "0"): pytest.approx(4.0),
    }
