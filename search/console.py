"""Console output: tables, counts, command lines, log lines, and progress lines."""

from __future__ import annotations

import errno
import functools
import io
import logging
import math
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from hpsearch.search.private_output import find_exposure
from hpsearch.storage.display import escape_controls, escape_line
from hpsearch.storage.web.token import add_tokens
from hpsearch.tolerant_logger import TolerantLogger

_STEP_INTERVAL_SECONDS = 30.0  # without a terminal: between two lines that differ only in their numbers
_LEAST_COLUMNS = 40  # the columns of tables with fewer characters are empty
_FILE_COLUMNS = 200  # without a terminal and COLUMNS: tables in files must not wrap


class PlainConsole(Console):
    """A rich console without markup, because error messages and paths contain brackets.

    Control characters in texts are displayed as visible escapes.

    Args:
        stderr: whether to print on stderr.
        width: width in characters; None for that of the terminal.
        outlives_pipe: whether the output is discarded after its terminal or the reader of its pipe has ended;
            otherwise printing raises OSError.
        options: further arguments of rich's console.
    """

    def __init__(
        self, *, stderr: bool = False, width: int | None = None, outlives_pipe: bool = False, **options: Any
    ) -> None:
        self._outlives_pipe = outlives_pipe
        stream = sys.stderr if stderr else sys.stdout
        is_terminal = stream is not None and stream.isatty()  # None in a program without open streams
        if width is None and not is_terminal and not _has_columns():
            width = _FILE_COLUMNS
        options = {"stderr": stderr, "markup": False, "highlight": False, "emoji": False, "soft_wrap": True} | options
        if not _has_columns():
            options["_environ"] = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        super().__init__(width=width, **options)
        self.width = max(self.width, _LEAST_COLUMNS)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich's console does, with visible escapes; tables measure their cells by this method."""
        return super().render_str(escape_controls(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object as rich's console does, with visible escapes in all texts."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_controls(segment.text)  # rich's own controls stay
            yield segment if text == segment.text else Segment(text, segment.style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich's console, but without trailing spaces in the lines of tables.

        On a terminal, links to the embedded services contain their token. Logs and files get links without it.
        """
        try:
            super().print(*map(self._prepare, objects), **options)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.on_broken_pipe()  # the terminal was closed

    def _prepare(self, printed: Any) -> Any:
        if isinstance(printed, Table):
            return _UnpaddedTable(printed)
        return add_tokens(printed) if isinstance(printed, str) and self._is_private_terminal else printed

    @functools.cached_property
    def _is_private_terminal(self) -> bool:
        # Rich's `is_terminal` is also true for files if FORCE_COLOR is set.
        return self.file.isatty() and find_exposure(self.file) is None

    def on_broken_pipe(self) -> None:
        """Discard the output, or raise the error again. Rich's method exits the process."""
        if self._outlives_pipe:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            return
        raise  # noqa: PLE0704 this is called while the error is handled


def _has_columns() -> bool:
    """Return whether COLUMNS is a width; Bash sets it to 0 for some shells without a terminal."""
    return os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) > 0


class _UnpaddedTable:
    """A table without trailing spaces, which are unwanted in logs and copied lines."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in console.render_lines(self._table, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                yield from line
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


_MIN_WRAPPED_COLUMNS = 10  # the narrowest column of a table with wrapped cells, including its padding


class _PlainTable(Table):
    """A table, or a list with one paragraph per row if the console is too narrow for the columns that do not wrap."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; a line feed in a text, which could imitate a row, is visible as an escape."""
        super().add_row(*(escape_line(cell) if isinstance(cell, str) else cell for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        def measure(column: Column) -> int:
            cells = (column.header, *column.cells)
            return max(Measurement.get(console, options, cell).maximum for cell in cells) + self.padding[1]

        widths = (measure(column) if column.no_wrap else _MIN_WRAPPED_COLUMNS for column in self.columns)
        if sum(widths) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), style=self.title_style or "")
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield from self._wrap_row(console, row, options.max_width)

    def _wrap_row(self, console: Console, row: Sequence[RenderableType], width: int) -> Iterator[Text]:
        """Yield the lines of a row, each cell with its heading; only cells longer than a line wrap."""
        line = Text()
        for column, cell in zip(self.columns, row, strict=True):
            text = console.render_str(cell) if isinstance(cell, str) else cell
            if not isinstance(text, Text) or not text.plain:
                continue
            part = Text.assemble((f"{column.header} ", self.header_style), text)
            if line.cell_len + part.cell_len + 2 <= width:
                line.append_text(Text.assemble(", " if line else "", part))
                continue
            yield line
            *full, line = (Text.assemble("  ", wrapped) for wrapped in part.wrap(console, width - 2, no_wrap=False))
            yield from full
        yield line


def plain_table(
    *columns: str, right: Container[str] = (), wrap: Container[str] | None = None, header_style: str = "bold"
) -> Table:
    """Return an empty table without borders.

    On a console that is too narrow for the columns that do not wrap, the table is a list with one paragraph per row.

    Args:
        columns: headings.
        right: right-aligned columns.
        wrap: columns whose cells may wrap; None lets all columns wrap.
        header_style: rich style of the headings.
    """
    table = _PlainTable(box=None, padding=(0, 2, 0, 0), header_style=header_style)
    for column in columns:
        is_fixed = wrap is not None and column not in wrap
        table.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="ellipsis" if is_fixed else "fold",
            no_wrap=is_fixed,
        )
    return table


def shorten_line(text: str, width: int) -> str:
    """Return a text as one line of at most `width` characters, shortened at a space so that no number is cut."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    head = text[: width - 1].rpartition(" ")[0] or text[: width - 2]
    return f"{head} …"


_BARS = "▁▂▃▄▅▆▇█"


def format_sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of finite values as a line of bars, one per value; empty if all values are equal.

    Args:
        values: the values.
        width: maximum number of bars, at least 2; longer courses are sampled, with the first and the last value.
    """
    if len(values) > width:
        values = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return ""
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def pluralize(number: int, noun: str) -> str:
    """Return the number with the noun, in plural if necessary: ``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_number(value: float, digits: int = 4) -> str:
    """Return a number with some significant digits and its whole integer part: ``29162``, not ``2.916e+04``."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text


def format_score(value: float | None, missing: str = "-") -> str:
    """Return a metric value with four decimals, or four significant digits if it is tiny or huge."""
    if value is None:
        return missing
    is_usual = value == 0 or 1e-3 <= abs(value) < 1e15 or not math.isfinite(value)
    return f"{value:.4f}" if is_usual else f"{value:.4g}"


def format_difference(difference: float | None, missing: str = "-") -> str:
    """Return a difference of metric values as text: as a metric value, or two significant digits if it is small."""
    is_small = difference is not None and 0 < abs(difference) < 5e-4
    return f"{difference:.2g}" if is_small else format_score(difference, missing)


def format_change(change: float | None, missing: str = "-") -> str:
    """Return a difference of metric values as text with its sign."""
    return missing if change is None else f"{'-' if change < 0 else '+'}{format_difference(abs(change))}"


def format_command(*arguments: str) -> str:
    """Return an hpsearch command line as the user types it: quoted, and with the name of the wrapper script, if any."""
    return shlex.join([os.environ.get("HPSEARCH_COMMAND", "hpsearch"), *arguments])


def can_redraw(console: Console) -> bool:
    """Return whether the console is a terminal on which lines can be replaced, unlike the console of an editor."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def show_steps(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step: next to a spinner on a terminal, else as a separate line.

    Without a terminal, steps that differ from the previous one only in their numbers are printed every 30 s, and the
    last of them at the end of the block.
    """
    if not can_redraw(console):
        last, printed_at, skipped = "", -math.inf, ""

        def print_step(text: str) -> None:
            nonlocal last, printed_at, skipped
            step, now = re.sub(r"\d+", "", text), time.monotonic()
            if step == last and now - printed_at < _STEP_INTERVAL_SECONDS:
                skipped = text
                return
            last, printed_at, skipped = step, now, ""
            console.print(Text(escape_line(text)))

        yield print_step
        if skipped:
            console.print(Text(escape_line(skipped)))
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(escape_line(text)))  # as a string, it could contain markup


@contextmanager
def show_slow_steps(after_seconds: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a step on stderr if neither the next step nor the end of the block follows soon."""
    timer: threading.Timer | None = None

    def print_step(text: str) -> None:
        with suppress(OSError):  # the end of the command handles a broken stream
            PlainConsole(stderr=True).print(Text(escape_line(text)))

    def begin_step(text: str) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        timer = threading.Timer(after_seconds, print_step, [text])
        timer.daemon = True
        timer.start()

    try:
        yield begin_step
    finally:
        if timer is not None:
            timer.cancel()


class _PrefixedStream(io.TextIOWrapper):
    """Text stream that begins each line with a prefix and writes whole lines; it replaces `stream`."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        self._replaced = stream  # its destructor would close the buffer
        self._prefix, self._is_at_start, self._lock = prefix, True, threading.RLock()

    def write(self, text: str) -> int:
        """Write a text. Lines that PyTorch has already prefixed remain unchanged."""
        marked = re.sub(r"(?<=\n)(?!\[rank\d|\Z)", self._prefix, text)
        with self._lock:  # threads print too
            needs_prefix = self._is_at_start and text and not re.match(r"\[rank\d", text)
            self._is_at_start = text.endswith("\n") if text else self._is_at_start
            super().write(f"{self._prefix}{marked}" if needs_prefix else marked)
        return len(text)


def prefix_output(rank: int) -> None:
    """Begin each line that this process prints or logs with `[rankN]: `, as PyTorch and NCCL do in their messages."""
    sys.stdout.flush()
    sys.stdout, sys.stderr = (_PrefixedStream(each, f"[rank{rank}]: ") for each in (sys.stdout, sys.stderr))


class EscapingFormatter(logging.Formatter):
    """A formatter of log lines that displays control characters as visible escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the log line of a record."""
        return escape_controls(super().format(record))


def log_to_stderr(level: int) -> None:
    """Print log records from `level` on to stderr, with time and level."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("hpsearch.") and type(logger) is logging.Logger:
            logger.__class__ = TolerantLogger
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.raiseExceptions = False  # a log on a full disk must not add a traceback per line
    logging.basicConfig(level=level, handlers=[handler], force=True)
