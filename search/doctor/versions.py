"""What is installed, against what this release was tested with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from hpsearch.search.doctor.check import Check, Found, failed, ok, warning

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"  # a checkout has it, a wheel has not


def version_check() -> Check:
    """Return the check of the direct dependencies."""
    return Check("versions", lambda: _compare(direct_dependencies(), CONSTRAINTS))


def direct_dependencies() -> dict[str, str | None]:
    """Return what hpsearch needs itself: name to installed version, None where it is missing."""
    found: dict[str, str | None] = {}
    for line in requires("hpsearch") or []:
        requirement, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        name = re.split(r"[^\w.-]", requirement.strip())[0]
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if not marker:  # one with a marker may be of another platform
                found[name] = None
    return found


def _compare(installed: dict[str, str | None], constraints: Path) -> Found:
    if missing := [name for name, there in installed.items() if there is None]:
        return failed(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if not constraints.exists():
        return ok(f"{len(installed)} direct dependencies; there is no constraints.txt to compare them with")
    pinned = _pins(constraints)
    drifted = [
        f"{name} {there} (pinned {pin})"
        for name, there in installed.items()
        if there is not None and (pin := pinned.get(_normal(name))) is not None and _public(there) != pin
    ]
    if not drifted:
        return ok(f"{len(installed)} direct dependencies, as constraints.txt pins them")
    again = "remove .venv and run ./hpsearch, or: pip install --constraint constraints.txt --editable ."
    return warning(f"not as constraints.txt pins them: {', '.join(drifted)}", again)


def _pins(constraints: Path) -> dict[str, str]:
    lines = (line.partition("==") for line in constraints.read_text().splitlines() if not line.startswith("#"))
    return {_normal(name): pin.strip() for name, equal, pin in lines if equal}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _public(installed: str) -> str:
    """The version without the build's label: constraints.txt serves 2.13.0+cpu and 2.13.0+cu130 alike."""
    return installed.partition("+")[0]
