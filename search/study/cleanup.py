"""What a study keeps that nobody will ask for again: found, shown, and removed when somebody says so.

Never touched is what a trial that runs or waits needs, what a registered version refers to, and what belongs to a
finalist. A trial that is not among the best stays so: others may only push it further down.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.study.checkpoints import StudyCheckpoints, open_checkpoints
from hpsearch.search.study.study import StoredStudy, get_runs_folder, list_finalist_trials
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import ATTEMPT, INFEASIBLE, REMOVED, RUN_ID, TRACKING
from hpsearch.storage.database.locks import name_lock
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import compute_folder_bytes
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.disk_usage import RunStorage
from hpsearch.storage.mlflow.registry import Registry
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.records.test_evaluations import read_test_evaluation

KEEP_TOP = 5
_BY_GC = "hpsearch gc removed its model and its best checkpoint"

_ATTEMPT_DIR = re.compile(r"(\d{4,})-(\d+)")


@dataclass(frozen=True)
class Garbage:
    """Things of one kind that can go.

    Attributes:
        study: whose they are.
        what: for a person to read.
        trials: numbers of the trials that they are of, in order.
        size: bytes.
        where: "MLflow", "checkpoint store" or "this machine".
        remove: removes them; returns the bytes that were freed, which are fewer where something is needed by now.
    """

    study: str
    what: str
    trials: tuple[int, ...]
    size: int
    where: str
    remove: Callable[[], int]


def find_garbage(
    study: StoredStudy, *, home: Path, tracking: Tracking | None, keep_top: int = KEEP_TOP
) -> tuple[list[Garbage], list[str]]:
    """Return what can go of a study, and a line for each place that could not be looked at.

    Args:
        study: the study.
        home: the folder that holds run directories and, unless the study says otherwise, checkpoints.
        tracking: the MLflow server; None leaves out what is there.
        keep_top: how many of the best trials keep their models.
    """
    found: list[Garbage] = []
    problems: list[str] = []
    runs = get_runs_folder(home / "runs", study)

    searches: tuple[Callable[[], list[Garbage]], ...] = (
        lambda: [] if tracking is None else _models(study, tracking, keep_top),
        lambda: _checkpoints(study, open_checkpoints(study, home, None), runs),
        lambda: _run_dirs(study, runs),
    )
    for search in searches:
        try:
            found += search()
        except (StorageError, OSError) as error:
            problems.append(f"{study.spec.name}: {error}")
    return found, problems


def remove_garbage(found: list[Garbage]) -> tuple[int, list[str]]:
    """Remove it; return the bytes that were freed, and a line for each thing that could not be removed."""
    freed, problems = 0, []
    for garbage in found:
        try:
            freed += garbage.remove()
        except (StorageError, OSError) as error:
            problems.append(f"{garbage.study}: {garbage.what} stay, or some of them: {error}")
        except KeyError:
            problems.append(f"{garbage.study}: the study was deleted meanwhile")
    return freed, problems


def _models(study: StoredStudy, tracking: Tracking, keep_top: int) -> list[Garbage]:
    """Return the models and best checkpoints of trials beyond the best ones."""
    if study.spec.finalists_of is not None or RUN_ID not in study.attrs:
        return []  # what was trained to confirm a choice stays with it
    storage, registry = RunStorage(tracking), Registry(tracking.client)
    stay = _best(study, keep_top)
    ended = study.best_trials(infeasible=True)
    surplus = [trial for trial in ended if RUN_ID in trial.user_attrs and trial.number not in stay]
    runs = storage.list_runs_with_files(str(study.attrs[RUN_ID])) if surplus else {}
    needed = _needed_trials(study)
    candidates = {
        str(trial.user_attrs[RUN_ID]): trial
        for trial in surplus
        if trial.user_attrs[RUN_ID] in runs and trial.number not in needed
    }
    registered = {version.run_id for version in registry.list_versions_of_runs(list(candidates))}
    kept = {run_id: storage.inspect(runs[run_id]) for run_id in candidates if run_id not in registered}
    kept = {run_id: there for run_id, there in kept.items() if there.model_id or there.checkpoint_bytes}
    if not kept:
        return []

    def remove() -> int:
        links = RunLinks(study.engine)
        # Asked again: between the showing and the answer somebody may have registered one, or begun with finalists.
        # Those are chosen under the same lock, and not from what is marked.
        with name_lock(study.engine, study.spec.name):
            needed = _needed_trials(study)
            left = {run_id: trial._trial_id for run_id, trial in candidates.items() if trial.number not in needed}
            left = {run_id: trial_id for run_id, trial_id in left.items() if run_id in kept}
            links.set_attr_of_trials(left.values(), REMOVED, _BY_GC)
        freed = 0
        try:
            for run_id in list(left):
                if not registry.list_versions_of_runs([run_id]):
                    storage.remove(kept[run_id])
                    freed += kept[run_id].model_bytes + kept[run_id].checkpoint_bytes
                    del left[run_id]
        finally:
            links.remove_attr_of_trials(left.values(), REMOVED)
        return freed

    size = sum(there.model_bytes + there.checkpoint_bytes for there in kept.values())
    numbers = tuple(sorted(candidates[run_id].number for run_id in kept))
    front = "the front and " if study.spec.is_multi_objective else ""
    what = f"models and best checkpoints beyond {front}the best {keep_top}"
    return [Garbage(study.spec.name, what, numbers, size, "MLflow", remove)]


def _best(study: StoredStudy, keep_top: int) -> set[int]:
    """Return the trials whose models stay for what they scored: of several metrics all of the front are among them.

    Those that break a constraint are, where no trial keeps to it.
    """
    best = study.best_trials() or study.best_trials(infeasible=True)
    front = study.front() if study.spec.is_multi_objective else []
    return {trial.number for trial in [*best[:keep_top], *front]}


def _needed_trials(study: StoredStudy) -> set[int]:
    """Return the trials that were ever finalists, or that the test set was opened for."""
    needed = list_finalist_trials(study)
    if (opening := read_test_evaluation(study.engine, study.study_id)) is not None:
        needed.add(opening.trial_number)
    # What is on its way to MLflow would find half of it gone.
    needed.update(trial.number for trial in study.trials() if TRACKING in trial.user_attrs)
    return needed


def _checkpoints(study: StoredStudy, checkpoints: StudyCheckpoints, runs: Path) -> list[Garbage]:
    """Return the checkpoints that trials which have ended left behind, such as when their worker died just then."""
    stored, local = checkpoints.leftovers(runs)

    def remove() -> int:
        stored, local = checkpoints.leftovers(runs)
        checkpoints.tidy(runs)
        return sum(stored.values()) + sum(local.values())

    if not stored and not local:
        return []
    names = [Path(path).parent.name for path in [*stored, *map(str, local)]]
    numbers = tuple(sorted({int(name.partition("-")[0]) for name in names}))
    size = sum(stored.values()) + sum(local.values())
    what = "checkpoints that trials which have ended left"
    return [Garbage(study.spec.name, what, numbers, size, "checkpoint store", remove)]


def _run_dirs(study: StoredStudy, runs: Path) -> list[Garbage]:
    """Return the run directories here of a study that has ended, and those of attempts that came to nothing."""
    trials = {trial.number: trial for trial in study.trials()}
    summary = summarise(study)
    over = study.is_spent(summary.finished) and not summary.running and not summary.waiting
    done: dict[int, list[Path]] = {}
    abandoned: dict[int, list[Path]] = {}
    for path in sorted(runs.iterdir()) if runs.is_dir() else []:
        match = _ATTEMPT_DIR.fullmatch(path.name)
        trial = trials.get(int(match[1])) if match else None
        if match is None or trial is None or not trial.state.is_finished():
            continue
        if int(match[2]) < int(trial.user_attrs.get(ATTEMPT, 1)):
            abandoned.setdefault(trial.number, []).append(path)
        # What did not reach MLflow is nowhere else; a failed or infeasible trial may go on with its logs.
        elif over and trial.state != TrialState.FAIL and _is_tracked(trial):
            done.setdefault(trial.number, []).append(path)
    kinds = (("run directories, which MLflow has", done), ("directories of attempts that were given up", abandoned))
    return [_folders(study, what, folders) for what, folders in kinds if folders]


def _is_tracked(trial: FrozenTrial) -> bool:
    return not trial.user_attrs.get(INFEASIBLE) and RUN_ID in trial.user_attrs and TRACKING not in trial.user_attrs


def _folders(study: StoredStudy, what: str, folders: dict[int, list[Path]]) -> Garbage:
    paths = [path for some in folders.values() for path in some]

    def remove() -> int:
        alive = {trial.number for trial in study.trials() if not trial.state.is_finished()}
        gone = [path for number, some in folders.items() if number not in alive for path in some]
        freed = sum(map(compute_folder_bytes, gone))
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return freed

    size = sum(map(compute_folder_bytes, paths))
    return Garbage(study.spec.name, what, tuple(sorted(folders)), size, "this machine", remove)
