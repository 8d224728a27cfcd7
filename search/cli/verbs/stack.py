"""``hpsearch up``, ``down`` and ``status``: the embedded services."""

from __future__ import annotations

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verbs to the app."""
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(home: o.Home = None) -> None:
    """Start the embedded Postgres, MLflow server and Optuna dashboard, or find them running."""

    from hpsearch.search.console import PlainConsole, steps
    from hpsearch.storage.embedded import stack
    from hpsearch.storage.home import home_dir

    with steps(PlainConsole(stderr=True)) as tell:
        info = stack.up(home_dir(home), progress=tell)
    typer.echo(f"MLflow            {info.tracking_uri}")
    typer.echo(f"Optuna dashboard  {info.dashboard_url}")
    typer.echo(f"data              {info.home}")


def down(home: o.Home = None) -> None:
    """Stop the embedded services; everything they hold stays for the next start."""
    from hpsearch.storage.embedded import stack
    from hpsearch.storage.home import home_dir

    stopped = stack.down(home_dir(home))
    typer.echo(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


def status(home: o.Home = None) -> int:
    """Show the embedded services; exit code 0 when all run, 3 when not."""
    from hpsearch.storage.embedded import stack
    from hpsearch.storage.home import home_dir

    services = stack.status(home_dir(home))
    for service in services:
        where = service.url or ""
        typer.echo(f"{service.name:<16} {service.state:<8} {where} {service.detail}".rstrip())
    return 0 if all(service.state == "running" for service in services) else 3
