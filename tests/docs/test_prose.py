"""The linter of the language rules, which does not check this file."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import prose


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    return tmp_path


def test_excluded_words_are_found_in_texts_but_not_in_code(root: Path) -> None:
    (root / "a.py").write_text(
        '"""Start anew.\n\n``beside`` is code, and so is\nthe worker\nwho waits."""\nbeside = "beside"  # go on\n'
    )
    assert list(prose.find_faults(root / "a.py")) == [
        "a.py:1: 'anew': write again, new",
        "a.py:4: 'worker who': write that, which",
        "a.py:6: 'go on': write continue",
    ]


def test_code_of_a_page_is_skipped(root: Path) -> None:
    (root / "a.md").write_text("Users who wait.\n\n```sh\necho anew\n```\n`anew` https://a/anew\nNobody waits.\n")
    assert list(prose.find_faults(root / "a.md")) == [
        "a.md:7: 'Nobody': write the noun: the process, the worker, no user"
    ]
