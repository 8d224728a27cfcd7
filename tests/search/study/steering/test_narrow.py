"""The output of commands fits a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest

from hpsearch.storage.attributes import REASON
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.search.study.steering.support import Say, take


def test_studies_and_a_trial_fit_80_columns(say: Say, stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    claims = Claims(stored.engine, stored.study_id, worker="vm:16392")
    claim = take(claims)
    claims.report(claim, 0, 0.5)
    claims.finish_attempt(claim, Outcome.COMPLETE, value=0.5)
    listed = say("studies")
    assert listed.split("\n", 1)[0].split() == ["study", "objective", "trials", "complete", "best"], "no empty columns"
    assert "…" not in listed, "nothing is cut"
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.search(rf"^  1 +vm:16392 +{time} +{time} +complete$", say("show", "s", "--trial", "0"), re.MULTILINE)
    assert max(map(len, listed.splitlines())) <= 80


def test_reasons_are_complete_in_80_columns(say: Say, stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    claims = Claims(stored.engine, stored.study_id, worker="ip-10-0-117-204.eu-central-1.compute.internal:16392-4f2a")
    claim = take(claims)
    path = "/data/sets/" + "a-long-folder/" * 8 + "wine.csv"
    claims.finish_attempt(claim, Outcome.FAILED, attrs={REASON: f"FileNotFoundError: no such file: {path}"})
    shown = say("show", "s")
    table = shown[shown.index("trial  state") : shown.index("study s:")].splitlines()
    assert max(map(len, table)) <= 80
    column = table[0].index("reason")
    assert "".join(line[column:] for line in table[1:]).replace(" ", "") == f"FileNotFoundError:nosuchfile:{path}"
    monkeypatch.setenv("COLUMNS", "200")
    assert "ip-10-0-117-204.eu-central-1.compute.internal:16392-4f2a" in say("show", "s"), "there is room for it"
