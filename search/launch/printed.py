"""The text that an engine is given: a template of this folder, filled in and quoted for its language."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shlex
import sys
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpsearch.search.launch.settings import Launch

_TEMPLATES = {
    "slurm": "slurm.sh.j2",
    "kubernetes": "kubernetes.yaml.j2",
    "ray": "ray.py.j2",
    "systemd": "systemd.service.j2",
}
_SHIFT = {"M": 20, "G": 30, "T": 40}
_LONGEST_NAME = 45  # of a Kubernetes Job: its pods' names, of at most 63 characters, end in an index and five more


def printed(launch: Launch) -> str:
    """Return what the engine is given, ending in a line break."""
    environment = Environment(
        loader=PackageLoader("hpsearch.search.launch"),
        autoescape=False,  # noqa: S701 it is no HTML: each value is quoted by its language's filter
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": shlex.quote,
        "json": json.dumps,
        "python": repr,
        "unit": unit_quoted,
        "dollars": _dollars,
    }
    return environment.get_template(_TEMPLATES[launch.engine]).render(launch=launch, **_values(launch))


def _values(launch: Launch) -> dict[str, Any]:
    number, letter = launch.memory_parts
    together = min(launch.sharing, launch.workers)
    return {
        "study": launch.study,
        "worker": worker_command(launch),
        "tasks": -(-launch.workers // together),  # of Slurm: one for each worker, or for those that share a GPU
        "together": together,
        "memory_of_task": f"{number * together}{letter}",
        "memory_bytes": number << _SHIFT[letter],
        "gpus": launch.gpus if 0 < launch.gpus < 1 else int(launch.gpus),
        "user": user(),
        "job_name": job_name(launch.study),
        "devices": unit_devices(launch),
    }


def worker_command(launch: Launch) -> list[str]:
    """Return the one command that a worker is."""
    # -P: a module in the user's folder must not hide an installed package of the same name.
    start = launch.command or (sys.executable, "-P", "-m", "hpsearch")
    several = ["--devices", str(int(launch.gpus))] if launch.gpus > 1 else []
    return [*start, "worker", "--study", launch.study, "--grace", str(launch.worker_grace), *several]


def user() -> str:
    """Return the account that systemd runs workers as: the one of this process, unless it may do everything."""
    number = os.geteuid()
    return "hpsearch" if number == 0 else pwd.getpwuid(number).pw_name


def job_name(study: str) -> str:
    """Return a study's name as Kubernetes takes it: lower case, digits and dashes, and another for each study."""
    name = re.sub(r"[^a-z0-9-]+", "-", study.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    if name != study:
        mark = hashlib.sha256(study.encode()).hexdigest()[:6]
        name = f"{name[: _LONGEST_NAME - 7]}-{mark}".strip("-")
    return f"hpsearch-{name}"


def _dollars(text: str) -> str:
    """Return a variable's value for Kubernetes, which replaces $(NAME)."""
    return text.replace("$(", "$$(")


def unit_quoted(text: str, *, command: bool = True) -> str:
    """Return a word as a unit of systemd holds it; `command`: in a line of Exec, which replaces variables too."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if command else text}"'


def unit_devices(launch: Launch) -> str:
    """Return the GPUs of instance %i, counted from 0, as arithmetic of the shell within a line of Exec."""
    if launch.sharing > 1:
        return f"$$((%i / {launch.sharing}))"
    return ",".join(f"$$((%i * {int(launch.gpus)} + {index}))" for index in range(int(launch.gpus)))
