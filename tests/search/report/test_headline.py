"""The headline of a study, which the terminal and the report share: lead, gain, and the next steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.console import format_command
from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.choose import create_or_join
from hpsearch.search.report import write_report
from hpsearch.search.report.headline import Headline, find_edge, make_headline
from hpsearch.search.report.show import format_summary
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import study_note
from hpsearch.storage.attributes import ORIGIN, REASON, VAL_SAMPLES
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.search.finalists.support import ended, search, search_several, train

LR = FloatDistribution(1e-5, 1e-1, log=True)
DEFAULT = {ORIGIN: "default"}


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


def trial(value: float | None, lr: float = 1e-3, *, reason: str = "", **attrs: object) -> FrozenTrial:
    state = TrialState.FAIL if value is None else TrialState.COMPLETE
    return create_trial(
        state=state, value=value, params={"lr": lr}, distributions={"lr": LR}, user_attrs={REASON: reason, **attrs}
    )


def headline(study: StoredStudy) -> Headline:
    return make_headline(study, summarise(study), read_finalists(study))


def test_the_lead_is_given_in_samples_and_standard_errors(storage: PostgresStorage) -> None:
    """351 and 350 of 360 samples; the standard error of the difference is that of two independent shares."""
    study = search(storage, "s", [trial(0.9, **DEFAULT), trial(350 / 360), trial(351 / 360)])
    study.set_attr(VAL_SAMPLES, 360)
    assert headline(study).results == [
        "ahead of trial 1 by 0.0028 (1 sample of 360, 0.2 standard errors)",
        "better than the default configuration, trial 0, by 0.0750",
        "not confirmed by new runs: 0.9750 is the best of 3 trials, so it is too optimistic",
    ]
    assert headline(study).gain == pytest.approx(0.075)
    assert "the best trials may differ by chance only" in headline(study).next_steps[-1].finding
    assert headline(study).next_steps[-1].command == format_command("finalists", "s")
    study.set_attr(VAL_SAMPLES, 361)  # then the values are no counts of samples
    assert headline(study).results[0] == "ahead of trial 1 by 0.0028"


def test_a_tie_and_a_winning_default_are_stated(storage: PostgresStorage, tmp_path: Path) -> None:
    study = search(storage, "s", [trial(0.9, **DEFAULT), trial(0.9 + 1e-8), trial(0.5)])
    assert headline(study).results == [
        "tied with trial 0: the same value",
        "no better than the default configuration, trial 0",
        "not confirmed by new runs: 0.9000 is the best of 3 trials, so it is too optimistic",
    ]
    won = search(storage, "won", [trial(0.9, **DEFAULT), trial(0.5)])
    assert headline(won).results[1] == "no trial is better than the default configuration, trial 0"
    lines = format_summary(won, summarise(won), dashboard_url=None)
    assert "no trial is better than the default configuration, trial 0" in lines
    assert "No trial is better than the default configuration, trial 0" in study_note(won, summarise(won))
    page = write_report(won, tmp_path / "report.html", dashboard_url=None).read_text()
    assert "Ahead of trial 1 by 0.4000. No trial is better than the default configuration, trial 0." in page
    assert f"<code>{format_command('finalists', 'won')}</code>" in page


def test_each_next_step_has_its_command(storage: PostgresStorage) -> None:
    lost = [trial(None, reason=f"attempt {n} lost its worker") for n in range(4)]
    study = search(storage, "s", [trial(0.5), trial(0.9, 1e-1), *lost], objective="wine.py:Wine")
    assert [(step.finding, step.command) for step in headline(study).next_steps] == [
        (
            "4 of 6 trials failed or diverged for the same reason, such as trial 5: attempt 3 lost its worker",
            format_command("show", "s", "--trial", "5"),
        ),
        (
            "the best trial is at the edge of a range: lr 0.1 (upper edge of 1e-05 to 0.1); widen it in suggest, and "
            "search again",
            format_command("run", "wine.py:Wine", "--name", "s-wider", "--warm-start", "s"),
        ),
        (
            "the best value is partly luck; retrain the best ones on new seeds",
            format_command("finalists", "s"),
        ),
    ]
    failed = search(storage, "failed", [trial(0.5), trial(0.6), trial(None, reason="OSError: no file\nmore")])
    assert headline(failed).next_steps[0].finding == "1 of 3 trials failed, trial 2: OSError: no file"
    assert headline(failed).next_steps[0].command == format_command("show", "failed", "--trial", "2")
    few = search(storage, "few", [trial(0.5), trial(0.6)])
    assert headline(few).next_steps[0].finding == "2 trials are few for 1 parameter, so a larger budget may help"
    assert headline(few).next_steps[0].command == format_command("extend", "few", "--trials", "+2")
    one = search(storage, "one", [trial(0.5)])
    assert headline(one).next_steps[0].finding.startswith("1 trial is not enough for 1 parameter, so")
    flat = search(storage, "flat", [trial(0.9), *(trial(0.5) for _ in range(24))])
    [step] = headline(flat).next_steps
    assert step.finding.startswith("the last 24 of 25 trials found no better value; retrain")
    running = search(storage, "running", [trial(0.5), trial(0.6)], budget=9)
    assert headline(running).next_steps == []


def test_a_lead_of_all_samples_has_no_standard_error(storage: PostgresStorage) -> None:
    study = search(storage, "s", [trial(1.0), trial(0.0)])
    study.set_attr(VAL_SAMPLES, 4)
    assert headline(study).results[0] == "ahead of trial 1 by 1.0000 (4 samples of 4)"


def test_an_edge_does_not_count_if_an_equal_trial_is_not_at_it(storage: PostgresStorage) -> None:
    def findings(*trials: FrozenTrial, objective: str = "wine.py:Wine") -> str:
        study = search(storage, f"s{len(storage.get_all_studies())}", list(trials), objective=objective)
        return " ".join(step.finding for step in headline(study).next_steps)

    both = trial(0.9, 1e-1), trial(0.9, 9.99e-2), trial(0.5)
    assert "edge of a range" in findings(*both)
    assert "edge of a range" not in findings(*both, objective="digits"), "its range cannot be widened"
    assert "edge of a range" not in findings(*both, trial(0.9, 1e-3))


def test_no_larger_budget_is_suggested_after_the_finalists_have_decided(storage: PostgresStorage) -> None:
    study = search(storage, "s", [trial(0.5), trial(0.9)])
    chosen, _ = create_or_join(study, top=2, seeds=2)
    train(chosen, lambda parent, seed: 0.5 + parent / 10)
    assert headline(study).next_steps[0].finding == "evaluate the winner on the test set, once"
    again = format_command("show", "s")
    assert headline(chosen).results == [f"the means of the finalists decide, not their best run: {again}"]
    assert any(line.startswith("best run: ") for line in format_summary(chosen, summarise(chosen), dashboard_url=None))


@pytest.mark.parametrize(
    ("distribution", "value", "edge"),
    [
        (LR, 1e-1, "upper"),
        (LR, 1.05e-5, "lower"),
        (LR, 1e-3, None),
        (FloatDistribution(0.0, 0.5), 0.0, None),
        (FloatDistribution(0.0, 0.5), 0.499, "upper"),
        (IntDistribution(1, 3), 1, None),
        (IntDistribution(8, 32, step=8), 8, "lower"),
        (IntDistribution(8, 8), 8, None),
        (IntDistribution(2**60, 2**60 + 3), 2**60, None),
        (CategoricalDistribution((1, 2)), 2, None),
    ],
)
def test_an_edge_of_a_range_is_found(distribution: object, value: float, edge: str | None) -> None:
    assert find_edge(distribution, value) == edge


def test_the_best_trials_by_each_metric_are_stated(storage: PostgresStorage) -> None:
    study = search_several(
        storage, "s", [ended(0, 0.9, 5.0), ended(1, 0.8, 2.0), ended(2, 0.7, 2.0), ended(3, 0.6, 4.0)]
    )
    best, other = study.spec.direction_by_metric
    assert headline(study).results[:3] == [
        f"best {best}: 0.9, trial 0, ahead of trial 1 by 0.1000",
        f"best {other}: 2, trials 1, 2, ahead of trial 3 by 2.0000",
        "not confirmed by new runs: the front is the best of 4 trials, so its values are too optimistic",
    ]
