"""Commands that confirm and promote a winner: finalists, evaluate-test, promote, serve-check."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import CONFIRM_SECTION, confirm, disable_gc, echo, echo_report, register
from hpsearch.search.process.exits import EXIT_INTERRUPTED


@register(CONFIRM_SECTION)
def finalists(
    study: o.StudyName,
    *,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, help="Best trials to retrain  [default: 5; multi-objective: the Pareto front]"),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, help="Number of new seeds on which each finalist is retrained  [default: 2]"),
    ] = None,
    workers: Annotated[int, o.workers_option("; 0 shows the finalists without training them")] = 2,
    new_set: Annotated[
        bool,
        typer.Option(
            "--new-set",
            help="Choose new finalists and seeds; the winner among them replaces the winner of the existing finalists",
        ),
    ] = False,
    infeasible: o.Infeasible = False,
    how: o.FleetWorkerOptions,
    where: o.Addresses,
) -> int:
    """Retrain the best trials on new seeds and splits.

    The best score of many trials has a selection bias. Therefore, only the new runs select the winner and estimate its
    score on new data. The test split is not used. Run the command again to resume the training or to show the table.
    Other machines join with 'worker --study STUDY.finalists'.
    """
    from hpsearch.search.fleet.fork_server import start_fork_server
    from hpsearch.search.services import check_pair

    check_pair(where)  # before the slow imports

    start_fork_server(workers)  # loads its modules while this process imports its own

    with disable_gc():
        from hpsearch.search.api.study import Study
        from hpsearch.search.console import PlainConsole, show_steps
        from hpsearch.search.run import finalists as _  # noqa: F401 imported here, without the garbage collector

    with show_steps(PlainConsole()) as progress:
        opened = Study.open(study, progress=progress, **where)
    ran = opened._train_finalists(top, seeds, workers=workers, new_set=new_set, infeasible=infeasible, **how)
    if ran.is_interrupted:
        return EXIT_INTERRUPTED
    is_done = ran.result.is_decided if workers or not ran.result.pending else True
    return 0 if is_done else 1


@register(CONFIRM_SECTION)
def evaluate_test(
    name: o.StudyName,
    *,
    trial: Annotated[
        int | None, o.trial_option("the trial, for --unconfirmed or several metrics  [default: the finalists' winner]")
    ] = None,
    prefer: o.Prefer = None,
    unconfirmed: Annotated[
        bool,
        typer.Option(
            "--unconfirmed",
            help="Accept a trial that did not win among finalists; the test result is marked as unconfirmed",
        ),
    ] = False,
    refit: Annotated[bool, typer.Option("--refit", help="Evaluate the model that 'promote --refit' trained")] = False,
    yes: o.Yes = False,
    where: o.Addresses,
) -> None:
    """Evaluate the winner on the test set, once per study."""
    from hpsearch.search.api import evaluation
    from hpsearch.search.api.study import Study
    from hpsearch.search.finalists.text import format_confirmation
    from hpsearch.search.promotion.promote import resolve_trial

    study = Study.open(name, **where)
    trial = resolve_trial(study._stored, trial, prefer)
    candidate = evaluation.choose_test_candidate(study._stored, trial=trial, unconfirmed=unconfirmed, refit=refit)
    number, mark = candidate.trial.number, "" if candidate.finalists else " (not confirmed by finalists)"
    if not yes and not confirm(f"evaluate {candidate.summary}{mark} on the test set of {name}? Possible only once."):
        echo("cancelled: the test set was not evaluated")
        raise typer.Exit(1)
    for metric, value in study.evaluate_test(trial=number, unconfirmed=unconfirmed, refit=refit).items():
        echo(f"test {metric} {value:.6g}")
    for line in format_confirmation(study._stored):
        echo(line)
    echo_report(study)


@register(CONFIRM_SECTION)
def promote(
    name: o.StudyName,
    *,
    trial: Annotated[int | None, o.trial_option("the trial  [default: the finalists' winner, else the best]")] = None,
    prefer: o.Prefer = None,
    infeasible: o.Infeasible = False,
    alias: Annotated[
        str,
        typer.Option(
            "--alias",
            help="Alias of the new model version; the version that had this alias gets the alias 'previous-ALIAS' "
            "('previous' for champion)",
        ),
    ] = "champion",
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the registered model in MLflow  [default: the study's name]")
    ] = None,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit",
            help="Retrain the finalists' winner on training and validation data together, and promote the new model; "
            "the number of epochs is the median best epoch of the winner's runs as a finalist",
        ),
    ] = False,
    refit_seeds: Annotated[
        int | None,
        typer.Option(
            "--refit-seeds",
            min=1,
            help="Odd number of runs of --refit, one per seed; the run with the median training loss is promoted  "
            "[default: 3]",
        ),
    ] = None,
    workers: Annotated[int | None, o.workers_option(" for --refit; 0 only creates the study  [default: 2]")] = None,
    where: o.Addresses,
) -> int:
    """Register a trial's model in MLflow and set its alias.

    The model version has the evidence for its score. With --refit, the winner's configuration is first retrained on all
    data except the test split. Other machines join with 'worker --study STUDY.refit'.
    """
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import format_command
    from hpsearch.search.errors import SearchError
    from hpsearch.search.finalists.text import format_data_warnings
    from hpsearch.search.promotion.promote import resolve_trial
    from hpsearch.storage.mlflow.registry import check_alias, check_model_name

    for flag, value in (("--refit-seeds", refit_seeds), ("--workers", workers)):
        if value is not None and not refit:
            raise SearchError(f"{flag} {value} needs --refit; add --refit, or remove {flag}")
    check_alias(alias)  # before the training
    check_model_name(name if model is None else model)
    study = Study.open(name, **where)
    trial = resolve_trial(study._stored, trial, prefer, infeasible=infeasible)
    if refit:
        ran = study._train_refit(trial=trial, seeds=refit_seeds, workers=2 if workers is None else workers)
        if ran.is_interrupted:
            return EXIT_INTERRUPTED
        if ran.result.pending:
            return 0 if workers == 0 else 1
    done = study._promote(trial=trial, alias=alias, model=model, refit=refit, infeasible=infeasible)
    source = f"the refit (trial {done.trial} of {ran.result.study})" if refit else f"trial {done.trial} of {name}"
    echo(f"{source} is now models:/{done.model}@{done.alias} (version {done.version})")
    if done.is_new_model:
        echo("the MLflow run of the trial had no model; the model was created from the best checkpoint")
    if done.old_version is not None:
        echo(f"version {done.old_version} had the alias {done.alias} and is now models:/{done.model}@{done.old_alias}")
    for line in format_data_warnings(study._stored):
        echo(line)
    if done.unconfirmed_reason:
        echo(f"version {done.version} is marked as unconfirmed: {done.unconfirmed_reason}")
    if done.not_exported:
        echo(f"version {done.version} has a checkpoint, because the model could not be exported: {done.not_exported}")
    if done.can_serve_check:
        echo(f"check the model with: {format_command('serve-check', f'{done.model}@{done.alias}')}")
    echo_report(study)
    return 0


@register(CONFIRM_SECTION)
def serve_check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model: NAME@ALIAS (digits@champion) or NAME/VERSION")],
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Largest accepted absolute difference from the recorded score")
    ] = 1e-6,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Load a model that contains code, which runs with your permissions"),
    ] = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> int:
    """Check that a registered model reproduces its score.

    A new process loads the model without the code of hpsearch and the objective, and evaluates it on the validation
    split. A model that cannot be exported is loaded from its checkpoint by the objective's code. Files that
    were changed after the promotion are rejected before they are loaded.

    Exit code 0 if the score equals the recorded score within --tolerance, 1 otherwise.
    """
    from hpsearch.search.errors import SearchError
    from hpsearch.search.promotion.serve_check import serve_check as check
    from hpsearch.search.services import find_services
    from hpsearch.storage.study_storage.storage import open_storage

    services = find_services({"storage_url": storage_url, "tracking_uri": tracking_uri, "home": home})
    if services.tracking_uri is None:
        raise SearchError("--tracking-uri is missing; give the URL of the MLflow server that has the model")
    storage = open_storage(services.storage_url, application_name="hpsearch serve-check")
    echo(f"loading and evaluating {model}")
    done = check(storage, services.open_tracking(), model, tolerance=tolerance, allow_code=allow_code)
    echo(f"{done.version.model} version {done.version.number} is from trial {done.trial} of study {done.study}")
    trained_on = " (of a refit, on samples that it was trained on)" if done.is_refit else ""
    echo(f"recorded score    val {done.metric} {done.recorded_value:.9g}{trained_on}")
    if done.recomputed_value is not None:
        by_weights = " (from the trial's weights)" if done.scored_by_weights else ""
        echo(f"recomputed score  val {done.metric} {done.recomputed_value:.9g}{by_weights}")
    if done.mismatch:
        echo(f"score not reproduced: {done.mismatch}")
        return 1
    if done.weights_only:
        echo(f"score reproduced with the objective's code, as the model cannot be exported ({done.weights_only})")
    else:
        what = "outputs of the exported model" if done.scored_by_weights else "score"
        echo(f"{what} reproduced in a process without the code of hpsearch and the objective")
    return 0
