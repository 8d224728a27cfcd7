"""Stopping a study and starting it again, from anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import optuna

from hpsearch.search.study.control import start_study, stop_study
from hpsearch.storage.attributes import STOPPED
from hpsearch.storage.trials.claim_results import StudyStopped
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.search.study.steering.support import Say, take


def test_a_stopped_study_has_no_claims_and_stops_running_trials(say: Say, claims: Claims, stored) -> None:
    claim = take(claims)
    said = say("stop", "s")
    assert "stopped study s" in said
    assert "running trials: 1" in said
    assert "start s" in said
    assert claims.report(claim, 0, 0.5).is_stopped, "a running trial is to be given back"
    stopped = claims.claim()
    assert isinstance(stopped, StudyStopped)
    assert re.fullmatch(r"by \S+@\S+ at \d{4}-\d\d-\d\d \d\d:\d\d UTC", stopped.reason)
    assert stopped.reason in say("stop", "s"), "the second `stop` prints the author of the first"
    assert stopped.reason in say("show", "s")
    assert "s (stopped)" in say("studies")


def test_a_started_study_continues(say: Say, claims: Claims, stored) -> None:
    assert "was not stopped" in say("start", "s")
    assert STOPPED not in stored.attrs
    stop_study(stored)
    assert "started study s again; it was stopped by " in say("start", "s")
    claim = take(claims)
    assert not claims.report(claim, 0, 0.5).is_stopped
    assert start_study(stored) is None


def test_stop_can_wait_until_no_trial_runs(say: Say, claims: Claims) -> None:
    claims.finish_attempt(take(claims), Outcome.RELEASED)
    assert "running" not in say("stop", "s", "--wait")


def test_an_unknown_study_is_an_error(say: Say, study: optuna.Study, tmp_path: Path) -> None:
    for arguments in (["stop"], ["start"], ["extend", "--trials", "+1"], ["retry", "--trial", "0"]):
        verb, *options = arguments
        assert "no study 'nope'" in say(verb, "nope", *options, code=2)
