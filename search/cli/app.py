"""The typer app on which commands are registered, and helpers that the commands share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hpsearch.search.cli.options import add_flags
from hpsearch.search.error_lines import discard_stderr
from hpsearch.search.errors import suggest_names
from hpsearch.standard_streams import find_broken_streams
from hpsearch.storage.display import escape_controls

if TYPE_CHECKING:
    from hpsearch.search.api.study import Study

# The sections of --help.
SEARCH_SECTION = "Search"
MONITOR_SECTION = "Monitor and control"
CONFIRM_SECTION = "Confirm and promote"
OBJECTIVES_SECTION = "Objectives"
SERVICES_SECTION = "Services"
HELP_SECTIONS = (SEARCH_SECTION, MONITOR_SECTION, CONFIRM_SECTION, OBJECTIVES_SECTION, SERVICES_SECTION)


class _Command(TyperCommand):
    """Command whose --help has one section per group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for param in self.get_params(ctx):
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            rows.append((getattr(param, "rich_help_panel", None) or default, param.get_help_record(ctx)))
        _write_sections(formatter, rows)


_OTHER_NAMES = {"list": "studies", "ls": "studies", "ps": "status", "rm": "delete", "resume": "start"}  # of other tools


class _Group(TyperGroup):
    """Group whose --help lists the commands in sections, each with the first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 the signature of the base class
        limit = formatter.width - 6 - max(map(len, self.commands))
        rows = []
        for name, command in self.commands.items():
            section = getattr(command, "rich_help_panel", None) or "Commands"
            rows.append((section, (name, command.get_short_help_str(limit))))
        _write_sections(formatter, rows)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _exit_after_broken_pipe():  # --help and --version print here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _exit_after_broken_pipe():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None  # typer would return the exit code without a message

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            other = _OTHER_NAMES.get(args[0])
            hint = f"; did you mean {other!r}?" if other in self.commands else suggest_names(args[0], self.commands)
            ctx.fail(f"unknown command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


@contextmanager
def _exit_after_broken_pipe() -> Iterator[None]:
    """Exit with code 0 if the reader of the output, such as `head`, has enough. Typer would exit with code 1."""
    try:
        yield
    except BrokenPipeError:
        if not find_broken_streams():  # another pipe, such as one of the objective
            raise
        raise typer.Exit(0) from None


def _write_sections(formatter: Any, rows: list[tuple[str, Any]]) -> None:
    """Write the rows of --help by section: the named sections first, then the other sections in order of appearance."""
    named = {section for section, _ in rows}
    for section in dict.fromkeys(
        [*(name for name in HELP_SECTIONS if name in named), *(section for section, _ in rows)]
    ):
        with formatter.section(section):
            formatter.write_dl([row for other, row in rows if other == section])


app = typer.Typer(
    name="hpsearch",
    cls=_Group,
    rich_markup_mode=None,  # rich's tables leave only a third of 80 columns for the texts
    help="Hyperparameter search for PyTorch: Optuna workers share a Postgres study and log to MLflow.",
    epilog="The wrapper ./hpsearch has four more commands: 'add' (packages for objectives), 'test', 'lint' and 'docs'.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        echo(f"hpsearch {metadata.version('hpsearch')}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", help="Print the version, and exit.", is_eager=True, callback=_print_version)
]


@app.callback()
def _root(version: _Version = False) -> None: ...


def register(section: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a command in a section of --help; see `add_flags` for its flags."""

    def register_command(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(cls=_Command, rich_help_panel=section)(add_flags(function))
        return function

    return register_command


def add_group(name: str, section: str, help_text: str) -> typer.Typer:
    """Add a group of commands, such as `serve`, to a section of --help, and return the group."""
    group = typer.Typer(cls=_Group, help=help_text, no_args_is_help=True)
    app.add_typer(group, name=name, rich_help_panel=section)
    return group


@contextmanager
def disable_gc() -> Iterator[None]:
    """Disable the garbage collector in this block, because imports take a quarter less time (4.7 s, not 6.3 s)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections skip the imported objects
        gc.enable()


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text, with visible escapes for control characters.

    Args:
        text: text to print.
        err: whether to print on stderr.
        nl: whether to end the line.
    """
    try:
        typer.echo(escape_controls(str(text)), err=err, nl=nl)  # noqa: TID251 the only call
    except OSError:
        if not err:
            raise
        discard_stderr()


def echo_report(study: Study) -> None:
    """Print the path of the report, which a command has written again."""
    from hpsearch.search.study.folders import get_report_path

    echo(f"report: {get_report_path(study._services, study._stored)}")


def confirm(question: str) -> bool:
    """Ask a yes-or-no question and return the answer.

    Raises:
        SearchError: stdin is not a terminal, for example in a batch job, and has no answer.
    """
    from hpsearch.search.errors import SearchError

    if sys.stdin is not None and sys.stdin.isatty():
        return typer.confirm(escape_controls(question))
    echo(f"{question} [y/N]: ", nl=False)
    answer = "" if sys.stdin is None else sys.stdin.readline(80)  # the line of /dev/zero has no end
    echo()
    if answer.strip().lower() not in {"y", "yes", "n", "no"}:
        raise SearchError("the confirmation prompt needs a terminal; add --yes to skip the prompt")
    return answer.strip().lower().startswith("y")
