"""What the verbs print fits a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest

from storage.trials.claims import Claims
from storage.trials.outcome import Outcome
from tests.search.study.steering.support import Say, take


def test_studies_and_a_trial_fit_80_columns(say: Say, stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    claims = Claims(stored.engine, stored.study_id, worker="vm:16392")
    claim = take(claims)
    claims.report(claim, 0, 0.5)
    claims.settle(claim, Outcome.COMPLETE, value=0.5)
    listed = say("studies")
    assert listed.split("\n", 1)[0].split() == ["study", "objective", "trials", "complete", "best"], "what nobody has"
    assert "…" not in listed, "nothing is cut"
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(rf"^  1 +vm:16392 +{time} +{time} +complete$", say("show", "s", "--trial", "0"), re.MULTILINE)
    assert max(map(len, listed.splitlines())) <= 80
