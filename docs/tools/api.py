"""The Python API: the public names of `hpsearch`, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import hpsearch
from docs.tools.markdown import paragraphs, safe
from docs.tools.settings import describe
from hpsearch.search.api.opening import StudyRow
from hpsearch.search.finalists.table import FinalistRow, Finalists
from hpsearch.search.finalists.winner import ExpectedScore
from hpsearch.search.promotion.promote import PromotionResult
from hpsearch.search.run.sync import SyncResult
from hpsearch.search.spec.spec import Settings
from hpsearch.search.study.control import BudgetChange
from hpsearch.search.study.summary import Summary
from hpsearch.search.worker.options import FleetWorkerOptions
from hpsearch.storage.urls import Addresses

KEYWORDS: dict[str, Any] = {f"Unpack[{keys.__name__}]": keys for keys in (Settings, FleetWorkerOptions, Addresses)}


RESULTS = (BudgetChange, ExpectedScore, FinalistRow, Finalists, PromotionResult, StudyRow, Summary, SyncResult)
_RESULTS_INTRO = "## Results\n\nFunctions and methods above return these classes, which `hpsearch` does not export.\n"


def api() -> str:
    """Return the reference of every public name and of the classes of results, from their docstrings."""
    intro = paragraphs(inspect.getdoc(hpsearch) or "") + "\n"
    names = sorted(hpsearch.__all__, key=str.lower)
    exported = [_member(name, getattr(hpsearch, name), level=2) for name in names]
    results = [_member(cls.__name__, cls, level=3) for cls in RESULTS]
    return "\n".join([intro, *exported, _RESULTS_INTRO, *results])


def _member(name: str, thing: Any, level: int) -> str:
    head = "#" * level
    if isinstance(thing, Mapping):
        items = "".join(f"    {json.dumps(key)}: {json.dumps(value)},\n" for key, value in thing.items())
        return f"{head} {name}\n\n```python\n{name} = {{\n{items}}}\n```\n"
    signature = _signature(name, thing)
    if isinstance(thing, property):
        signature = f"{name}: {inspect.signature(thing.fget).return_annotation}"
    parts = [f"{head} {name}\n", f"```python\n{signature}\n```\n"]
    if (doc := _own_doc(thing)) is not None:
        parts.append(_docstring(doc, _keywords(thing)) + "\n")
    if inspect.isclass(thing):
        for each, member in _methods(thing):
            parts.append(_member(f"{name}.{each}", member, level + 1))
    return "\n".join(parts)


def _own_doc(thing: Any) -> str | None:
    """Return the docstring, or None if `dataclass` generated it from the signature."""
    doc = inspect.getdoc(thing)
    generated = dataclasses.is_dataclass(thing) and doc is not None and doc.startswith(f"{thing.__name__}(")
    return None if generated else doc


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties with a docstring that a class or its base classes in hpsearch define."""
    own = [base for base in reversed(cls.__mro__) if base.__module__.partition(".")[0] == "hpsearch"]
    for name in dict.fromkeys(name for base in own for name in vars(base)):
        member = getattr(cls, name)
        is_member = isinstance(member, property) or inspect.isroutine(member)
        if not name.startswith("_") and is_member and inspect.getdoc(member):
            yield name, member


def _signature(name: str, thing: Any) -> str:
    """Return the signature, in lines of at most 100 characters."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"class {name}(Exception)"
    bare = [each.replace(annotation=_bare(each.annotation)) for each in signature.parameters.values()]
    said = str(signature.replace(parameters=bare, return_annotation=_bare(signature.return_annotation)))
    said = said.replace("<factory>", "...").replace(" -> None", "")
    line = ("class " if inspect.isclass(thing) else "") + name + said
    if len(line) <= 100:
        return line
    head, _, back = line[len(line) - len(said) :].rpartition(")")
    inner = _split(head.removeprefix("("))
    return line[: len(line) - len(said)] + "(\n" + "".join(f"    {part},\n" for part in inner) + ")" + back


class _Bare(str):
    """An annotation that `inspect` prints without quotes, as in the source."""

    __slots__ = ()
    __repr__ = str.__str__


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _split(parameters: str) -> list[str]:
    """Split parameters at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(parameters):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append(parameters[start:place].strip())
            start = place + 1
    return [*parts, parameters[start:].strip()]


SECTIONS = {"Args:", "Attributes:", "Returns:", "Raises:", "Yields:", "Example:", "Examples:"}


def _keywords(thing: Any) -> dict[str, list[str]]:
    """Return, by the name of a `**` parameter that is a `TypedDict`, a line for each of its keys."""
    lines = {}
    for name, annotation in getattr(thing, "__annotations__", {}).items():
        if (keys := KEYWORDS.get(annotation)) is not None:
            lines[name] = [
                f"  - `{key}` ({hint.__forward_arg__.removesuffix(' | None').replace(' | ', ' or ')}): "
                + safe(describe(key))
                for key, hint in keys.__annotations__.items()
            ]
    return lines


def _docstring(doc: str, keywords: Mapping[str, list[str]]) -> str:
    """Return a docstring in Google's style as Markdown.

    Args:
        doc: the docstring.
        keywords: the lines below the items of these parameters, unless an item refers to another method.
    """
    lines: list[str] = []
    section = ""
    for line in doc.replace("``", "`").splitlines():
        if line.strip() in SECTIONS and not line.startswith(" "):
            section = line.strip()
            lines += ["", f"**{section.removesuffix(':')}**", ""]
            lines += ["```python"] if section.startswith("Example") else []
        elif section and line and not line.startswith(" "):
            lines += ["```", ""] if section.startswith("Example") else [""]
            section = ""
            lines.append(line)
        elif section.startswith("Example"):
            lines.append(line.removeprefix("    "))
        elif section and (item := re.match(r"    (\*{0,2}\w[\w., *]*): (.*)", line)):
            lines.append(f"- `{item[1]}`: {safe(item[2])}")
            lines += [] if "see `" in item[2] else keywords.get(item[1], [])
        elif section and not line.strip():
            lines.append("")
        elif section:
            lines.append(safe("  " + line.strip() if lines and lines[-1].startswith(("- ", "  ")) else line.strip()))
        else:
            lines.append(safe(line))
    if section.startswith("Example"):
        while not lines[-1]:
            lines.pop()
        lines.append("```")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
