"""Findings for a terminal: a line each, folded below its words where it is longer than the terminal is wide."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable

from rich.text import Text

from hpsearch.search.doctor.check import Finding, Status

_COLOURS: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
_STATUS, _NAME = 9, 13  # columns, with the blanks after them


def finding_line(finding: Finding, columns: int | None) -> Text:
    """Return the line of a finding, folded at `columns`; None folds nothing."""
    said = finding.found + (f": {finding.remedy}" if finding.remedy else "")
    head = f"{finding.status:{_STATUS}}{finding.check:{_NAME}}"
    indent = " " * len(head)
    if columns is not None:
        said = textwrap.fill(
            said,
            max(columns, 2 * len(head)),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ).lstrip()
    text = Text(head + said)
    text.stylize(_COLOURS[finding.status], 0, len(finding.status))
    return text


def summary_line(findings: Iterable[Finding]) -> str:
    """Return how many checks came to what: ``14 ok, 1 warning, 1 failed``."""
    counts = Counter(finding.status for finding in findings)
    words = {"ok": "ok", "warning": "with a warning", "failed": "failed", "skipped": "skipped"}
    return ", ".join(f"{counts[status]} {said}" for status, said in words.items() if counts[status])  # type: ignore[index]  # a status is one of these words
