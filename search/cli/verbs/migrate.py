"""``hpsearch migrate``: databases, roles and tables, in one step and safe to repeat."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(migrate)


def migrate(
    storage_url: Annotated[
        str | None,
        typer.Option(
            "--storage-url",
            envvar="HPSEARCH_OWNER_URL",
            show_envvar=True,
            help="Postgres of the studies, as the owner of its database.",
        ),
    ] = None,
    bootstrap: Annotated[
        bool,
        typer.Option(
            "--bootstrap",
            help="First create the databases and roles, as the superuser of HPSEARCH_ADMIN_URL, with the passwords "
            "of HPSEARCH_OWNER_PASSWORD, HPSEARCH_WORKER_PASSWORD and MLFLOW_DB_PASSWORD.",
        ),
    ] = False,
) -> None:
    """Create or upgrade the tables; the embedded stack does it by itself. Safe to repeat, and many at once."""
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.database.migrate import migrate as migrate_tables
    from hpsearch.storage.database.roles import create_databases
    from hpsearch.storage.urls import redact

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
        raise SearchError("--storage-url is missing: give the database, or set HPSEARCH_OWNER_URL")
    migrate_tables(url)
    typer.echo(f"tables are up to date at {redact(url)}")


def _required(name: str) -> str:
    from hpsearch.search.errors import SearchError

    if value := os.environ.get(name):
        return value
    raise SearchError(f"{name} is not set: --bootstrap needs it")
