"""What MLflow is told of a study's finalists and of its test set: again and again the same, whoever tells it."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import suppress
from typing import Any

from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.refit import tabulate_refit
from hpsearch.search.finalists.table import Finalists, counting_set
from hpsearch.search.finalists.text import optimism, ranked
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import RUN_ID
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import is_away, one_line
from hpsearch.storage.records.test_openings import Opening, read_opening
from hpsearch.storage.trials.finalist_sets import finalist_studies

log = logging.getLogger(__name__)

# Tags of runs: of the search's trials that were finalists, and of the study's run.
FINALIST, WINNER, WINNER_RUN = "hpsearch.finalist", "hpsearch.winner", "hpsearch.winner_run_id"
TEST_OPENED = "hpsearch.test_opened"

ARTIFACT = "finalists.json"


def tell_confirmation(study: StoredStudy, tracking: Tracking) -> None:
    """Write the finalists' table and the test scores to the runs in MLflow. Safe to call again, and at once."""
    runs = {trial.number: str(trial.user_attrs[RUN_ID]) for trial in study.trials() if RUN_ID in trial.user_attrs}
    counting = counting_set(study)
    if counting is not None and not counting[1].pending:
        _tell_finalists(study, *counting, runs, tracking)
    opening = read_opening(study.engine, study.study_id)
    if opening is not None and opening.scores is not None and (run := _scored_run(study, opening, runs)):
        _annotate(
            tracking,
            run,
            tags={TEST_OPENED: opening.told, "hpsearch.test_confirmed": str(opening.finalists is not None).lower()},
            metrics={f"test_{name}": value for name, value in opening.scores.items()},
            at=opening.opened_at.timestamp(),
        )


def _scored_run(study: StoredStudy, opening: Opening, runs: dict[int, str]) -> str | None:
    """Return the run whose model was scored on the test set: the trial's, or that of its refit."""
    if opening.refit is None:
        return runs.get(opening.trial_number)
    with suppress(SearchError):  # somebody deleted the refit
        made = load_study(study.storage, opening.refit)
        taken = tabulate_refit(made).taken
        return None if taken is None else made.trials()[taken].user_attrs.get(RUN_ID)
    return None


def _tell_finalists(
    study: StoredStudy, chosen: StoredStudy, found: Finalists, runs: dict[int, str], tracking: Tracking
) -> None:
    ended = max(t.datetime_complete.timestamp() for t in chosen.trials() if t.datetime_complete is not None)
    parent = str(study.attrs[RUN_ID])
    tracking.client.log_dict(parent, table_record(study, found), ARTIFACT)
    winner, its_run = ("", "") if found.winner is None else (str(found.winner), runs.get(found.winner, ""))
    front = {"hpsearch.finalists_front": ", ".join(map(str, found.front))} if study.spec.several else {}
    tracking.annotate(parent, tags={WINNER: winner, WINNER_RUN: its_run, **front}, metrics={}, at=ended)
    for rank, row in enumerate(ranked(study, found), 1):
        if row.trial not in runs:
            continue
        figures = {"finalist_mean": row.mean, "finalist_spread": row.spread}
        figures |= {f"finalist_mean_{name}": mean for name, mean in zip(study.spec.ways, row.means, strict=False)}
        if row.trial == found.winner and found.expected is not None:
            figures |= {
                "expected": found.expected.mean,
                "expected_low": found.expected.low,
                "expected_high": found.expected.high,
            }
        _annotate(
            tracking,
            runs[row.trial],
            tags={FINALIST: found.verdict(row), "hpsearch.finalist_rank": str(rank)},
            metrics={key: value for key, value in figures.items() if value is not None},
            at=ended,
        )
    for number in _others(study, found):
        if number in runs:
            _annotate(tracking, runs[number], tags={FINALIST: "of another set"}, metrics={}, at=ended)


def _annotate(tracking: Tracking, run: str, *, tags: dict[str, str], metrics: dict[str, float], at: float) -> None:
    """Write to a trial's run. One that somebody deleted must not keep the others from being told."""
    try:
        tracking.annotate(run, tags=tags, metrics=metrics, at=at)
    except Exception as error:  # what is away is raised again; MLflow refuses by several types
        if is_away(error):
            raise
        log.warning("run %s is not told: %s", run, one_line(error))


def _others(study: StoredStudy, found: Finalists) -> set[int]:
    """Return the trials that are finalists of other sets only."""
    numbers: set[int] = set()
    for name in finalist_studies(study.engine, study.study_id):
        of = load_study(study.storage, name).spec.finalists_of
        numbers.update(of.trials if of is not None else [])
    return numbers - {row.trial for row in found.rows}


def table_record(study: StoredStudy, found: Finalists) -> dict[str, Any]:
    """Return the table as plain values, for a file."""
    rows = [{**dataclasses.asdict(row), "optimism": optimism(study, row)} for row in ranked(study, found)]
    return {
        "study": study.spec.name,
        "metric": f"val_{study.spec.metric}",
        "direction": study.spec.direction,
        "finalists": found.study,
        "seeds": list(found.seeds),
        "winner": found.winner,
        "tie": list(found.tie),
        **({"directions": study.spec.directions, "front": list(found.front)} if study.spec.several else {}),
        "standard_error_of_difference": found.error,
        "fresh_divisions": found.divided,
        "expected": None if found.expected is None else dataclasses.asdict(found.expected),
        "rows": rows,
    }
