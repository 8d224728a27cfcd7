"""A headless Chromium of the system's, and what tests of pages share."""

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

# Quiet: no calls home, no sandbox of its own (which root may not have).
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

# The texts of figures that begin left of their figure, and the reasons that do not fit their cell.
CUT = """[...document.querySelectorAll(".figure")].flatMap((figure) => [...figure.querySelectorAll("text")]
    .filter((text) => text.getBoundingClientRect().left < figure.getBoundingClientRect().left - 1))
    .concat([...document.querySelectorAll("#trials td.why")].filter((cell) => cell.scrollWidth > cell.clientWidth))
    .map((node) => node.textContent)"""


def keep(page: Page, name: str) -> None:
    """Keep a screenshot in the folder that SCREENSHOTS names, for a person to look at."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def address(output: str, what: str) -> str:
    """The address on the line of a command's output that begins so."""
    line = next(line for line in output.splitlines() if line.startswith(what))
    return line.split()[-1]


def fits(page: Page, width: int) -> None:
    """Check that nothing is wider than the window, outside of the scrollable area, or cut off in a table."""
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, f"the page is {overflow} pixels wider than a window of {width}"
    cut = page.evaluate(CUT)
    assert cut == [], "text outside of the scrollable area, or cut off in a table"
