"""Create and show an objective: `init` and `objective show`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpsearch.search.cli.app import OBJECTIVES_SECTION, add_group, echo, register
from hpsearch.search.cli.objective_settings import ObjectiveArgument, SetOption, make_config
from hpsearch.search.console import format_command

if TYPE_CHECKING:
    from hpsearch.objectives.training.reports.report import Setting


@register(OBJECTIVES_SECTION)
def init(path: Annotated[Path, typer.Argument(metavar="FILE.py", help="Path of the new file")]) -> None:
    """Write a small working objective as a template."""
    from hpsearch.objectives.template import write_template

    write_template(path)
    reference = f"./{path}" if str(path).startswith("-") else str(path)  # otherwise it would be an option
    echo(f"wrote {path}; run it with: {format_command('run', reference)}")


_objective = add_group("objective", OBJECTIVES_SECTION, "Show the settings and search space of an objective.")


@_objective.command()
def show(objective: ObjectiveArgument, settings: SetOption = None) -> None:
    """Show the settings and search space of an objective."""
    from hpsearch.objectives.custom_loop.loop_objective import LoopObjective
    from hpsearch.objectives.training.reports import report
    from hpsearch.search.cli.probe import load_probed_objective
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.study.create import sample_search_space

    found = load_probed_objective(objective)
    config = make_config(found, settings)
    space = {name: _format_range(values) for name, values in sample_search_space(found)[0].items()}
    console = PlainConsole()
    console.print(f"{found.name}: {found.direction} {found.metric}, {found.epochs} epochs, {found.n_trials} trials")
    if found.directions:
        console.print("directions: " + ", ".join(f"{better} {name}" for name, better in found.directions.items()))
    if found.constraints:
        console.print("constraints: " + ", ".join(f"{name} {bound}" for name, bound in found.constraints.items()))
    if isinstance(found, LoopObjective):
        own = report.list_custom_settings(config)
        # If a parameter has another name than its setting, it is unknown which settings are searched.
        fixed = "the same in every trial" if space.keys() <= {item.name for item in own} else ""
        searched = {name: f"searched: {values}" for name, values in space.items()}
        rows = [(_format_setting(item), _join(item.help, searched.get(item.name, fixed))) for item in own]
        space = {name: values for name, values in space.items() if name not in {item.name for item in own}}
    else:
        rows = [row for item in report.list_settings(config) for row in _rows(item)]
    for title, block in (("settings", rows), ("search space", list(space.items()))):
        if block:
            console.print(f"\n{title}", style="bold")
            for line in format_list(block, console.width):
                console.print(line)


def _format_range(values: Any) -> str:
    """Return an Optuna distribution as text: `0.001 to 0.1 on a log scale`."""
    if hasattr(values, "choices"):
        return "one of " + ", ".join(map(str, values.choices))
    is_stepped = values.step is not None and not (values.step == 1 and isinstance(values.step, int))
    extra = " on a log scale" if values.log else f" in steps of {values.step:g}" if is_stepped else ""
    return f"{values.low:g} to {values.high:g}{extra}"


def _rows(item: Setting) -> list[tuple[str, str]]:
    """Return the lines of a setting as (name, text): one line, or one per entry of a dictionary, named as for --set."""
    if isinstance(item.value, dict) and item.value:
        text = "setting of the objective's model"
        return [(f"{item.name}.{name} = {json.dumps(value)}", text) for name, value in item.value.items()]
    kind = f" ({item.type.replace(' | ', ' or ')})" if " | " in item.type else ""  # otherwise the value shows the type
    return [(_format_setting(item), f"{item.help}{kind}")]


def _format_setting(item: Setting) -> str:
    return f"{item.name} = {json.dumps(item.value)}"


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


_MAX_WIDTH = 120  # longer lines are hard to read
_MIN_TEXT_WIDTH = 36  # for a text next to the name
_MAX_NAME_WIDTH = 34
_INDENT = "    "


def format_list(rows: Iterable[tuple[str, str]], columns: int) -> Iterator[str]:
    """Yield the lines of a list of (name, text). A text is next to its name, or below the name in a narrow terminal."""
    columns = min(columns, _MAX_WIDTH)
    found = list(rows)
    left = min(max((len(name) for name, _ in found), default=0), _MAX_NAME_WIDTH) + 2
    for name, text in found:
        if columns - left >= _MIN_TEXT_WIDTH and len(name) + 2 <= left:
            yield from _wrap(f"{name:{left}}{text}", columns, " " * left)
        else:
            yield from _wrap(name, columns, _INDENT)
            yield from _wrap(_INDENT + text, columns, _INDENT) if text else ()


def _wrap(text: str, columns: int, indent: str) -> list[str]:
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
