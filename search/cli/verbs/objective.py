"""``hpsearch objective show``: what an objective trains, how, and what it searches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from hpsearch.search.cli.assignments import Objective_, Set, configured
from hpsearch.search.cli.listing import listed

if TYPE_CHECKING:
    from hpsearch.objectives.training.reports.report import Setting


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
    from hpsearch.objectives.loading import load_objective
    from hpsearch.objectives.own_loop.loop_objective import LoopObjective
    from hpsearch.objectives.training.reports import report
    from hpsearch.search.console import PlainConsole

    found = load_objective(objective)
    config = configured(found, settings)
    space = report.search_space(found)
    console = PlainConsole()
    console.print(f"{found.name}: {found.direction} {found.metric}, {found.epochs} epochs, {found.n_trials} trials")
    if found.directions:
        console.print("directions: " + ", ".join(f"{better} {name}" for name, better in found.directions.items()))
    if found.constraints:
        console.print("constraints: " + ", ".join(f"{name} {bound}" for name, bound in found.constraints.items()))
    if isinstance(found, LoopObjective):
        own = report.own_settings(config)
        # Of what is searched by another name than the setting's nobody knows which setting it becomes.
        fixed = "the same in every trial" if space.keys() <= {item.name for item in own} else ""
        searched = {name: f"searched: {values}" for name, values in space.items()}
        rows = [(_set(item), _and(item.help, searched.get(item.name, fixed))) for item in own]
        space = {name: values for name, values in space.items() if name not in {item.name for item in own}}
    else:
        rows = [row for item in report.settings(config) for row in _rows(item)]
    for title, block in (("settings", rows), ("search space", list(space.items()))):
        if block:
            console.print(f"\n{title}", style="bold")
            for line in listed(block, console.width):
                console.print(line)


def _rows(item: Setting) -> list[tuple[str, str]]:
    """A setting with its words; those of the model one by one, under the names that --set takes."""
    if isinstance(item.value, dict) and item.value:
        return [
            (f"{item.name}.{name} = {json.dumps(value)}", "of the objective's model")
            for name, value in item.value.items()
        ]
    kind = f" ({item.type.replace(' | ', ' or ')})" if " | " in item.type else ""  # else its value tells
    return [(_set(item), f"{item.help}{kind}")]


def _set(item: Setting) -> str:
    return f"{item.name} = {json.dumps(item.value)}"


def _and(*words: str) -> str:
    return "; ".join(part for part in words if part)
