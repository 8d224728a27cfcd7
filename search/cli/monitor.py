"""Commands that show studies: the list of studies, and the trials, live status, report and tables of a study."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import MONITOR_SECTION, echo, register

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hpsearch.search.api.opening import StudyRow
    from hpsearch.search.report.top import StudyStatus


_NUMBERS = ("trials", "complete", "pruned", "infeasible", "failed", "running")
_COLUMNS = ("study", "objective", *_NUMBERS, "best", "promoted")
_ALWAYS = {"study", "objective", "trials", "complete", "best"}
_MIN_WIDTHS = {"study": 5, "objective": 8, "best": 9}  # characters; narrower columns are unreadable


@register(MONITOR_SECTION)
def studies(where: o.Addresses) -> None:
    """List all studies with their state and best value."""
    from hpsearch.search.api.studies import list_studies
    from hpsearch.search.console import PlainConsole, format_command, plain_table

    found = [_format_row(row) for row in list_studies(**where)]
    # Empty columns are omitted, because 80 characters are too few for all columns.
    kept = [name for name in _COLUMNS if name in _ALWAYS or any(row.get(name, "0") not in ("0", "") for row in found)]
    table = plain_table(*kept, right=_NUMBERS, wrap=set(kept) - set(_NUMBERS))
    for column in table.columns:
        column.min_width = _MIN_WIDTHS.get(str(column.header))
    for row in found:
        table.add_row(*(row.get(name, "") for name in kept))
    if table.row_count:
        PlainConsole().print(table)
    else:
        echo(f"no studies yet; start one with: {format_command('run', 'digits')}")


def _format_row(row: StudyRow) -> dict[str, str]:
    from hpsearch.objectives.errors import format_path
    from hpsearch.search.console import format_score

    if row.is_damaged:
        return {"study": row.name, "objective": "(damaged)"}
    if not row.is_from_hpsearch:
        return {"study": row.name, "objective": "(not created by hpsearch)"}
    kind = " (finalists)" if row.is_finalist_study else " (refit)" if row.is_refit_study else ""
    name = row.name + kind + (" (stopped)" if row.is_stopped else "")
    name += " (stopped early)" if row.is_stopped_early else ""
    best = "" if row.best_value is None else f"{row.metric} {format_score(row.best_value)} (trial {row.best_number})"
    best += f", {row.front} on the Pareto front" if row.front else ""
    path, colon, cls = row.objective.rpartition(":")
    return {
        "study": name,
        "objective": f"{format_path(path)}{colon}{cls}" if path.startswith("/") else row.objective,
        "trials": row.used_budget.removesuffix(" trials"),
        **{state: str(getattr(row, f"{state}_trials")) for state in _NUMBERS[1:]},
        "best": best,
        "promoted": ", ".join(row.promotions),
    }


@register(MONITOR_SECTION)
def show(
    name: o.StudyName,
    *,
    every: Annotated[bool, typer.Option("--all", help="Show all settings and trials, not only the main ones")] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort",
            metavar="COLUMN",
            help="Order of the trials: trial, epochs, a metric or a parameter; -COLUMN for the largest first  "
            "[default: the best first]",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", metavar="A,B,...", help="Parameters to show  [default: those that fit]"),
    ] = None,
    trial: Annotated[int | None, o.trial_option("a trial, to show parameters, attempts, values and outcome")] = None,
    where: o.Addresses,
) -> None:
    """Show the settings, trials and result of a study. With --trial, show one trial."""
    from hpsearch.search.api.opening import sync_mlflow_promotions
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.errors import SearchError
    from hpsearch.search.report.show import print_study
    from hpsearch.search.report.show_trial import print_trial

    if trial is not None and (sort or columns):
        raise SearchError("--sort and --columns are not available with --trial, which shows one trial; remove them")
    study = Study.open(name, **where)
    stored = study._stored
    sync_mlflow_promotions(study._services, stored.storage, stored)
    if trial is None:
        parameters = None if columns is None else [column.strip() for column in columns.split(",")]
        url = study._services.dashboard_url
        print_study(PlainConsole(), stored, url, every=every, sort=sort, parameters=parameters)
    else:
        print_trial(PlainConsole(), stored, trial)


@register(MONITOR_SECTION)
def top(
    name: o.StudyName,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status once as JSON, and exit")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the status once; default without a terminal")] = False,
    every: Annotated[float, typer.Option("--every", min=0.2, max=86_400, help="Seconds between updates")] = 2.0,
    where: o.Addresses,
) -> None:
    """Watch the workers and trials of a study until Ctrl-C.

    Shows the workers on all machines with their trials, epochs and leases; the ended trials with the reasons; and the
    estimated time until the budget is spent.
    """
    from rich.live import Live

    from hpsearch.search.api.study import Study
    from hpsearch.search.console import PlainConsole, can_redraw
    from hpsearch.search.report.top import EpochRate, count_best_rows, read_status, render_status
    from hpsearch.search.report.trial_table import make_trial_table

    study, console, epoch_rate = Study.open(name, **where), PlainConsole(), EpochRate()
    stored = study._stored
    if as_json:
        echo(read_status(stored).to_json())
        return

    def render(rate: float | None, status: StudyStatus, height: int) -> RenderableType:
        trials = stored.best_trials()[: count_best_rows(height)]
        best = make_trial_table(stored.spec, trials, width=console.width)
        return render_status(status, rate, width=console.width, height=height, best=best)

    if once or not can_redraw(console):
        console.print(render(None, read_status(stored), 40))
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while can_redraw(console):  # until it is closed
            status = read_status(stored)
            rate = epoch_rate.add(status.at.timestamp(), status.progress.epochs)
            live.update(render(rate, status, console.height), refresh=True)
            time.sleep(every)


@register(MONITOR_SECTION)
def report(
    name: o.StudyName,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file  [default: reports/STUDY.html in the folder of --home]"),
    ] = None,
    where: o.Addresses,
) -> None:
    """Write a study's HTML report and log it to MLflow."""
    from hpsearch.search.api import actions
    from hpsearch.search.api.study import Study

    study = Study.open(name, **where)
    path = actions.write_study_report(study._services, study._stored, output)
    echo(str(path))
    actions.log_study_report(study._services, study._stored, path)


@register(MONITOR_SECTION)
def export(
    name: o.StudyName,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File that ends in .csv, .json or .parquet  [default: CSV on stdout]"),
    ] = None,
    epochs: Annotated[
        bool, typer.Option("--epochs", help="One row per trial and epoch, with the values of the study's metrics")
    ] = False,
    where: o.Addresses,
) -> None:
    """Write a study's trials as CSV, JSON or Parquet.

    The table has one row per trial: number, state, value, parameters, epochs, duration in seconds, worker and reason.
    """
    from hpsearch.search.api.study import Study
    from hpsearch.search.report.dataframes import make_epochs_dataframe, make_trials_dataframe
    from hpsearch.search.report.table_file import format_csv, write_table

    stored = Study.open(name, **where)._stored
    table = make_epochs_dataframe(stored) if epochs else make_trials_dataframe(stored)
    if output is None:
        echo(format_csv(table), nl=False)
    else:
        write_table(table, output)
        echo(str(output))
