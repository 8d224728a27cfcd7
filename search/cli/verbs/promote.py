"""``hpsearch promote``: a trial's model gets the name that programs load it by."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.process import EXIT_INTERRUPTED


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(promote)


def promote(
    name: o.StudyName,
    *,
    trial: Annotated[
        int | None,
        typer.Option("--trial", min=0, help="Number of the trial  [default: the finalists' winner, else the best]"),
    ] = None,
    prefer: Annotated[
        str | None,
        typer.Option(
            "--prefer",
            help="In place of --trial, of several metrics: conditions, then what is to be best among those that keep "
            "to them, such as 'accuracy >= 0.98 then latency_ms'.",
        ),
    ] = None,
    infeasible: Annotated[
        bool, typer.Option("--infeasible", help="Promote the trial though it breaks a constraint of the study.")
    ] = False,
    alias: Annotated[
        str,
        typer.Option("--alias", help="Name for this version; the one that had it becomes 'previous' (previous-ALIAS)."),
    ] = "champion",
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the registered model  [default: the study's]")
    ] = None,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="Train the finalists' winner on train and validation, for the epochs that its fresh runs chose, and "
            "promote that.",
        ),
    ] = False,
    refit_seeds: Annotated[
        int | None,
        typer.Option(
            "--refit-seeds",
            min=1,
            help="With --refit: on how many seeds, an odd number; the run of the median training loss is promoted  "
            "[default: 3]",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=0,
            max=512,
            help="With --refit: worker processes on this machine; 0 makes and shows, and trains none.  [default: 2]",
        ),
    ] = None,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> int:
    """Register a trial's model in MLflow with its evidence, and let an alias name it.

    With --refit it is the winner's configuration, trained anew on all data but the test split. Other machines join with
    'worker --study STUDY.refit'.
    """
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import command
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.mlflow.registry import check_alias, check_model_name

    for flag, value in (("--refit-seeds", refit_seeds), ("--workers", workers)):
        if value is not None and not refit:
            raise SearchError(f"{flag} {value}: it is for --refit: add that, or leave it out")
    check_alias(alias)  # before anything is trained
    check_model_name(model or name, setting="--model")
    if trial is not None and prefer is not None:
        raise SearchError(f"--trial {trial} and --prefer both name a trial: leave one out")
    study = Study.open(name, storage_url=storage_url, tracking_uri=tracking_uri, home=home)
    if prefer is not None:
        trial = study.preferred(prefer, infeasible=infeasible)
    if refit:
        ran = study.train_refit(trial=trial, seeds=refit_seeds, workers=2 if workers is None else workers)
        if ran.interrupted:
            return EXIT_INTERRUPTED
        if ran.refit.pending:
            return 0 if workers == 0 else 1
    done = study.promote(trial=trial, alias=alias, model=model, refit=refit, infeasible=infeasible)
    what = f"the refit, trial {done.trial} of {ran.refit.study}," if refit else f"trial {done.trial} of {name}"
    typer.echo(f"{what} is models:/{done.model}@{done.alias} (version {done.version})")
    if done.made:
        typer.echo("it had left no model: this one was made now, from its best checkpoint")
    if done.replaced is not None:
        typer.echo(f"version {done.replaced}, which had the alias, is models:/{done.model}@{done.previous}")
    if done.unconfirmed:
        typer.echo(f"{'test set' if refit else 'unconfirmed'}: {done.unconfirmed}")
    if done.checkable:
        typer.echo(f"check it: {command('serve-check', f'{done.model}@{done.alias}')}")
    return 0
