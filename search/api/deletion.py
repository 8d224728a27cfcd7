"""Deleting a study with all that is its own: its finalists, their refits, checkpoints, and files on this machine."""

from __future__ import annotations

import shutil

from hpsearch.search.console import command, counted
from hpsearch.search.errors import SearchError
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.folders import outbox_folder, runs_folder
from hpsearch.search.study.steering import running_trials
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.summary import summarise
from hpsearch.storage.records.test_openings import read_opening
from hpsearch.storage.trials.finalist_sets import finalist_studies, refit_studies


def with_finalists(study: StoredStudy) -> list[StoredStudy]:
    """Return what is deleted with a study, in order: its finalists, the refits of their winners, and it itself.

    The search is the last: without it nobody would know whose the others are.

    Raises:
        SearchError: trials of one of them are running.
    """
    names = [of(study.engine, study.study_id) for of in (finalist_studies, refit_studies)]
    own = [load_study(study.storage, name) for some in names for name in some]
    for each in (study, *own):
        if alive := running_trials(each):
            raise SearchError(
                f"study {each.spec.name!r} has {counted(alive, 'running trial')}: "
                f"stop it first: {command('stop', each.spec.name)}"
            )
    return [*own, study]


def what_goes(study: StoredStudy) -> str:
    """Return what deleting a study takes away, for a question.

    Raises:
        SearchError: trials of it or of its finalists are running.
    """
    what = f"study {study.spec.name} with {counted(summarise(study).finished, 'finished trial')}"
    what += ", its finalists" if len(with_finalists(study)) > 1 else ""
    opened = read_opening(study.engine, study.study_id)
    return what + (", and the record that its test set was opened" if opened else "")


def delete_study(services: Services, study: StoredStudy, checkpoint_url: str | None) -> list[str]:
    """Delete a study with its finalists, checkpoints and files here; return the names of what was deleted.

    Raises:
        SearchError: trials of it or of its finalists are running.
        StorageError: the place for checkpoints does not answer.
    """
    gone = with_finalists(study)
    for each in gone:
        folders = runs_folder(services.home / "runs", each), outbox_folder(services.home, each)
        checkpoints = open_checkpoints(each, services.home, checkpoint_url)
        each.storage.delete_study(each.study_id)
        checkpoints.forget()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return [each.spec.name for each in gone]
