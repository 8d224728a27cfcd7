"""Cleanup lists and removes superfluous files. It keeps needed ones, also if they become needed after the listing."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from optuna.trial import TrialState, create_trial

from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evaluate_test import choose_candidate, evaluate_on_test_set
from hpsearch.search.promotion.promote import promote
from hpsearch.search.study.cleanup import Garbage, find_garbage
from hpsearch.search.study.folders import get_runs_folder
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import ATTEMPT, CHECKPOINT_URL, REMOVED_BY, RUN_ID, TRACKING
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.disk_usage import RunDiskUsage, RunStorage
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.promotion.support import Tracked, train_finalists


def find(tracked: Tracked, home: Path, *, keep_top: int = 1) -> list[Garbage]:
    store = str(home / "store")
    found, problems = find_garbage(
        tracked.stored, home=home, tracking=tracked.tracking, keep_top=keep_top, checkpoint_url=store
    )
    assert problems == []
    return found


def on_server(found: list[Garbage]) -> list[int]:
    return [number for garbage in found if garbage.location == "MLflow" for number in garbage.trials]


def has_model(tracked: Tracked, trial: int) -> bool:
    try:
        tracked.client.get_logged_model(tracked.model_of(trial))
    except MlflowException:
        return False
    return True


def files_of(stack: StackInfo, tracked: Tracked, trial: int) -> set[str]:
    """Return the files of a trial's model and run on the server's disk."""
    folders = [*(stack.home / "artifacts").glob(f"*/models/{tracked.model_of(trial)}")]
    folders += (stack.home / "artifacts").glob(f"*/{tracked.run_of(trial)}")
    return {path.name for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_models_beyond_the_best_are_removed_with_their_files(
    own_tracked: Tracked, tmp_path: Path, stack: StackInfo, database_url: str
) -> None:
    (garbage,) = find(own_tracked, tmp_path)
    assert garbage.trials == (0, 2)
    assert garbage.size == 2 * 2 * 1000
    assert [has_model(own_tracked, trial) for trial in range(3)] == [True, True, True], "finding removes nothing"
    assert garbage.remove() == 4000
    assert [has_model(own_tracked, trial) for trial in range(3)] == [False, True, False]
    assert files_of(stack, own_tracked, 0) == {"config.yaml"}
    assert files_of(stack, own_tracked, 1) == {"config.yaml", "best.pt"}
    assert find(own_tracked, tmp_path) == []
    again = load_study(open_storage(database_url, application_name="another process"), own_tracked.stored.spec.name)
    with pytest.raises(SearchError, match=r"MLflow has no model of this trial \(hpsearch gc removed its model"):
        promote(again, own_tracked.tracking, trial=2)
    with pytest.raises(
        SearchError, match=r"trial 2 were deleted \(hpsearch gc removed .*the test set was not evaluated"
    ):
        evaluate_on_test_set(again, choose_candidate(again, trial=2, unconfirmed=True), own_tracked.tracking)


def test_registered_models_and_finalists_are_kept(tracked: Tracked, tmp_path: Path) -> None:
    promote(tracked.stored, tracked.tracking, trial=0)
    tracked.client.delete_registered_model_alias(tracked.name, "champion")
    assert on_server(find(tracked, tmp_path)) == [2], "a registered version needs no alias"
    train_finalists(tracked, [1, 2], winner=1)
    assert on_server(find(tracked, tmp_path)) == []


def test_files_that_become_needed_after_the_listing_are_kept(tracked: Tracked, tmp_path: Path) -> None:
    (garbage,) = find(tracked, tmp_path)
    promote(tracked.stored, tracked.tracking, trial=0)
    train_finalists(tracked, [1, 2], winner=1)
    assert garbage.remove() == 0
    assert has_model(tracked, 0)
    assert has_model(tracked, 2)


def test_failed_removals_are_not_counted(
    own_tracked: Tracked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    (garbage,) = find(own_tracked, tmp_path)
    remove, removed = RunStorage.remove, []

    def first_only(storage: RunStorage, kept: RunDiskUsage) -> None:
        if removed:
            raise StorageError("MLflow is away")
        remove(storage, kept)
        removed.append(kept.run_id)

    monkeypatch.setattr(RunStorage, "remove", first_only)
    with pytest.raises(StorageError, match="MLflow is away"):
        garbage.remove()
    again = load_study(open_storage(database_url, application_name="another process"), own_tracked.stored.spec.name)
    marked = [trial.user_attrs[RUN_ID] for trial in again.trials() if REMOVED_BY in trial.user_attrs]
    assert marked == removed


def test_an_interrupted_removal_is_completed_by_several_commands_at_once(
    own_tracked: Tracked, tmp_path: Path, stack: StackInfo
) -> None:
    folder = next((stack.home / "artifacts").glob(f"*/models/{own_tracked.model_of(0)}"))
    shutil.rmtree(folder)  # the files are gone, the model is still listed
    (garbage,) = find(own_tracked, tmp_path)
    assert garbage.trials == (0, 2)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: garbage.remove(), range(4)))
    assert not has_model(own_tracked, 0)


@pytest.fixture
def runs(tracked: Tracked, tmp_path: Path) -> Path:
    """Create local run directories of trials 0 to 2, also of a failed attempt of the first one."""
    folder = get_runs_folder(tmp_path / "runs", tracked.stored)
    for name in ("0000-1", "0001-1", "0002-1", "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.log").write_bytes(b"x" * 10)
    return folder


def left(runs: Path) -> list[str]:
    return sorted(path.name for path in runs.iterdir())


def test_run_dirs_of_an_ended_study_are_removed(tracked: Tracked, runs: Path, tmp_path: Path) -> None:
    (garbage,) = find(tracked, tmp_path, keep_top=9)
    assert (garbage.location, garbage.trials, garbage.size) == ("this machine", (0, 1, 2), 30)
    assert garbage.remove() == 30
    assert left(runs) == ["notes"]


def test_run_dirs_of_a_live_study_or_without_a_copy_in_mlflow_are_kept(
    tracked: Tracked, runs: Path, tmp_path: Path
) -> None:
    import_trial = create_trial(state=TrialState.WAITING)
    tracked.storage.import_trials(tracked.stored.study_id, [import_trial])
    assert find(tracked, tmp_path, keep_top=9) == []


def test_run_dirs_of_superseded_attempts_are_removed_while_the_study_runs(tracked: Tracked, tmp_path: Path) -> None:
    run = tracked.run_of(0)
    attrs = {"hpsearch:mlflow_run_id": run, ATTEMPT: 3, TRACKING: "missing"}
    tracked.storage.import_trials(
        tracked.stored.study_id,
        [create_trial(value=0.1, user_attrs=attrs), create_trial(state=TrialState.RUNNING, user_attrs={ATTEMPT: 2})],
    )
    folder = get_runs_folder(tmp_path / "runs", tracked.stored)
    for name in ("0004-1", "0004-2", "0004-3", "0005-1", "0005-2"):
        (folder / name).mkdir(parents=True)
    (garbage,) = find(tracked, tmp_path, keep_top=9)
    assert garbage.trials == (4,)
    garbage.remove()
    assert left(folder) == ["0004-3", "0005-1", "0005-2"]


def test_leftover_checkpoints_are_removed(tracked: Tracked, tmp_path: Path) -> None:
    store = tmp_path / "store"
    tracked.stored.set_attr(CHECKPOINT_URL, str(store))
    tracked.storage.import_trials(tracked.stored.study_id, [create_trial(state=TrialState.RUNNING)])
    for trial in ("0000", "0004"):
        path = store / tracked.stored.folder / trial / "0003-1.pt"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 7)
    (garbage,) = find(tracked, tmp_path, keep_top=9)
    assert (garbage.location, garbage.trials, garbage.size) == ("checkpoint store", (0,), 7)
    assert garbage.remove() == 7
    assert [path.parent.name for path in store.rglob("*.pt")] == ["0004"], "what a running trial needs stays"


def test_an_unreachable_store_is_reported_and_other_files_are_found(
    tracked: Tracked, runs: Path, tmp_path: Path
) -> None:
    tracked.stored.set_attr(CHECKPOINT_URL, "nosuch://x")
    found, problems = find_garbage(tracked.stored, home=tmp_path, tracking=None, checkpoint_url="nosuch://x")
    assert [garbage.location for garbage in found] == ["this machine"]
    (problem,) = problems
    assert "unknown protocol 'nosuch'" in problem


def test_files_that_mlflow_has_not_received_are_kept(tracked: Tracked, tmp_path: Path, database_url: str) -> None:
    assert on_server(find(tracked, tmp_path)) == [0, 2]
    with RunLinks(tracked.storage.engine).lock_run(tracked.stored.trials()[2]._trial_id) as page:
        page.set_attrs({TRACKING: "pending: records not yet sent from elsewhere"})
    study = load_study(open_storage(database_url, application_name="test"), tracked.name)
    found, _ = find_garbage(study, home=tmp_path, tracking=tracked.tracking, keep_top=1)
    assert on_server(found) == [0]
