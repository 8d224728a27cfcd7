"""The pages agree with the code: all names in them exist, and they mention all settings, commands and tables."""

import re
from pathlib import Path

import pytest
import typer

from docs.packages import FOLDERS, ROOT
from hpsearch.search.cli import app
from tests.docs.pages import PAGES, commands, names_in

TEXT = "\n".join(path.read_text() for path in PAGES)
SETTING = re.compile(r"\bHPSEARCH_[A-Z_]*[A-Z]\b")
# Internal variables between the processes of a command.
INTERNAL = {
    f"HPSEARCH_{name}"
    for name in (
        "COMMAND",
        "EXIT_FILE",
        "FLEET_FAILED",
        "FLEET_PID",
        "FLEET_STUDY",
        "NOTEBOOK",
        "SERVICE",
        "SOCKET_FOLDER",
        "STARTED_BY",
    )
}
VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WRAPPERS = {"add", "test", "lint", "docs"}  # commands of the wrapper ./hpsearch


def test_every_setting_is_documented() -> None:
    sources = [ROOT / "hpsearch", *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
    used = {name for path in sources for name in SETTING.findall(path.read_text())}
    assert sorted(used - INTERNAL - set(SETTING.findall(TEXT))) == []


def test_every_setting_of_compose_is_in_its_header_or_a_page() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    header = text[: text.index("\nx-")]
    used = set(re.findall(r"\$\{(\w+):-", text))
    assert used
    assert sorted(used - set(re.findall(r"^#   (\w+) ", header, re.MULTILINE)) - set(SETTING.findall(TEXT))) == []


def test_pages_name_every_command_and_no_other() -> None:
    shown = set(re.findall(r"(?:\./hpsearch|`hpsearch) ([a-z-]+)", TEXT))
    assert sorted(shown - WRAPPERS - set(VERBS)) == []
    text = "\n".join(path.read_text() for path in PAGES if path.parent.name == "how-to" or path.name == "tutorial.md")
    assert sorted(verb for verb in VERBS if not re.search(rf"[`/](?:hpsearch )?{verb}\b", text)) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_pages_are_valid(path: Path) -> None:
    for words in commands(path):
        if "./hpsearch" not in words[:2]:
            continue
        verb, *arguments = words[words.index("./hpsearch") + 1 :]
        if verb not in WRAPPERS:
            if ">" in arguments:
                arguments = arguments[: arguments.index(">")]
            VERBS[verb].make_context(verb, arguments)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_pages_have_existing_targets(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_files_in_the_path_of_a_trial_exist() -> None:
    way = (ROOT / "docs" / "architecture.md").read_text().partition("## The path of a trial")[2].partition("\n## ")[0]
    named = set(re.findall(r"(?:search|objectives|storage)/[\w/]+\.py", way))
    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_tests_that_pages_name_exist() -> None:
    named = set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", TEXT))
    assert named
    assert sorted(f"{path}::{name}" for path, name in named if name not in names_in(path)) == []


def test_every_guarantee_names_its_tests() -> None:
    guarantees = (ROOT / "docs" / "guarantees.md").read_text().split("\n### ")[1:]
    assert len(guarantees) > 20
    assert [text.splitlines()[0] for text in guarantees if "- `tests/" not in text] == []


def test_every_table_of_hpsearch_is_described() -> None:
    made = set()
    for path in (ROOT / "storage" / "database" / "migrations" / "versions").glob("*.py"):
        made |= set(re.findall(r'create_table\(\s*"(\w+)"', path.read_text()))
    assert made
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert sorted(table for table in made if f"| `{table}` |" not in text) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
