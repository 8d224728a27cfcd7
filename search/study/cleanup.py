"""Find and remove the files of a study that are no longer needed, and delete studies.

Files of running and waiting trials, of registered model versions and of finalists are never removed. Files of trials
that are not among the best can be removed, because further trials only lower the rank of a trial.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_command, pluralize
from hpsearch.search.errors import SearchError
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import StudyCheckpoints, open_removable_checkpoints
from hpsearch.search.study.control import count_running
from hpsearch.search.study.folders import get_outbox_folder, get_runs_folder, remove_report
from hpsearch.search.study.study import StoredStudy, list_finalist_trials, load_companion
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import ATTEMPT, INFEASIBLE, REMOVED_BY, RUN_ID, TRACKING
from hpsearch.storage.database.locks import name_lock
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import compute_folder_bytes
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.disk_usage import RunStorage
from hpsearch.storage.mlflow.registry import Registry
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.records.test_evaluations import read_test_evaluation
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.history import read_finalist_studies, read_refit_studies
from hpsearch.storage.trials.lost_attempts import count_running_trials

KEPT_TOP_TRIALS = 5
_REMOVED_BY_GC = "hpsearch gc removed its model and its best checkpoint"

_ATTEMPT_DIR = re.compile(r"(\d{4,})-(\d+)")


@dataclass(frozen=True)
class Garbage:
    """Removable files of one kind.

    Attributes:
        study: name of the study.
        kind: description of the files.
        trials: numbers of the trials to which the files belong, in ascending order.
        size: size of all files in bytes.
        location: location of the files: "MLflow", "checkpoint store" or "this machine".
        remove: function that removes the files and returns the freed bytes. It keeps files that have become needed
            since the search for garbage.
    """

    study: str
    kind: str
    trials: tuple[int, ...]
    size: int
    location: str
    remove: Callable[[], int]


def find_garbage(
    study: StoredStudy,
    *,
    home: Path,
    tracking: Tracking | None,
    keep_top: int = KEPT_TOP_TRIALS,
    checkpoint_url: str | None = None,
) -> tuple[list[Garbage], list[str]]:
    """Return the removable files of a study, and an error text for each place that could not be searched.

    Args:
        study: the study.
        home: folder of the run folders and, unless the study has a checkpoint URL, of the checkpoints.
        tracking: client of the MLflow server; if None, files in MLflow are not searched.
        keep_top: number of best trials that keep their models.
        checkpoint_url: checkpoint URL of the command; None if the command was not given one.

    Raises:
        SearchError: the study's folder name is invalid.
    """
    found: list[Garbage] = []
    problems: list[str] = []
    runs = get_runs_folder(home / "runs", study)

    searches: tuple[Callable[[], list[Garbage]], ...] = (
        lambda: [] if tracking is None else _find_models(study, tracking, keep_top),
        lambda: _find_checkpoints(study, open_removable_checkpoints(study, home, checkpoint_url), runs),
        lambda: _find_run_dirs(study, runs),
    )
    for search in searches:
        try:
            found += search()
        # ValueError, TypeError: any worker can write rows that Optuna's classes do not accept.
        except (SearchError, StorageError, OSError, ValueError, TypeError) as error:
            problems.append(f"{study.spec.name}: {error}")
    return found, problems


def remove_garbage(found: list[Garbage]) -> tuple[int, list[str]]:
    """Remove files; return the freed bytes, and an error text for each entry that was not removed completely."""
    freed, problems = 0, []
    for garbage in found:
        try:
            freed += garbage.remove()
        except (StorageError, OSError) as error:
            problems.append(f"{garbage.study}: {garbage.kind}: not all files were removed: {error}")
        except KeyError:
            problems.append(f"{garbage.study}: nothing was removed, because the study was deleted meanwhile")
    return freed, problems


def _find_models(study: StoredStudy, tracking: Tracking, keep_top: int) -> list[Garbage]:
    """Return the models and best checkpoints of the trials that are not among the best `keep_top`."""
    run_id = study.attrs.get(RUN_ID)
    if study.spec.finalists_of is not None or run_id is None:
        return []  # finalists and refits are evidence for the winner
    storage, registry = RunStorage(tracking), Registry(tracking.client)
    best = _list_best(study, keep_top)
    ended = study.best_trials(infeasible=True)
    surplus = [trial for trial in ended if RUN_ID in trial.user_attrs and trial.number not in best]
    runs = storage.list_runs_with_files(str(run_id)) if surplus else {}
    needed = _list_needed(study)
    removable = [trial for trial in surplus if trial.user_attrs[RUN_ID] in runs and trial.number not in needed]
    candidates = {str(trial.user_attrs[RUN_ID]): trial for trial in removable}
    registered = {version.run_id for version in registry.list_versions_of_runs(list(candidates))}
    files = {run_id: storage.get_disk_usage(runs[run_id]) for run_id in candidates if run_id not in registered}
    files = {run_id: of_run for run_id, of_run in files.items() if of_run.model_id or of_run.checkpoint_bytes}
    if not files:
        return []

    def remove() -> int:
        links = RunLinks(study.engine)
        # Checked again, because a model may have been registered, or finalists chosen, since the confirmation prompt.
        # Finalists are chosen under the same lock, and never from marked trials.
        with name_lock(study.engine, study.spec.name):
            needed = _list_needed(study)
            left = {run_id: trial._trial_id for run_id, trial in candidates.items() if trial.number not in needed}
            left = {run_id: trial_id for run_id, trial_id in left.items() if run_id in files}
            links.set_attr_of_trials(left.values(), REMOVED_BY, _REMOVED_BY_GC)
        freed = 0
        try:
            for run_id in list(left):
                if not registry.list_versions_of_runs([run_id]):
                    storage.remove(files[run_id])
                    freed += files[run_id].model_bytes + files[run_id].checkpoint_bytes
                    del left[run_id]
        finally:
            links.remove_attr_of_trials(left.values(), REMOVED_BY)
        return freed

    size = sum(of_run.model_bytes + of_run.checkpoint_bytes for of_run in files.values())
    numbers = tuple(sorted(candidates[run_id].number for run_id in files))
    front = "the Pareto front and " if study.spec.is_multi_objective else ""
    kind = f"models and best checkpoints except those of {front}the best {keep_top} trials"
    return [Garbage(study.spec.name, kind, numbers, size, "MLflow", remove)]


def _list_best(study: StoredStudy, keep_top: int) -> set[int]:
    """Return the numbers of the best `keep_top` trials and, in a multi-objective study, of the Pareto front.

    Infeasible trials are included only if no trial is feasible.
    """
    best = study.best_trials() or study.best_trials(infeasible=True)
    front = study.front() if study.spec.is_multi_objective else []
    return {trial.number for trial in [*best[:keep_top], *front]}


def _list_needed(study: StoredStudy) -> set[int]:
    """Return the numbers of finalists (also of earlier sets), tested trials, and trials not fully in MLflow."""
    needed = list_finalist_trials(study)
    if (evaluation := read_test_evaluation(study.engine, study.study_id)) is not None:
        needed.add(evaluation.trial_number)
    needed.update(trial.number for trial in study.trials() if TRACKING in trial.user_attrs)
    return needed


def _find_checkpoints(study: StoredStudy, checkpoints: StudyCheckpoints, runs: Path) -> list[Garbage]:
    """Return leftover checkpoints of finished trials, for example after a crash at the end of a trial."""
    stored, local = checkpoints.find_leftovers(runs)

    def remove() -> int:
        stored, local = checkpoints.find_leftovers(runs)
        checkpoints.clean_up(runs)
        return sum(stored.values()) + sum(local.values())

    if not stored and not local:
        return []
    names = [Path(path).parent.name for path in [*stored, *map(str, local)]]
    numbers = tuple(sorted({int(name.partition("-")[0]) for name in names}))
    size = sum(stored.values()) + sum(local.values())
    kind = "leftover checkpoints of finished trials"
    return [Garbage(study.spec.name, kind, numbers, size, "checkpoint store", remove)]


def _find_run_dirs(study: StoredStudy, runs: Path) -> list[Garbage]:
    """Return this machine's removable run folders: those of an ended study, and those of superseded attempts."""
    trials = {trial.number: trial for trial in study.trials()}
    summary = summarise(study)
    has_ended = study.is_spent(summary.finished) and not summary.running and not summary.waiting
    done: dict[int, list[Path]] = {}
    superseded: dict[int, list[Path]] = {}
    for path in sorted(runs.iterdir()) if runs.is_dir() else []:
        match = _ATTEMPT_DIR.fullmatch(path.name)
        trial = trials.get(int(match[1])) if match else None
        if match is None or trial is None or not trial.state.is_finished():
            continue
        if int(match[2]) < int(trial.user_attrs.get(ATTEMPT, 1)):
            superseded.setdefault(trial.number, []).append(path)
        # Records that are not in MLflow exist only here. `retry` continues the logs of failed and infeasible trials.
        elif has_ended and trial.state != TrialState.FAIL and _is_tracked(trial):
            done.setdefault(trial.number, []).append(path)
    kinds = (("run folders with a copy in MLflow", done), ("run folders of superseded attempts", superseded))
    return [_make_folder_garbage(study, kind, folders) for kind, folders in kinds if folders]


def _is_tracked(trial: FrozenTrial) -> bool:
    return not trial.user_attrs.get(INFEASIBLE) and RUN_ID in trial.user_attrs and TRACKING not in trial.user_attrs


def _make_folder_garbage(study: StoredStudy, kind: str, folders: dict[int, list[Path]]) -> Garbage:
    def remove() -> int:
        active = {trial.number for trial in study.trials() if not trial.state.is_finished()}
        removable = [path for number, paths in folders.items() if number not in active for path in paths]
        freed = sum(map(compute_folder_bytes, removable))
        for path in removable:
            shutil.rmtree(path, ignore_errors=True)
        return freed

    size = sum(compute_folder_bytes(path) for paths in folders.values() for path in paths)
    return Garbage(study.spec.name, kind, tuple(sorted(folders)), size, "this machine", remove)


def list_studies_to_delete(study: StoredStudy) -> list[StoredStudy]:
    """Return the studies to delete, in this order: finalist studies, refit studies, and the search.

    The search is last, because its id is needed to find its finalist and refit studies.

    Raises:
        SearchError: one of the studies has running trials.
    """
    names = [read(study.engine, study.study_id) for read in (read_finalist_studies, read_refit_studies)]
    companions = [load_companion(study, name) for some in names for name in some]
    for each in (study, *companions):
        _require_idle(each.spec.name, count_running(each))
    return [*companions, study]


def _require_idle(name: str, running: int) -> None:
    if running:
        raise SearchError(
            f"study {name!r} has {pluralize(running, 'running trial')}; "
            f"stop the study first with {format_command('stop', name)}"
        )


def describe_deletion(study: StoredStudy) -> str:
    """Return a text that lists what `delete_study` would delete, for the confirmation prompt.

    Raises:
        SearchError: trials of the study, its finalists or its refits are running.
    """
    items = f"study {study.spec.name} with {pluralize(summarise(study).finished, 'finished trial')}"
    items += ", its finalist and refit studies" if len(list_studies_to_delete(study)) > 1 else ""
    evaluation = read_test_evaluation(study.engine, study.study_id)
    return items + (", and the record of its test evaluation" if evaluation else "")


def delete_damaged_study(storage: PostgresStorage, name: str) -> None:
    """Delete the database rows of a study with damaged attributes.

    Its files are kept, because the name of its folder may be damaged too.

    Raises:
        SearchError: the study has running trials.
    """
    study_id = storage.get_study_id_from_name(name)
    _require_idle(name, count_running_trials(storage.engine, study_id))
    storage.delete_study(study_id)


def delete_study(services: Services, study: StoredStudy) -> list[str]:
    """Delete a study with its finalist and refit studies, checkpoints and local files; return the deleted names.

    Raises:
        SearchError: trials of the study, its finalists or its refits are running, or the study's folder or checkpoint
            URL is not one that this command may remove. Nothing was deleted then.
        StorageError: the checkpoint store does not answer.
    """
    deleted = list_studies_to_delete(study)
    removable = {
        each.study_id: (
            open_removable_checkpoints(each, services.home, services.checkpoint_url),
            (
                get_runs_folder(services.home / "runs", each),
                get_outbox_folder(services.home, each),
                services.home / "logs" / each.folder,
            ),
        )
        for each in deleted
    }
    for each in deleted:
        checkpoints, folders = removable[each.study_id]
        checkpoints.delete()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        remove_report(services, each)
        each.storage.delete_study(each.study_id)  # last, so that the command can be repeated after an interruption
    return [each.spec.name for each in deleted]
