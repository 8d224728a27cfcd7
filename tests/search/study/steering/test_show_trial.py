"""The page of one trial in `show`."""

from __future__ import annotations

import re

import optuna
from optuna.trial import create_trial

from hpsearch.storage.attributes import PRUNING, REASON
from hpsearch.storage.study_storage.reading import get_rung_key
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.search.study.steering.support import Say, take


def test_show_trial_prints_all_about_a_trial(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    first = take(claims)
    claims.report(first, 0, 0.25)
    claims.finish_attempt(first, Outcome.RELEASED)
    second = take(claims)
    storage.set_trial_param(second.trial_id, "width", 16, optuna.distributions.IntDistribution(8, 32))
    claims.report(second, 1, 0.25)
    storage.set_trial_system_attr(second.trial_id, get_rung_key(0), 0.25)
    claims.report(second, 2, 0.5)
    grounds = {"pruner": "successive_halving", "epoch": 2, "value": 0.5, "cutoff": 0.75, "peers": 4, "rung": 1}
    claims.finish_attempt(second, Outcome.PRUNED, value=0.5, attrs={REASON: "it fell behind", PRUNING: grounds})
    page = say("show", "s", "--trial", "0")
    for line in (
        r"trial 0 of study s: pruned",
        r" +reason +it fell behind",
        r" +pruning +successive_halving pruner, epoch 3, value 0.5, cutoff 0.75, peers 4, rung 1",
        r" +value +accuracy 0.5 \(last epoch\)",
        r" +width +16",
        r" +1 +host:1 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\d{4}-\S+ \S+ +released",
        r" +2 +host:1 +\d{4}-\S+ \S+ +\d{4}-\S+ \S+ +pruned",
        r" +epoch +val accuracy +rung",
        r" +1 +0.25 *",
        r" +2 +0.25 +0",
        r" +3 +0.5 *",
    ):
        assert re.search(rf"^{line} *$", page, re.MULTILINE), f"{line}\n{page}"


def test_show_trial_prints_why_a_trial_waits(say: Say, claims: Claims, study: optuna.Study) -> None:
    study.enqueue_trial({"width": 16})
    assert "enqueued: no worker has claimed the trial yet" in say("show", "s")
    claims.finish_attempt(take(claims), Outcome.RELEASED)
    waits = "attempt 1 was released by its worker; a free worker resumes the trial next"
    assert waits in say("show", "s")
    assert waits in say("show", "s", "--trial", "0")
    claims.finish_attempt(take(claims), Outcome.FAILED, retry=True, attrs={REASON: "out of memory"})
    assert "attempt 2 failed (out of memory); a free" in say("show", "s")
    claims.finish_attempt(take(claims), Outcome.RELEASED)
    assert "attempt 3 was released by its worker; a free" in say("show", "s"), "the reason of the second is another's"


def test_show_trial_of_running_and_external_trials(say: Say, claims: Claims, study: optuna.Study) -> None:
    study.add_trial(create_trial(value=1.0))
    take(claims)
    assert re.search(r"1 +host:1 +\S+ \S+ +running", say("show", "s", "--trial", "1"))
    elsewhere = say("show", "s", "--trial", "0")
    for nothing in ("parameters: none", "attempts: none", "epochs: none"):
        assert nothing in elsewhere
    assert "--trial 7: study 's' has no such trial; give a number from 0 to 1" in say(
        "show", "s", "--trial", "7", code=2
    )
