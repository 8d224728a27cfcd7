"""``hpsearch show``: one study, its spec, its counts and its trials, or one of its trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from search.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from search.study.study import StoredStudy


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(show)


def show(
    name: o.StudyName,
    every: Annotated[bool, typer.Option("--all", help="List every trial, not only the last 20.")] = False,
    trial: Annotated[
        int | None,
        typer.Option("--trial", min=0, help="Show this one: parameters, attempts, values, and why it ended as it did."),
    ] = None,
    storage_url: o.StorageUrl = None,
    home: o.Home = None,
) -> None:
    """Show a study: its spec, what it came to so far, and its trials; or one trial, with --trial."""
    from search.cli.open_study import notice_promotions, open_for_reading
    from search.console import PlainConsole
    from search.report.trial import print_trial
    from search.study.study import load_study

    services, storage = open_for_reading(storage_url, None, home)
    study = load_study(storage, name)
    notice_promotions(services, storage, study)
    if trial is None:
        _show_study(PlainConsole(), study, services.dashboard_url, every=every)
    else:
        print_trial(PlainConsole(), study, trial)


def _show_study(console: Console, name: StoredStudy, dashboard_url: str | None, *, every: bool) -> None:
    from rich.table import Table

    from search.finalists import read_finalists
    from search.finalists.text import finalist_table
    from search.report.promotions import promotion_lines
    from search.report.summary import summary_lines
    from search.report.trial import why_waiting
    from search.study.summary import format_value, summarise
    from storage.attributes import REASON, STOPPED, WORKER

    for key, value in name.spec.model_dump(exclude={"name", "version"}).items():
        if key == "finalists_of" and value is None:
            continue
        shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        console.print(f"{key:>10}  {shown}")
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("trial", "state", "epochs", "value", "worker", "reason"):
        table.add_column(column, justify="right" if column in {"trial", "epochs", "value"} else "left")
    trials, waiting = name.trials(), why_waiting(name)
    for trial in trials if every else trials[-20:]:
        value = "" if trial.value is None else format_value(trial.value)
        worker, reason = trial.user_attrs.get(WORKER, ""), waiting.get(trial.number) or trial.user_attrs.get(REASON, "")
        epochs = str(len(trial.intermediate_values))
        table.add_row(
            str(trial.number),
            trial.state.name,
            epochs,
            value,
            worker,
            str(reason).splitlines()[0] if reason else "",
        )
    if not every and len(trials) > 20:
        console.print(f"the last 20 of {len(trials)} trials; all of them with --all")
    console.print(table)
    console.print()
    if (found := read_finalists(name)) is not None:
        console.print(finalist_table(name, found))
        console.print()
    for line in summary_lines(name, summarise(name), dashboard_url=dashboard_url):
        console.print(line)
    for line in promotion_lines(name):
        console.print(line)
    if why := name.attrs.get(STOPPED):
        console.print(f"stopped {why}")
