"""The output of commands fits a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest

from hpsearch.storage.attributes import PRUNING, REASON
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


def test_a_trial_has_one_line_and_a_long_reason_is_below_the_table(
    say: Say, stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = Claims(stored.engine, stored.study_id, worker="ip-10-0-117-204.eu-central-1.compute.internal:16392-4f2a")
    complete, pruned, failed = (take(claims) for _ in range(3))
    for claim, value in ((complete, 0.5), (pruned, 0.25)):
        claims.report(claim, 0, value)
    claims.finish_attempt(complete, Outcome.COMPLETE, value=0.5, attrs={REASON: "best accuracy 0.5 at epoch 1"})
    decision = {"pruner": "median", "epoch": 0, "value": 0.25, "cutoff": 0.5, "peers": 1}
    claims.finish_attempt(
        pruned, Outcome.PRUNED, value=0.25, attrs={REASON: "median pruner at epoch 1 of 3: ...", PRUNING: decision}
    )
    path = "/data/sets/" + "a-long-folder/" * 8 + "wine.csv"
    claims.finish_attempt(failed, Outcome.FAILED, attrs={REASON: f"FileNotFoundError: no such file: {path}"})
    monkeypatch.setenv("COLUMNS", "80")
    shown = say("show", "s")
    table = shown[shown.index("trial  state") :].splitlines()[:4]
    assert max(map(len, table)) <= 80
    assert [line.split()[:2] for line in table[1:]] == [["0", "complete"], ["2", "failed"], ["1", "pruned"]]
    assert table[3].endswith("0.25 < 0.5 at epoch 1")
    assert f"trial 2 failed: FileNotFoundError: no such file: {path}\n" in shown
    monkeypatch.setenv("COLUMNS", "200")
    assert "ip-10-0-117-204.eu-central-1.compute.internal:16392-4f2a" in say("show", "s"), "there is room for it"
