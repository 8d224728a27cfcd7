"""``hpsearch secrets``: fresh passwords for Docker Compose."""

from __future__ import annotations

import secrets as random

import typer

NAMES = (
    "POSTGRES_PASSWORD",
    "HPSEARCH_OWNER_PASSWORD",
    "HPSEARCH_WORKER_PASSWORD",
    "MLFLOW_DB_PASSWORD",
    "HPSEARCH_LOGIN_PASSWORD",
    "HPSEARCH_S3_SECRET",
)


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(secrets)


def secrets() -> None:
    """Print a .env file of fresh random passwords for docker-compose.yml."""
    for name in NAMES:
        typer.echo(f"{name}={random.token_urlsafe(24)}")
