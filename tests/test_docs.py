"""The documentation keeps up with the code: settings, verbs and files that are named exist, and the other way round."""

import re
from pathlib import Path

import typer

from search.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SETTING = re.compile(r"\bHPSEARCH_[A-Z_]*[A-Z]\b")
# Between the processes of one command, not for people.
INTERNAL = {"HPSEARCH_COMMAND", "HPSEARCH_FLEET_PID", "HPSEARCH_SERVICE"}


def test_every_setting_is_documented() -> None:
    sources = [
        ROOT / "hpsearch",
        *(path for name in ("search", "storage", "objectives") for path in (ROOT / name).rglob("*.py")),
    ]
    used = {name for path in sources for name in SETTING.findall(path.read_text())}
    assert sorted(used - INTERNAL - set(SETTING.findall(README))) == []


def test_every_setting_of_compose_is_in_its_header_or_the_readme() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    header = text[: text.index("\nx-")]
    used = set(re.findall(r"\$\{(\w+):-", text))
    assert used
    assert sorted(used - set(re.findall(r"^#   (\w+) ", header, re.MULTILINE)) - set(SETTING.findall(README))) == []


def test_the_readme_has_every_verb_and_no_other() -> None:
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = set(re.findall(r"(?:\./hpsearch|`hpsearch) ([a-z-]+)", README))
    assert shown - {"test", "lint"} <= verbs
    assert sorted(verb for verb in verbs if f"`{verb}`" not in README and verb not in shown) == []


# Flags that only one verb has and its --help explains.
OWN_FLAGS = {
    "--help",
    "--all",
    "--output",
    "--yes",
    "--bootstrap",
    "--host",
    "--port",
    "--artifacts",
    "--allowed-hosts",
}


def test_the_readme_has_every_flag() -> None:
    commands = [typer.main.get_command(app)]
    flags: set[str] = set()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        flags |= {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
    assert len(flags) > len(OWN_FLAGS)
    assert sorted(flag for flag in flags - OWN_FLAGS if f"{flag}`" not in README and f"{flag} " not in README) == []


def test_what_the_readme_points_to_is_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
