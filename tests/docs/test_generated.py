"""The generated parts of the pages are up to date."""

import re
from collections import Counter

from docs.packages import PACKAGES, ROOT, find_package_imports
from docs.tools.api import _docstring, _signature, api
from docs.tools.generate import PAGES, generated, outputs
from docs.tools.markdown import table
from docs.tools.picture import remove_implied_arrows


def test_pages_are_up_to_date() -> None:
    behind = [page for page, text in outputs().items() if (ROOT / "docs" / page).read_text() != text]
    assert behind == [], "run .venv/bin/python -m docs.tools.generate"


def test_generating_an_outdated_page_updates_it_once() -> None:
    page = "before\n\n<!-- generated: samplers -->\nold\n<!-- end -->\n\nafter\n"
    once = generated(page)
    assert "old" not in once
    assert "`tpe`" in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert generated(once) == once


def test_every_page_with_marks_is_generated() -> None:
    marked = [path for path in (ROOT / "docs").rglob("*.md") if "<!-- generated: " in path.read_text()]
    assert {path.relative_to(ROOT / "docs").as_posix() for path in marked} == set(PAGES)


def test_the_picture_has_every_package_and_only_arrows_that_are_needed() -> None:
    picture = (ROOT / "docs" / "packages.svg").read_text()
    arrows = find_package_imports()
    assert [name for name in PACKAGES if arrows[name] and f"<title>{name}</title>" not in picture] == []
    assert remove_implied_arrows({"a": set(), "b": {"a"}, "c": {"a", "b"}}, "abc") == {
        "a": set(),
        "b": {"a"},
        "c": {"b"},
    }


def test_a_table_has_no_empty_columns() -> None:
    text = table(("option", "default", "what it does"), [("`--all`", "", "List all"), ("`--top`", "", "")])
    assert text.splitlines() == ["| option | what it does |", "|---|---|", "| `--all` | List all |", "| `--top` |  |"]


def test_a_docstring_becomes_markdown() -> None:
    doc = "Does it.\n\nArgs:\n    a: one,\n        on two lines.\n    b, c: others.\n\nExample:\n    >>> f(1)\n    <S>"
    assert _docstring(doc, {"a": ["  - `key`: below it"], "b": []}) == (
        "Does it.\n\n**Args**\n\n- `a`: one,\n  - `key`: below it\n  on two lines.\n- `b, c`: others.\n\n"
        "**Example**\n\n```python\n>>> f(1)\n<S>\n```"
    )


def test_a_long_signature_has_a_line_for_each_parameter() -> None:
    def function(*, one: dict[str, tuple[int, str]], two: int = 2, longer_than_all_the_others: str = "") -> int: ...

    assert _signature("function", function).splitlines() == [
        "function(",
        "    *,",
        "    one: dict[str, tuple[int, str]],",
        "    two: int = 2,",
        "    longer_than_all_the_others: str = '',",
        ") -> int",
    ]


def test_the_reference_has_every_member_once_and_properties_without_parentheses() -> None:
    headings = re.findall(r"^#+ (.+)$", text := api(), re.M)
    assert [name for name, count in Counter(headings).items() if count > 1] == []
    assert "\nFitResult.best_value: float\n" in text
