"""``hpsearch objective show``: what an objective trains, how, and what it searches."""

from __future__ import annotations

import json

import typer

from search.cli.assignments import Objective_, Set, configured


def register(app: typer.Typer) -> None:
    """Add the verbs to the app."""
    group = typer.Typer(help="Look at an objective.", no_args_is_help=True)
    group.command()(show)
    group.callback()(_group)
    app.add_typer(group, name="objective")


def _group() -> None:
    """Look at an objective."""


def show(objective: Objective_, settings: Set = None) -> None:
    """Show an objective's configuration, setting by setting, and its search space."""
    from rich.console import Console
    from rich.table import Table

    from objectives import Objective, load_objective
    from objectives.training.reports import describe

    found = load_objective(objective)
    config = configured(found, settings)
    console = Console()
    console.print(f"{found.name}: {found.direction} {found.metric}, {found.epochs} epochs, {found.n_trials} trials\n")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("setting", "type", "value", "what it does"):
        table.add_column(column, overflow="fold")
    for item in describe.settings(config) if isinstance(found, Objective) else describe.own_settings(config):
        table.add_row(item.name, item.type, json.dumps(item.value), item.help)
    console.print(table, highlight=False, markup=False)
    console.print("\nsearch space", style="bold")
    for name, values in describe.search_space(found).items():
        console.print(f"{name}: {values}", highlight=False, markup=False)
