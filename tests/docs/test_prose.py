"""The linter of the language rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import prose


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    return tmp_path


def words(*parts: str) -> str:
    """Join the parts of excluded words, which this file may not contain either."""
    return "".join(parts)


def test_excluded_words_are_found_in_texts_but_not_in_code(root: Path) -> None:
    anew, beside, go_on = words("a", "new"), words("be", "side"), words("go", " on")
    (root / "a.py").write_text(
        f'"""Start {anew}.\n\n``{beside}`` is code, and so is\nthe worker\n{"w" + "ho"} waits."""\n'
        f'{beside} = "{beside}"  # {go_on}\n'
    )
    assert list(prose.find_faults(root / "a.py")) == [
        f"a.py:1: '{anew}': write again, new",
        f"a.py:4: 'worker {'w' + 'ho'}': write that, which",
        f"a.py:6: '{go_on}': write continue",
    ]


def test_code_of_a_page_is_skipped(root: Path) -> None:
    anew, nobody = words("a", "new"), words("No", "body")
    page = f"Users who wait.\n\n```sh\necho {anew}\n```\n`{anew}` https://a/{anew}\n{nobody} waits.\n"
    (root / "a.md").write_text(page)
    assert list(prose.find_faults(root / "a.md")) == [
        f"a.md:7: '{nobody}': write the noun: the process, the worker, no user"
    ]
