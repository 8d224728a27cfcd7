"""A worker gives up if its trials keep failing, so that a lost data folder does not use up the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.trial import TrialState

from hpsearch.search.api.study import Study
from hpsearch.search.errors import SearchError
from hpsearch.search.worker.loop import MAX_EQUAL_FAILURES, MAX_OWN_FAILURES

OBJECTIVE = """
import itertools

from hpsearch import LoopObjective

calls = itertools.count()


class Reader(LoopObjective):
    metric, direction, epochs = "loss", "minimize", 1

    def suggest(self, trial):
        return {"x": trial.suggest_float("x", 0, 1)}

    def run(self, trial):
        if (number := next(calls)) >= 2:
            raise OSError(REASON)
        for _ in trial.epochs():
            trial.report({"loss": 1.0})
"""


def make_study(database_url: str, folder: Path, reason: str) -> Study:
    (folder / "reader.py").write_text(OBJECTIVE.replace("REASON", reason))
    return Study.create(
        spec={"objective": str(folder / "reader.py"), "name": "s", "n_trials": 40, "retries": 0},
        storage_url=database_url,
        home=str(folder / "home"),
        tracking_uri="http://127.0.0.1:9",
    )


def count_states(study: Study) -> dict[TrialState, int]:
    states = [trial.state for trial in study.trials]
    return {state: states.count(state) for state in set(states)}


def test_a_worker_gives_up_after_many_equal_failures(
    database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = make_study(database_url, tmp_path, '"the share is gone"')
    with pytest.raises(SearchError, match=r"the worker gave up \(exit code 3\)"):
        study.run_worker()
    assert "giving up: the last 20 trials failed with the same error: ObjectiveError: Reader.run: " in caplog.text
    assert count_states(study) == {TrialState.COMPLETE: 2, TrialState.FAIL: MAX_EQUAL_FAILURES}
    with pytest.raises(SearchError, match=r"the worker gave up \(exit code 3\)"):
        study.run_worker()  # a new worker tries again, as if the share were gone only on its machine
    assert "giving up: all trials of this worker failed with the same error: ObjectiveError" in caplog.text
    assert count_states(study) == {TrialState.COMPLETE: 2, TrialState.FAIL: MAX_EQUAL_FAILURES + MAX_OWN_FAILURES}


def test_failures_with_different_errors_use_the_budget(database_url: str, tmp_path: Path) -> None:
    study = make_study(database_url, tmp_path, 'f"trial {number}"')
    study.run_worker()
    assert count_states(study) == {TrialState.COMPLETE: 2, TrialState.FAIL: 38}
