"""Texts from users and workers on their way out: visible escapes, Markdown, CSV cells and links."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpsearch.storage.display import (
    escape_controls,
    escape_csv_cell,
    escape_line,
    escape_markdown,
    find_link,
    format_markdown_code,
)

CLEAR_SCREEN, TITLE = "\x1b[2J\x1b[H", "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (CLEAR_SCREEN, r"\x1b[2J\x1b[H"),
        (TITLE, r"\x1b]0;owned\x07"),
        ("\x9b2J", r"\u009b2J"),  # the same sequence as a single C1 character
        ("10 %\r20 %", r"10 %\r20 %"),
        ("a\b\x7f", r"a\x08\u007f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\udcff", r"\udcff"),
        ("line\n\tindented", "line\n\tindented"),
        (r"C:\temp \x1b", r"C:\temp \x1b"),
        ("größe ≥ 0.5 \N{BAR CHART} नमस्ते \U0001f469\u200d\U0001f4bb", None),
    ],
)
def test_control_characters_become_visible(text: str, shown: str | None) -> None:
    assert escape_controls(text) == (text if shown is None else shown)


@given(st.text())
def test_escaping_twice_has_no_further_effect(text: str) -> None:
    escaped = escape_line(text)
    assert escape_line(escaped) == escape_controls(escaped) == escaped
    assert "\x1b" not in escaped
    assert len(escaped.splitlines()) <= 1


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("\U000e0000")
def test_json_keeps_its_values(text: str) -> None:
    assert json.loads(escape_controls(json.dumps({text: text}, ensure_ascii=False))) == {text: text}


def test_a_line_has_no_line_break() -> None:
    assert escape_line("lost\nhpsearch: all is well\u2028") == r"lost\nhpsearch: all is well\u2028"


def test_markdown_is_displayed_literally() -> None:
    assert escape_markdown("<img src=x onerror=alert(1)>") == "&lt;img src=x onerror=alert(1)&gt;"
    assert escape_markdown("[x](javascript:alert(1))") == r"\[x\](javascript:alert(1))"
    assert escape_markdown("a\n\n# b | c") == r"a\\n\\n# b \| c"
    assert escape_markdown("_a_ latency_ms **b**") == r"\_a\_ latency_ms \*\*b\*\*"
    assert format_markdown_code("`<b>`\n") == r"`'<b>'\n`"


@pytest.mark.parametrize("cell", ["=1+1", "+1+cmd|' /C calc'!A0", "-1+1", "@SUM(1)", " =1+1", "\t=1+1", "\uff1d1+1"])
def test_a_csv_cell_is_no_formula(cell: str) -> None:
    shown = escape_csv_cell(cell)
    assert isinstance(shown, str)
    assert shown.startswith("'")
    assert cell.strip() in shown


@pytest.mark.parametrize("cell", [0, -1, -0.5, 1e-9, True, None, "-1", "+0.5", "-1e-3", "adam", "a=b", ""])
def test_other_csv_cells_are_unchanged(cell: object) -> None:
    assert escape_csv_cell(cell) is cell


@pytest.mark.parametrize("url", ["http://127.0.0.1:5000/#/experiments/1/runs/a", "https://mlflow.example/x?y=z"])
def test_web_addresses_are_links(url: str) -> None:
    assert find_link(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)",
        "JavaScript:alert(1)",
        "java\nscript:alert(1)",
        " javascript:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "file:///etc/passwd",
        "http:alert(1)",
        "http://[::1",
        "//evil.example",
        "http://a\x1b[2J",
        "",
        None,
        7,
    ],
)
def test_other_addresses_are_no_links(url: object) -> None:
    assert find_link(url) is None
