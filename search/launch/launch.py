"""Generate the files by which Slurm, Kubernetes, Ray and systemd run workers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pwd
import re
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpsearch.search.errors import SearchError, nearest
from hpsearch.search.services import find_services
from hpsearch.search.spec.spec import NAME_PATTERN
from hpsearch.search.study.study import load_study
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.urls import normalise, redact

ENGINES = ("slurm", "kubernetes", "ray", "systemd")
MARGIN = 5  # seconds of the grace that a worker leaves for the way of the signal and its own end
_LEAST_GRACE, _LONGEST_GRACE = 2 * MARGIN, 65_535  # seconds; Slurm takes no longer notice
_MOST_WORKERS = 10_000
_TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_MEMORY = re.compile(r"([1-9]\d*)([MGT])")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")
# Where each engine has a password from, for whoever wrote it into the URL.
_PASSWORD = {
    "slurm": "into ~/.pgpass",
    "kubernetes": "into the Secret 'hpsearch' as PGPASSWORD",
    "ray": "into ~/.pgpass of each machine",
    "systemd": "into /etc/hpsearch/worker.env as PGPASSWORD",
}
# Options that one engine alone can follow; the others would leave them out without a word.
_ONLY = {"time": ("slurm",), "image": ("kubernetes",), "command": ("slurm", "systemd")}


@dataclass(frozen=True)
class Launch:
    """A fleet as an engine is to run it.

    Attributes:
        engine: one of `ENGINES`.
        study: its name.
        workers: how many.
        gpus: of each worker: none, a whole number, or a fraction of one that several share.
        cpus: cores of each worker.
        memory: of each worker, such as ``8G``; powers of two.
        time: Slurm's time limit of a job, ``[DAYS-]HOURS:MINUTES:SECONDS``; without one the partition's.
        grace: seconds from being told to go to the kill.
        image: of a container with hpsearch.
        storage_url: the database's, without a password; None where it is the embedded one, or in the Secret.
        home: folder of the embedded stack, of runs and logs; None where each machine has its own.
        command: what starts hpsearch there.
        folder: where objectives of one's own are found.

    Raises:
        SearchError: a setting is wrong.
        StorageError: the URL is not one of Postgres.
    """

    engine: str
    study: str
    workers: int
    gpus: float = 0.0
    cpus: int = 2
    memory: str = "8G"
    time: str | None = None
    grace: int = 60
    image: str | None = None
    storage_url: str | None = None
    home: str | None = None
    command: tuple[str, ...] = ()
    folder: str = "."

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise SearchError(f"no engine {self.engine!r}{nearest(self.engine, ENGINES)}")
        if not re.fullmatch(NAME_PATTERN.removesuffix("$"), self.study) or len(self.study) > 100:
            raise SearchError(f"STUDY {self.study!r} is no name of a study: letters, digits, '.', '_' and '-'")
        for option, number, least, most in (
            ("--workers", self.workers, 1, _MOST_WORKERS),
            ("--cpus-per-worker", self.cpus, 1, 1024),
            ("--grace", self.grace, _LEAST_GRACE, _LONGEST_GRACE),
        ):
            if not least <= number <= most:
                raise SearchError(f"{option} must be from {least} to {most}, not {number}")
        self._check_gpus()
        if not _MEMORY.fullmatch(self.memory):
            raise SearchError(f"--memory {self.memory!r} is no size: give a whole number with M, G or T, such as 8G")
        for name, engines in _ONLY.items():
            if getattr(self, name) and self.engine not in engines:
                raise SearchError(f"--{name} is for {' and '.join(engines)}: leave it out for {self.engine}")
        self._check_time()
        if self.engine == "kubernetes" and not self.image:
            raise SearchError("--image is missing: kubernetes needs one with hpsearch, such as the Dockerfile builds")
        if self.image and not _IMAGE.fullmatch(self.image):
            raise SearchError(f"--image {self.image!r} is no name of an image, such as registry.example/hpsearch:0.1.0")
        self._check_url()
        for name, text in (("--home", self.home), ("--command", " ".join(self.command)), ("the folder", self.folder)):
            if text and not text.isprintable():
                raise SearchError(f"{name} {text!r} holds a character that a script cannot")

    def _check_gpus(self) -> None:
        gpus = self.gpus
        if not (math.isfinite(gpus) and 0 <= gpus <= 64 and (gpus < 1 or gpus == int(gpus))):
            raise SearchError(f"--gpus-per-worker must be 0, below 1 (shared) or a whole number, not {gpus:g}")
        if 0 < gpus < 1 / 64:
            raise SearchError(f"--gpus-per-worker {gpus:g} lets more than 64 workers share a GPU: give a larger part")
        if self.engine == "kubernetes" and 0 < gpus < 1:
            raise SearchError(
                f"--gpus-per-worker {gpus:g} cannot be had from kubernetes, which gives whole GPUs: give 1, and let "
                "the device plugin's time slicing make several of each"
            )

    def _check_time(self) -> None:
        if self.time is None:
            return
        if not (parts := _TIME.fullmatch(self.time)):
            raise SearchError(f"--time {self.time!r} is no time limit: give [DAYS-]HOURS:MINUTES:SECONDS, as 4:00:00")
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        if ((days * 24 + hours) * 60 + minutes) * 60 + seconds <= self.grace:
            raise SearchError(f"--time {self.time!r} is no longer than --grace {self.grace}: nothing could be trained")

    def _check_url(self) -> None:
        if self.storage_url is None:
            return
        if redact(self.storage_url) != self.storage_url:
            raise SearchError(
                f"--storage-url {redact(self.storage_url)!r} holds a password, which would be printed: leave it out of "
                f"the URL and put it {_PASSWORD[self.engine]}"
            )
        normalise(self.storage_url)
        if not self.storage_url.isprintable():
            raise SearchError(f"--storage-url {self.storage_url!r} holds a character that a script cannot")

    @property
    def sharing(self) -> int:
        """How many workers share a GPU, or have theirs alone."""
        return int(1 / self.gpus + 1e-9) if 0 < self.gpus < 1 else 1

    @property
    def worker_grace(self) -> int:
        """What a worker is told of the grace, in seconds."""
        return self.grace - MARGIN

    @property
    def memory_parts(self) -> tuple[int, str]:
        """The number and the letter of the memory."""
        found = _MEMORY.fullmatch(self.memory)
        assert found is not None
        return int(found[1]), found[2]


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
    return environment.get_template(f"{launch.engine}.j2").render(launch=launch, **_values(launch))


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


def why_unknown(launch: Launch) -> str | None:
    """Return why the database could not be asked for the study, or None where it has it.

    Raises:
        SearchError: it answers, and has no such study.
    """
    if launch.engine == "kubernetes" and launch.storage_url is None:
        return "its database is in the Secret"
    try:
        services = find_services({"storage_url": launch.storage_url, "home": launch.home})
        storage = open_storage(services.storage_url, application_name="hpsearch fleet print")
    except StorageError as error:
        return str(error)
    load_study(storage, launch.study)
    return None
