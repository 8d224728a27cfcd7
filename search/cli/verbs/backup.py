"""``hpsearch backup`` and ``hpsearch restore``: all that a search needs, in one file, and put back elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpsearch.search.cli import options as o

if TYPE_CHECKING:
    from hpsearch.storage.backup.archive import Manifest

OwnerUrl = Annotated[
    str | None,
    typer.Option(
        "--storage-url",
        envvar="HPSEARCH_OWNER_URL",
        show_envvar=True,
        help="Postgres of the studies, as the owner of its database; MLflow's is then that of "
        "MLFLOW_BACKEND_STORE_URI. Without it the embedded services are meant.",
    ),
]
Artifacts = Annotated[
    str | None,
    typer.Option(
        "--artifacts",
        help="With services of your own: the folder of MLflow's artifacts, as 'serve mlflow' has it.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the app."""
    app.command()(backup)
    app.command()(restore)


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, such as backup.tar.")],
    artifacts: Artifacts = None,
    no_artifacts: Annotated[
        bool,
        typer.Option("--no-artifacts", help="Leave out the artifacts' files, where they stay: their index is kept."),
    ] = False,
    studies_only: Annotated[bool, typer.Option("--studies-only", help="Leave out all that MLflow has.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    storage_url: OwnerUrl = None,
    home: o.Home = None,
) -> None:
    """Write all that searches need to go on elsewhere to one file; they may run meanwhile.

    That is the studies, MLflow's runs, models and artifacts, and the checkpoints in the home folder.
    """
    from rich.filesize import decimal

    from hpsearch.search.console import PlainConsole, steps
    from hpsearch.search.process import handling
    from hpsearch.storage.backup.backup import backup as make

    with handling((signal.SIGTERM,), _interrupt), steps(PlainConsole(stderr=True)) as tell:
        made = make(
            file,
            owner_url=storage_url,
            artifacts=artifacts,
            files=not no_artifacts,
            studies_only=studies_only,
            force=force,
            home=home,
            progress=tell,
        )
    typer.echo(f"{file}: {_counted(made.manifest)}, {decimal(made.size)}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What 'hpsearch backup' wrote.")],
    artifacts: Artifacts = None,
    storage_url: OwnerUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Put a backup back where there are no studies, runs and registered models yet; nothing is overwritten.

    Trials that were running wait for the next worker, which goes on with them.
    """
    from hpsearch.search.console import PlainConsole, command, steps
    from hpsearch.search.process import handling
    from hpsearch.search.services import MLFLOW_UI_URL
    from hpsearch.storage.backup.restore import restore as put_back

    with handling((signal.SIGTERM,), _interrupt), steps(PlainConsole(stderr=True)) as tell:
        done = put_back(
            file,
            owner_url=storage_url,
            artifacts=artifacts,
            tracking_uri=tracking_uri,
            ui_url=os.environ.get(MLFLOW_UI_URL),
            home=home,
            progress=tell,
        )
    typer.echo(f"restored {_counted(done.manifest)}, as they were at {done.manifest.made_at}")
    for study, url in done.checkpoints:
        typer.echo(f"the checkpoints of {study} are not in it, but in {url}")
    if done.left_out:
        typer.echo(f"{done.left_out} files of artifacts are not in it: they have to be where MLflow looks for them")
    typer.echo(f"go on with: {command('studies', *(('--home', home) if home else ()))}")


def _counted(manifest: Manifest) -> str:
    from hpsearch.search.console import counted

    studies = "1 study" if manifest.studies == 1 else f"{manifest.studies} studies"
    parts = [studies, counted(manifest.trials, "trial")]
    if manifest.with_mlflow:
        parts += [counted(manifest.runs, "run"), counted(manifest.models, "registered model")]
    return ", ".join(parts)


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001 as signal has it
    raise KeyboardInterrupt  # what was begun is removed
