"""The parent run of a study: its creation by one of many processes, and its results."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa

from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import close_study
from hpsearch.search.tracking.tracker import open_parent_run
from hpsearch.storage.attributes import RUN_ID, RUN_URL, TRACKING_URI
from hpsearch.storage.database.locks import LockLostError, study_lock
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.runs_view import share_view
from tests.search.promotion.support import Tracked


@pytest.mark.timeout(50)  # after this time the server releases the lock
def test_a_frozen_creator_of_the_parent_run_blocks_only_workers_without_one(
    tracked: Tracked, tracking: Tracking
) -> None:
    tracked.stored.set_attr(TRACKING_URI, tracking.uri)
    made = open_parent_run(tracked.stored, tracking)
    with study_lock(tracked.stored.storage.engine, tracked.stored.study_id):
        assert open_parent_run(tracked.stored, tracking) == made


def test_another_browser_address_is_stored(tracked: Tracked, tracking: Tracking) -> None:
    made = open_parent_run(tracked.stored, tracking)
    elsewhere = Tracking(tracking.uri, ui_url="http://mlflow.example")
    assert open_parent_run(tracked.stored, elsewhere) == made
    assert tracked.stored.attrs[RUN_URL] == elsewhere.run_url(made)


def test_a_process_that_loses_the_lock_creates_no_second_run(
    tracked: Tracked, tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process freezes between its search for the run and the creation, and wakes up after it lost the lock."""
    study, runs = tracked.stored, tracking.client.search_runs
    study.set_attr(RUN_ID, None)

    def none_found(*args: object, **kwargs: object) -> object:
        found = runs(*args, **kwargs)
        with study.storage.engine.begin() as connection:
            connection.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database d ON d.oid = database "
                    "WHERE locktype = 'advisory' AND datname = current_database()"
                )
            )
        return found[:0]

    monkeypatch.setattr(tracking.client, "search_runs", none_found)
    monkeypatch.setattr(tracking, "_create_run", lambda *_: pytest.fail("it made a run"))
    with pytest.raises(LockLostError):
        open_parent_run(study, tracking)
    assert RUN_ID not in study.attrs


def test_the_result_of_a_study_has_a_course_a_description_and_a_view(own_tracked: Tracked, tracking: Tracking) -> None:
    parent = open_parent_run(own_tracked.stored, tracking)
    for _ in range(2):  # another process may close the study too
        close_study(own_tracked.stored, summarise(own_tracked.stored), tracking)
    values = [trial.value for trial in own_tracked.stored.trials() if trial.value is not None]
    course = tracking.client.get_metric_history(parent, "search_best_val_accuracy")
    best = [max(values[: count + 1]) for count in range(len(values))]
    assert [(point.step, point.value) for point in course] == list(enumerate(best, 1))
    run = tracking.client.get_run(parent)
    assert not [name for name in run.data.metrics if name.startswith("best_")], "it would be sorted among the trials"
    ends = [trial.datetime_complete for trial in own_tracked.stored.trials() if trial.datetime_complete is not None]
    assert run.info.end_time == int(max(ends).timestamp() * 1000), "not the time of the report"
    assert "Best: trial" in run.data.tags["mlflow.note.content"]
    finished = summarise(own_tracked.stored).finished
    assert run.data.tags["hpsearch.trials"] == own_tracked.stored.format_progress(finished).removesuffix(" trials")
    tags = tracking.client.get_experiment(tracking.experiment_id).tags
    view = json.loads(tags[f"mlflow.sharedViewState.{parent}"])
    shown = tracking.client.search_runs(
        [tracking.experiment_id], view["searchFilter"], order_by=[f"{view['orderByKey']} DESC"]
    )
    assert {run.info.run_id for run in shown} == {own_tracked.run_of(t.number) for t in own_tracked.stored.trials()}
    assert view["orderByKey"] == "metrics.`best_val_accuracy`"
    assert not view["orderByAsc"]


def test_the_view_of_thousands_of_parameters_fits_into_a_tag(tracking: Tracking) -> None:
    share_view(tracking, "f" * 32, metrics=["best_val_loss"], params=[f"width_{number}" for number in range(2000)])
    tags = tracking.client.get_experiment(tracking.experiment_id).tags
    view = tags[f"mlflow.sharedViewState.{'f' * 32}"]
    assert 19_900 < len(view) <= 20_000, "as many columns as fit"
    columns = json.loads(view)["selectedColumns"]
    assert {"attributes.`Duration`", "metrics.`best_val_loss`", "params.`width_0`"} < set(columns)
