"""``hpsearch delete``: a study with its trials and checkpoints."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(delete)


def delete(
    study: o.StudyName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage_url: o.StorageUrl = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> None:
    """Delete a study with its trials, checkpoints and files on this machine; its runs and models in MLflow stay."""
    from search.cli.read import open_for_reading
    from search.errors import SearchError
    from search.study import load_study
    from search.study_checkpoints import open_checkpoints
    from search.summary import summarise
    from search.tracker import outbox_folder
    from search.worker import runs_folder
    from storage.claims import running_now
    from storage.studies import engine_of

    services, storage = open_for_reading(storage_url, None, home)
    handle = load_study(storage, study)
    summary = summarise(handle)
    if alive := running_now(engine_of(storage), handle.study_id):
        raise SearchError(f"study {study!r} has {alive} running trials: stop it first: hpsearch stop {study}")
    if not yes:
        typer.confirm(f"delete study {study} with {summary.finished} finished trials?", abort=True)
    runs, outbox = runs_folder(services.home / "runs", handle), outbox_folder(services.home, handle)
    checkpoints = open_checkpoints(handle, services.home, checkpoint_url)
    storage.delete_study(handle.study_id)
    checkpoints.forget()
    for folder in (runs, outbox):
        shutil.rmtree(folder, ignore_errors=True)
    typer.echo(f"deleted {study}; its runs in MLflow stay")
