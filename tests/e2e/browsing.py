"""The system's Chromium in headless mode, and helpers for tests of pages."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

MARKS = [
    pytest.mark.browser,
    pytest.mark.e2e,
    pytest.mark.xdist_group("search"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH"),
]

# No background requests, and no sandbox, which root cannot use.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

PATIENCE = 300_000  # ms

# The texts that start left of their figure, and the reasons that do not fit into their cell.
CUT = """[...document.querySelectorAll(".figure")].flatMap((figure) => [...figure.querySelectorAll("text")]
    .filter((text) => text.getBoundingClientRect().left < figure.getBoundingClientRect().left - 1))
    .concat([...document.querySelectorAll("#trials td.why")].filter((cell) => cell.scrollWidth > cell.clientWidth))
    .map((node) => node.textContent)"""


def keep(page: Page, name: str) -> None:
    """Store a screenshot in the folder of the variable SCREENSHOTS, for manual inspection."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def address(output: str, what: str) -> str:
    """Return the address in the line of a command's output with this beginning."""
    line = next(line for line in output.splitlines() if line.startswith(what))
    return line.split()[-1]


def fits(page: Page, width: int) -> None:
    """Check that nothing is wider than the window, outside of the scrollable area, or cut off in a table."""
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, f"the page is {overflow} pixels wider than a window of {width}"
    cut = page.evaluate(CUT)
    assert cut == [], "text outside of the scrollable area, or cut off in a table"
