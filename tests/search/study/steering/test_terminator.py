"""Early termination: one worker stops a study whose remaining budget gains too little; `start` continues it."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState, create_trial
from rich.console import Console

from hpsearch.search.api.study import Study
from hpsearch.search.cli import run_command
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.report import write_report
from hpsearch.search.report.show import format_summary
from hpsearch.search.report.top import read_status
from hpsearch.search.run.live import LiveView
from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.search.study.enqueue import find_stopped_warning
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.summary import summarise
from hpsearch.search.study.terminator import MIN_ENDED_TRIALS, Terminator
from hpsearch.search.tracking.study_run import study_note
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import EARLY_TERMINATION, EXPECTED_GAIN, SPEC
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.study_storage.studies import set_attrs_in
from hpsearch.storage.trials.claim_results import NoTrialAvailable
from hpsearch.storage.trials.claim_sql import LOCK_STUDY
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.early_stop import stop_early
from hpsearch.storage.trials.finishing import Outcome
from tests.factories import X, spec_of
from tests.search.study.steering.support import Say, rows, take


@pytest.fixture
def study(storage: PostgresStorage) -> optuna.Study:
    study = optuna.create_study(study_name="s", direction="maximize", storage=storage)
    spec = {**spec_of(name="none", epochs=2).model_dump(), "n_trials": 100, "min_expected_gain": 0.01}
    storage.set_study_user_attr(study._study_id, SPEC, spec)
    return study


def ran(study: optuna.Study, xs: np.ndarray, best: float = 0.8) -> None:
    """Add trials whose value is best at x = 0.7."""
    for x in xs:
        value = best - (x - 0.7) ** 2
        kind = {"params": {"x": x}, "distributions": {"x": X}, "state": TrialState.COMPLETE, "value": value}
        study.add_trial(create_trial(**kind, intermediate_values={0: value - 0.2, 1: value}))


def rest(stored: StoredStudy) -> Terminator:
    return Terminator(stored, make_sampler_study_view(stored.open()))


def test_a_study_without_expected_gain_stops_and_its_running_trials_end(
    say: Say, study: optuna.Study, stored: StoredStudy, claims: Claims, tmp_path: Path
) -> None:
    ran(study, np.linspace(1, 0, MIN_ENDED_TRIALS - 1))
    assert rest(stored).stop_early() is None
    assert EXPECTED_GAIN not in stored.attrs, "before there are enough trials nothing is judged"
    ran(study, np.array([0.69]))
    running = take(claims)
    early_stop = rest(stored).stop_early()
    assert early_stop is not None
    assert (early_stop.started, early_stop.budget) == (MIN_ENDED_TRIALS + 1, 100)
    assert 0 <= early_stop.gain < 0.01
    assert rest(stored).stop_early() is None, "it is written once"
    assert isinstance(claims.claim(), NoTrialAvailable)
    assert claims.has_trials_left(), "one runs"
    assert not claims.report(running, 0, 0.5).is_stopped
    claims.finish_attempt(running, Outcome.COMPLETE, value=0.5)
    assert not claims.has_trials_left()
    assert load_study(stored.storage, "s").is_spent(MIN_ENDED_TRIALS + 1)
    standing = read_status(stored)
    assert (standing.progress.finished_fraction, standing.eta) == (1.0, 0.0)
    gain = f"the expected gain of the remaining budget, {early_stop.gain:.2g}, was below --min-expected-gain 0.01"
    line = f"stopped after 21 of 100 trials: {gain}"
    summary = summarise(stored)
    assert format_summary(stored, summary, dashboard_url=None)[:2] == [
        "study s: 21 of 100 trials (21 complete, 0 pruned, 0 failed)",
        line,
    ]
    assert line in say("show", "s", "--all")
    # All outputs have the whole budget.
    assert "21/100 trials, stopped early: 21 complete" in say("top", "s", "--once")
    listed = say("studies").splitlines()[-1].split()
    assert listed[:5] == ["s", "(stopped", "early)", "digits", "21/100"]
    assert "21 of 100 trials." in study_note(stored, summary)
    page = write_report(stored, tmp_path / "report.html", dashboard_url=None).read_text()
    assert "21 / 100" in page
    assert "21 / 21" not in page
    output, fleet = io.StringIO(), Fleet("s", WorkerOptions(), workers=1, log_dir=tmp_path, gpus=[])
    with LiveView(Console(file=output, width=200), stored.spec, fleet) as live:
        live.update(standing.progress)
    assert output.getvalue().startswith("21/100 trials, stopped early: 21 complete")


def test_a_study_with_expected_gain_continues_and_is_checked_again_later(
    study: optuna.Study, stored: StoredStudy
) -> None:
    random = np.random.default_rng(0)
    for _ in range(MIN_ENDED_TRIALS):  # eight parameters, and few trials
        params = {f"x{place}": float(random.random()) for place in range(8)}
        value = -sum((x - 0.5) ** 2 for x in params.values())
        kind = {"params": params, "distributions": dict.fromkeys(params, X), "state": TrialState.COMPLETE}
        study.add_trial(create_trial(**kind, value=value, intermediate_values={0: value, 1: value}))
    assert rest(stored).stop_early() is None
    expected_gain = stored.attrs[EXPECTED_GAIN]
    assert expected_gain["ended"] == MIN_ENDED_TRIALS
    assert expected_gain["gain"] > 0.01
    ran(study, np.array([0.7]))
    assert rest(stored).stop_early() is None
    assert stored.attrs[EXPECTED_GAIN] == expected_gain, "one trial more changes little"


def test_a_study_that_improved_recently_is_not_stopped(study: optuna.Study, stored: StoredStudy) -> None:
    ran(study, np.linspace(0, 0.7, MIN_ENDED_TRIALS))
    assert rest(stored).stop_early() is None
    assert stored.attrs[EXPECTED_GAIN]["gain"] > 0.1, "the later half of the trials gained a tenth"


def test_a_study_near_its_bound_is_stopped_although_it_improved(study: optuna.Study, stored: StoredStudy) -> None:
    ran(study, np.linspace(0, 0.7, MIN_ENDED_TRIALS), best=0.995)
    early_stop = rest(stored).stop_early()
    assert early_stop is not None, "no accuracy is above 1"
    assert early_stop.gain == pytest.approx(0.005)


@pytest.mark.parametrize("verb", [["start", "s"], ["extend", "s", "--trials", "+50"]])
def test_a_study_started_by_the_user_continues(
    say: Say, study: optuna.Study, stored: StoredStudy, claims: Claims, verb
) -> None:
    ran(study, np.linspace(1, 0, MIN_ENDED_TRIALS))
    assert rest(stored).stop_early() is not None
    assert isinstance(claims.claim(), NoTrialAvailable)
    ran(study, np.linspace(0.9, 0.1, 5))  # like trials that ran or waited at a rung at the early termination
    assert "the expected gain of the remaining budget, " in say(*verb)
    assert stored.early_stop is None
    assert stored.budget == (150 if verb[0] == "extend" else 100)
    take(claims)
    assert rest(stored).stop_early() is None, "it is judged again after a tenth more"
    assert "stopped after" not in say("show", "s")


def test_one_of_two_concurrent_decisions_is_written(
    study: optuna.Study, stored: StoredStudy, database_url: str
) -> None:
    ran(study, np.linspace(1, 0, MIN_ENDED_TRIALS))
    judged = {"gain": 0.001, "ended": MIN_ENDED_TRIALS}
    engines = [open_storage(database_url, application_name="test").engine for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        written = list(
            pool.map(lambda e: stop_early(e, stored.study_id, gain=0.001, threshold=0.01, estimate=judged), engines)
        )
    assert sum(one is not None for one in written) == 1
    assert len(rows(database_url, f"SELECT FROM study_user_attributes WHERE key = '{EARLY_TERMINATION}'")) == 1


def test_a_claim_that_waits_during_early_termination_starts_no_trial(
    study: optuna.Study, stored: StoredStudy, claims: Claims, database_url: str
) -> None:
    ran(study, np.linspace(1, 0, MIN_ENDED_TRIALS))
    waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool:
        with stored.engine.begin() as connection:
            connection.execute(LOCK_STUDY, {"study": stored.study_id})
            early_stop = {"gain": 0.001, "threshold": 0.01, "started": MIN_ENDED_TRIALS, "budget": 100}
            set_attrs_in(connection, stored.study_id, {EARLY_TERMINATION: early_stop})
            claim = pool.submit(claims.claim)
            while not rows(database_url, waits):
                assert not claim.done()
        assert isinstance(claim.result(timeout=60), NoTrialAvailable)


def test_enqueued_trials_run_before_early_termination(study: optuna.Study, stored: StoredStudy, claims: Claims) -> None:
    ran(study, np.linspace(1, 0, MIN_ENDED_TRIALS))
    study.enqueue_trial({"x": 0.3})
    assert rest(stored).stop_early() is None
    take(claims)


def test_trials_enqueued_after_early_termination_wait_with_a_warning(
    say: Say, study: optuna.Study, stored: StoredStudy, claims: Claims, tmp_path: Path, stack: StackInfo,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ran(study, np.linspace(1, 0, MIN_ENDED_TRIALS))
    assert find_stopped_warning(stored) is None
    assert rest(stored).stop_early() is not None
    assert find_stopped_warning(stored) is None
    mine = tmp_path / "mine.csv"
    mine.write_text("weight_decay\n0.003\n")
    home = ("--home", str(tmp_path / "home"), "--tracking-uri", stack.tracking_uri)
    output = say("run", "digits", "--name", "s", "--enqueue", str(mine), "--workers", "0", *home)
    why = "study 's' stopped early and does not run 1 enqueued trial; restart the study with hpsearch start s"
    assert why in output.splitlines()
    assert isinstance(claims.claim(), NoTrialAvailable)
    shown = "mine.csv, line 2; enqueued: the study stopped early; resume it with hpsearch start s"
    assert shown in say("show", "s")
    mine.write_text("weight_decay\n0.003\n0.004\n")
    where = {"storage_url": stored.engine.url.render_as_string(hide_password=False), "tracking_uri": stack.tracking_uri}
    assert Study.open("s", **where).enqueue_trial(mine) == 1
    assert capsys.readouterr().err == f"warning: {why.replace('1 enqueued trial', '2 enqueued trials')}\n"
    say("start", "s")
    assert find_stopped_warning(stored) is None
    assert [take(claims).number for _ in range(2)] == [MIN_ENDED_TRIALS, MIN_ENDED_TRIALS + 1]


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "no improvement is likely"])
def test_bad_input_is_an_error_of_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "digits", "--min-expected-gain", given]) == 2
    said = capsys.readouterr().err
    assert "--min-expected-gain" in said
    assert said.count("\n") == 1, said
