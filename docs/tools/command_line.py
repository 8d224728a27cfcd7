"""The reference of the command line: every command with its arguments and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import typer

from docs.tools.markdown import code, paragraphs, table
from hpsearch.search.cli import app
from hpsearch.search.worker.options import Addresses

_ADDRESSES = set(Addresses.__annotations__)


def command_line() -> str:
    """Return the page: every command with its arguments and options, as in `--help`."""
    parts = []
    for name, command in commands():
        usage = " ".join(
            [f"./hpsearch {name}", *(_metavar(p) for p in command.params if p.param_type_name == "argument")]
        )
        parts.append(f"## {name}\n\n{paragraphs(command.help or '')}\n\n```text\n{usage}\n```\n")
        named = {option.name for option in command.params}
        shared = _ADDRESSES if named >= _ADDRESSES else set()
        parts.append(_options(option for option in command.params if option.name not in shared))
        if shared:
            parts.append("Takes the [addresses](#addresses) too.\n")
    parts.append("## Addresses\n\nEvery command that opens a study takes them.\n")
    parts.append(_options(option for option in command_of("show").params if option.name in _ADDRESSES))
    return "\n".join(part for part in parts if part)


def _options(options: Iterable[Any]) -> str:
    rows = [row for option in options if (row := _option(option))]
    return table(("option", "default", "what it does"), rows) + "\n" if rows else ""


def _option(option: Any) -> tuple[str, str, str] | None:
    if option.param_type_name == "argument":
        return (f"`{_metavar(option)}`", "", option.help) if option.help else None
    names = ", ".join(f"`{name}`" for name in option.opts)
    words, sign, told = (option.help or "").partition("  [default: ")
    if sign:
        default = told.removesuffix("]")
    elif option.required:
        default = "required"
    elif option.is_flag:
        default = "off"
    else:
        default = "" if option.default in (None, (), []) else str(option.default)
    return (names, default, f"{words} (environment: {code(option.envvar)})" if option.envvar else words)


def _metavar(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    return name if argument.required else f"[{name}]"


def command_of(name: str) -> Any:
    """Return a command by its name."""
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]  # it is a group


def commands() -> Iterator[tuple[str, Any]]:
    """Yield the name of each command with the command; those in groups have two words."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]  # it is a group
        for word, below in getattr(command, "commands", {}).items():
            yield f"{name} {word}", below
        if not hasattr(command, "commands"):
            yield name, command
