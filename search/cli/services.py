"""Commands for the services of a search: embedded stack, doctor, backups, migrations, containers."""

from __future__ import annotations

import json
import os
import secrets as random
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import SERVICES_SECTION, echo, register

if TYPE_CHECKING:
    from hpsearch.storage.backup.archive import Manifest


NO_AUTH_WARNING = "warning: --no-auth: everyone who can reach this address can change and delete all data"


@register(SERVICES_SECTION)
def up(
    *,
    auth: Annotated[
        bool | None,
        typer.Option(
            "--auth/--no-auth",
            help="Whether MLflow and the dashboard need the token of the installation; later starts keep the choice  "
            "[default: --auth]",
        ),
    ] = None,
    home: o.Home = None,
) -> None:
    """Start the embedded Postgres, MLflow and Optuna dashboard.

    The printed links contain the token with which a browser signs in, unless the output is a file that other users can
    read.
    """
    from hpsearch.search.console import PlainConsole, format_command, show_steps
    from hpsearch.search.private_output import find_exposure
    from hpsearch.search.process.signals import restore_handlers
    from hpsearch.search.services import DASHBOARD_COMMAND
    from hpsearch.storage.embedded import stack
    from hpsearch.storage.home import prepare_home
    from hpsearch.storage.web.token import add_token

    folder = prepare_home(home)
    try:
        with restore_handlers(), show_steps(PlainConsole(stderr=True)) as progress:
            _exit_on_signals()
            info = stack.up(folder, dashboard=DASHBOARD_COMMAND, needs_token=auth, progress=progress)
    except (KeyboardInterrupt, SystemExit):
        stop = format_command("down", *(("--home", home) if home else ()))
        echo(f"hpsearch: the services that have started keep running; stop them with: {stop}", err=True)
        raise
    if auth is False:
        echo(f"hpsearch: {NO_AUTH_WARNING}", err=True)
    if (exposure := find_exposure(sys.stdout)) is not None:
        echo(f"hpsearch: warning: the links have no token, because {exposure}", err=True)
    add = add_token if exposure is None else str
    echo(f"MLflow            {add(info.tracking_uri)}")
    echo(f"Optuna dashboard  {add(info.dashboard_url)}")
    echo(f"data              {info.home}")


@register(SERVICES_SECTION)
def down(
    *,
    now: Annotated[bool, typer.Option("--now", help="Do not stop the searches of this machine first")] = False,
    home: o.Home = None,
) -> None:
    """Stop the embedded services. Their data stays.

    The command first stops the searches of this machine, as Ctrl-C does.
    """
    from hpsearch.search.run.running import find_searches, stop_searches
    from hpsearch.storage.embedded import stack
    from hpsearch.storage.home import find_home

    folder = find_home(home)
    if searches := [] if now else find_searches(folder):
        names = ", ".join(f"{name} (process {running.pid})" for name, running in searches)
        echo(f"stopping the searches {names}; down --now skips the wait", err=True)
        if not stop_searches(searches):
            echo("hpsearch: not all searches have ended; their workers resume the trials at the next start", err=True)
    stopped = stack.down(folder)
    echo(f"stopped {', '.join(stopped)}" if stopped else "no embedded service was running")


@register(SERVICES_SECTION)
def status(home: o.Home = None) -> int:
    """Show the embedded services. Exit code 0 if all run, 3 otherwise."""
    from hpsearch.storage.embedded import stack
    from hpsearch.storage.home import find_home

    services = stack.read_status(find_home(home))
    for service in services:
        where = service.url or ""
        echo(f"{service.name:<16} {service.state:<8} {where} {service.detail}".rstrip())
    return 0 if all(service.state == "running" for service in services) else 3


@register(SERVICES_SECTION)
def doctor(
    name: Annotated[
        str | None,
        typer.Argument(metavar="STUDY", help="Study to include in the checks", autocompletion=o.complete_study),
    ] = None,
    *,
    import_objective: Annotated[
        bool, typer.Option("--import-objective", help="Import the code of the study's objective")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON")] = False,
    where: o.Addresses,
) -> int:
    """Check the prerequisites of a worker on this machine.

    Checks services, permissions, disk, devices and versions. With STUDY, also checks that a worker can join the study.
    Without --import-objective, the code of the study's objective is compared, but not imported.
    The command starts no services. Exit code 0 if no check failed, 1 otherwise.
    """
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.doctor.doctor import format_finding, format_status_counts, run_checks

    console, findings = PlainConsole(), []
    for finding in run_checks(name, import_objective=import_objective, **where):
        findings.append(finding)
        if not as_json:
            console.print(format_finding(finding, console.width if console.is_terminal else None))
    failed = any(finding.status == "failed" for finding in findings)
    if as_json:
        result = {"ok": not failed, "checks": [asdict(finding) for finding in findings]}
        echo(json.dumps(result, indent=2))
    else:
        console.print(format_status_counts(findings))
    return 1 if failed else 0


def _owner_url(help_suffix: str) -> Any:
    help_text = f"URL of the study database, with the role that owns its tables{help_suffix}"
    return typer.Option("--storage-url", envvar="HPSEARCH_OWNER_URL", show_envvar=True, help=help_text)


OwnerUrl = Annotated[str | None, _owner_url("; MLflow's is in MLFLOW_BACKEND_STORE_URI  [default: embedded services]")]
Artifacts = Annotated[str | None, typer.Option("--artifacts", help="Artifact folder of an external MLflow server")]


@register(SERVICES_SECTION)
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as backup.tar")],
    artifacts: Artifacts = None,
    no_artifacts: Annotated[bool, typer.Option("--no-artifacts", help="Exclude MLflow's artifact files")] = False,
    studies_only: Annotated[bool, typer.Option("--studies-only", help="Exclude all data of MLflow")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file")] = False,
    storage_url: OwnerUrl = None,
    home: o.Home = None,
) -> None:
    """Write studies, MLflow data and checkpoints to one file.

    The file includes MLflow's runs, models and artifacts, and the checkpoints in the home folder. Searches may run
    during the backup.
    """
    from rich.filesize import decimal

    from hpsearch.search.console import PlainConsole, show_steps
    from hpsearch.search.process.signals import restore_handlers
    from hpsearch.search.services import DASHBOARD_COMMAND
    from hpsearch.storage.backup.backup import backup as write_backup

    with restore_handlers(), show_steps(PlainConsole(stderr=True)) as progress:
        _exit_on_signals()
        done = write_backup(
            file,
            owner_url=storage_url,
            artifacts=artifacts,
            files=not no_artifacts,
            studies_only=studies_only,
            force=force,
            home=home,
            dashboard=DASHBOARD_COMMAND,
            progress=progress,
        )
    echo(f"wrote {file}: {_format_counts(done.manifest)}, {decimal(done.size)}")


def _exit_on_signals() -> None:
    """Let signals end the command as an exception, so that unfinished files are removed."""
    from hpsearch.search.process.signals import stop_on_signals

    for number in (signal.SIGTERM, signal.SIGHUP):
        stop_on_signals(number, request=partial(sys.exit, 128 + number))


@register(SERVICES_SECTION)
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Backup file, written by 'backup'")],
    artifacts: Artifacts = None,
    storage_url: OwnerUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Restore a backup into empty services.

    The command overwrites nothing: it rejects services that have studies, runs or registered models. The next worker
    resumes the trials that were running at the time of the backup.
    """
    from hpsearch.search.console import PlainConsole, format_command, show_steps
    from hpsearch.search.process.signals import restore_handlers
    from hpsearch.search.services import DASHBOARD_COMMAND, MLFLOW_UI_URL
    from hpsearch.storage.backup.restore import restore as restore_backup
    from hpsearch.storage.display import escape_line

    with restore_handlers(), show_steps(PlainConsole(stderr=True)) as progress:
        _exit_on_signals()
        done = restore_backup(
            file,
            owner_url=storage_url,
            artifacts=artifacts,
            tracking_uri=tracking_uri,
            ui_url=os.environ.get(MLFLOW_UI_URL),
            home=home,
            dashboard=DASHBOARD_COMMAND,
            progress=progress,
        )
    at = ("--home", home) if home else ()
    echo(f"restored {_format_counts(done.manifest)}, from the backup of {escape_line(done.manifest.made_at)}")
    for study, url in done.external_checkpoints:
        echo(f"the backup has no checkpoints of study {study}, because they are stored at {url}")
    for study in done.unsent_studies:
        echo(f"MLflow lacks trial data of study {study}; send it with: {format_command('sync', study, *at)}")
    if done.missing_files:
        echo(f"{done.missing_files} artifact files are not in the backup; copy them to MLflow's artifact folder")
    echo(f"commands import no objective file of a study before you confirm it with: {format_command('trust', 'STUDY')}")
    echo(f"list the studies with: {format_command('studies', *at)}")


def _format_counts(manifest: Manifest) -> str:
    from hpsearch.search.console import pluralize

    studies = "1 study" if manifest.studies == 1 else f"{manifest.studies} studies"
    parts = [studies, pluralize(manifest.trials, "trial")]
    if manifest.has_mlflow:
        parts += [pluralize(manifest.runs, "MLflow run"), pluralize(manifest.models, "registered model")]
    return ", ".join(parts)


@register(SERVICES_SECTION)
def migrate(
    storage_url: Annotated[str | None, _owner_url("")] = None,
    bootstrap: Annotated[
        bool,
        typer.Option(
            "--bootstrap",
            help="First create the databases and roles, with the superuser URL in HPSEARCH_ADMIN_URL and the passwords "
            "in HPSEARCH_OWNER_PASSWORD, HPSEARCH_WORKER_PASSWORD and MLFLOW_DB_PASSWORD",
        ),
    ] = False,
    worker_role: Annotated[
        list[str] | None,
        typer.Option(
            "--worker-role",
            metavar="ROLE",
            help="Give this existing role of workers access to the database (repeatable); in a database of the role "
            "hpsearch_owner, hpsearch_worker and hpsearch_access have access without this option",
        ),
    ] = None,
) -> None:
    """Create or upgrade the database tables.

    The embedded services do this when they start. Repeated and concurrent calls have no other effect.
    """
    from hpsearch.redaction import redact
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.database.migrate import migrate as migrate_tables
    from hpsearch.storage.database.roles import create_databases

    url = storage_url
    if bootstrap:
        databases = create_databases(
            _required("HPSEARCH_ADMIN_URL"),
            owner_password=_required("HPSEARCH_OWNER_PASSWORD"),
            worker_password=_required("HPSEARCH_WORKER_PASSWORD"),
            mlflow_password=_required("MLFLOW_DB_PASSWORD"),
        )
        url = databases.owner_url
    if url is None:
        raise SearchError("--storage-url is missing; give the database's URL, or set HPSEARCH_OWNER_URL")
    for warning in migrate_tables(url, worker_roles=worker_role or ()):
        echo(f"hpsearch: warning: {warning}", err=True)
    echo(f"the tables of {redact(url)} are up to date")


def _required(name: str) -> str:
    from hpsearch.search.errors import SearchError

    if value := os.environ.get(name):
        return value
    raise SearchError(f"--bootstrap needs the environment variable {name}; set this variable")


SECRET_NAMES = (
    "POSTGRES_PASSWORD",
    "HPSEARCH_OWNER_PASSWORD",
    "HPSEARCH_WORKER_PASSWORD",
    "MLFLOW_DB_PASSWORD",
    "HPSEARCH_LOGIN_PASSWORD",
    "HPSEARCH_WEB_TOKEN",
    "HPSEARCH_S3_SECRET",
    "HPSEARCH_S3_ARTIFACTS_SECRET",
    "HPSEARCH_S3_CHECKPOINTS_SECRET",
)


@register(SERVICES_SECTION)
def secrets() -> None:
    """Print a .env file of random passwords for Docker Compose.

    If the output is redirected to a file, it must be private: (umask 077; hpsearch secrets > .env).
    """
    _require_private_output()
    for name in SECRET_NAMES:
        echo(f"{name}={random.token_urlsafe(24)}")


def _require_private_output() -> None:
    """Reject an output that other users can read.

    Raises:
        SearchError: the output is a file, pipe or terminal of another user, or a file that others can open.
    """
    from hpsearch.search.errors import SearchError
    from hpsearch.search.private_output import find_exposure

    if (exposure := find_exposure(sys.stdout)) is not None:
        raise SearchError(f"{exposure}; remove an existing .env, and run: (umask 077; hpsearch secrets > .env)")
