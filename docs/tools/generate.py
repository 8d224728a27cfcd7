"""Generate tables and reference pages from the code, between `<!-- generated: NAME -->` and `<!-- end -->`.

Run it after a change of a setting, a command, a docstring of the API, or the packages:
`.venv/bin/python -m docs.tools.generate`.
tests/docs/test_generated.py fails if a page is outdated.
"""

from __future__ import annotations

import re
import sys

from docs.packages import PACKAGES, ROOT, find_package_imports
from docs.tools import api, command_line, packages_table, settings
from docs.tools.picture import draw

PAGES = ("reference/settings.md", "reference/cli.md", "reference/api.md", "architecture.md")
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

BLOCKS = {
    "study-settings": settings.study_settings,
    "samplers": lambda: settings.choices("sampler"),
    "pruners": lambda: settings.choices("pruner"),
    "training-settings": settings.training_settings,
    "environment": settings.environment,
    "command-line": command_line.command_line,
    "api": api.api,
    "packages": packages_table.make_packages_table,
}


def generated(text: str) -> str:
    """Return a page with its generated blocks up to date."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]()}\n\n{block[3]}", text)


def outputs() -> dict[str, str]:
    """Return the up-to-date text of each file with generated content, by its path below `docs`."""
    pages = {page: generated((ROOT / "docs" / page).read_text()) for page in PAGES}
    return {**pages, "packages.svg": draw(PACKAGES, find_package_imports())}


def main() -> int:
    """Write the files that are outdated."""
    for page, text in outputs().items():
        path = ROOT / "docs" / page
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote docs/{page}")  # noqa: T201 for the user
    return 0


if __name__ == "__main__":
    sys.exit(main())
