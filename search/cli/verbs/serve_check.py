"""``hpsearch serve-check``: a registered model, loaded as it is served, scores what was recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command(name="serve-check")(serve_check)


def serve_check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="NAME@ALIAS (digits@champion) or NAME/VERSION.")],
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="How far the score may be from the recorded one.")
    ] = 1e-6,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> int:
    """Load a registered model in a new process without this project's code, and score the validation split with it.

    A model that cannot be exported is its checkpoint, and is loaded by the objective's code.

    Exit code 0 when it scores what its trial recorded, 1 when it does not.
    """
    from hpsearch.search.errors import SearchError
    from hpsearch.search.promotion.serve_check import serve_check as check
    from hpsearch.search.services import find_services
    from hpsearch.storage.study_storage.storage import open_storage

    services = find_services(storage_url, tracking_uri, home=home)
    if services.tracking_uri is None:
        raise SearchError("--tracking-uri is missing: give the MLflow server that has the model")
    storage = open_storage(services.storage_url, application_name="hpsearch serve-check")
    done = check(storage, services.open_tracking(), model, tolerance=tolerance)
    typer.echo(f"version {done.version.number} of {done.version.model}: trial {done.trial} of study {done.study}")
    typer.echo(f"recorded   val {done.metric} {done.recorded:.9g}")
    if done.scored is not None:
        typer.echo(f"as served  val {done.metric} {done.scored:.9g}")
    if done.why:
        typer.echo(f"not reproduced: {done.why}")
        return 1
    if done.weights_only:
        typer.echo(f"reproduced by the objective's code: the model cannot be exported ({done.weights_only})")
    else:
        typer.echo("reproduced, in a process without this project's code")
    return 0
