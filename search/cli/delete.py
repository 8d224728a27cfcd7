"""``hpsearch delete``: a study with its trials and checkpoints."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from search.cli import options as o
from search.cli.confirm import confirm


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(delete)


def delete(
    name: o.StudyName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage_url: o.StorageUrl = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> None:
    """Delete a study with its trials, finalists, checkpoints and files on this machine; what is in MLflow stays."""
    from search.cli.open_study import open_for_reading
    from search.console import command, counted
    from search.errors import SearchError
    from search.study.checkpoints import open_checkpoints
    from search.study.folders import runs_folder
    from search.study.study import load_study
    from search.study.summary import summarise
    from search.tracking.tracker import outbox_folder
    from storage.records.test_openings import read_opening
    from storage.study_storage.opening import engine_of
    from storage.trials.claims import running_now
    from storage.trials.finalist_sets import finalist_studies

    services, storage = open_for_reading(storage_url, None, home)
    study = load_study(storage, name)
    of_finalists = [load_study(storage, each) for each in finalist_studies(engine_of(storage), study.study_id)]
    for each in (study, *of_finalists):
        if alive := running_now(engine_of(storage), each.study_id):
            raise SearchError(
                f"study {each.spec.name!r} has {counted(alive, 'running trial')}: "
                f"stop it first: {command('stop', each.spec.name)}"
            )
    if not yes:
        what = f"study {name} with {counted(summarise(study).finished, 'finished trial')}"
        what += ", its finalists" if of_finalists else ""
        what += (
            ", and the record that its test set was opened" if read_opening(engine_of(storage), study.study_id) else ""
        )
        if not confirm(f"delete {what}?"):
            raise typer.Abort
    for each in (*of_finalists, study):  # the search last: without it nobody would know whose finalists the others are
        folders = runs_folder(services.home / "runs", each), outbox_folder(services.home, each)
        checkpoints = open_checkpoints(each, services.home, checkpoint_url)
        storage.delete_study(each.study_id)
        checkpoints.forget()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        typer.echo(f"deleted {each.spec.name}; its runs in MLflow stay")
