"""``hpsearch doctor``: what a worker on this machine needs, checked."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(doctor)


def doctor(
    name: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="A study that a worker here is to join.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for scripts.")] = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> int:
    """Check what a worker on this machine needs: the services, the rights in them, disk, devices, versions; with
    STUDY, whether it can join that. Exit code 0 when nothing failed, 1 otherwise. Nothing is started.
    """
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.doctor.doctor import examine, finding_line, summary_line

    console, findings = PlainConsole(), []
    for finding in examine(
        name, storage_url=storage_url, tracking_uri=tracking_uri, checkpoint_url=checkpoint_url, home=home
    ):
        findings.append(finding)
        if not as_json:
            console.print(finding_line(finding, console.width if console.is_terminal else None))
    failed = any(finding.status == "failed" for finding in findings)
    if as_json:
        told = {"ok": not failed, "checks": [finding.to_dict() for finding in findings]}
        typer.echo(json.dumps(told, indent=2))
    else:
        console.print(summary_line(findings))
    return 1 if failed else 0
