"""The parent run of a study, which all of its processes ask for."""

from __future__ import annotations

from search.parent_run import open_parent_run
from search.study import TRACKING_URI
from storage.locks import study_lock
from storage.tracking import Tracking
from tests.search.promoting import Tracked


def test_a_frozen_process_that_makes_the_parent_run_holds_up_only_those_who_have_none(
    tracked: Tracked, tracking: Tracking
) -> None:
    tracked.handle.set_attr(TRACKING_URI, tracking.uri)
    made = open_parent_run(tracked.handle, tracking)
    with study_lock(tracked.handle.storage.engine, tracked.handle.study_id):
        assert open_parent_run(tracked.handle, tracking) == made
