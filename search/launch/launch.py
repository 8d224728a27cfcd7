"""Generate the job files with which Slurm, Kubernetes, Ray and systemd run workers."""

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

from hpsearch.redaction import redact
from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.search.services import find_services
from hpsearch.search.spec.spec import NAME_PATTERN
from hpsearch.search.study.study import load_study
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.urls import normalise_url

ENGINES = ("slurm", "kubernetes", "ray", "systemd")
SHUTDOWN_MARGIN_SECONDS = 5  # part of the grace period, for the delivery of the signal and the exit of the worker
_MIN_GRACE_SECONDS, _MAX_GRACE_SECONDS = 2 * SHUTDOWN_MARGIN_SECONDS, 65_535  # the maximum of Slurm's --signal
_MAX_WORKERS = 10_000
_TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_MEMORY = re.compile(r"([1-9]\d*)([MGT])")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")
# Where each engine reads the password, for the error about a password in the URL.
_PASSWORD_PLACES = {
    "slurm": "into ~/.pgpass",
    "kubernetes": "into the Secret 'hpsearch' as PGPASSWORD",
    "ray": "into ~/.pgpass of each machine",
    "systemd": "into /etc/hpsearch/worker.env as PGPASSWORD",
}
# Options that only some engines support. The other engines would ignore these options silently.
_OPTION_ENGINES = {"time": ("slurm",), "image": ("kubernetes",), "command": ("slurm", "systemd")}


@dataclass(frozen=True)
class LaunchConfig:
    """The settings of a job file.

    Attributes:
        engine: one of `ENGINES`.
        study: name of the study.
        workers: number of workers.
        gpus: GPUs of each worker: 0, a whole number, or a fraction of a GPU that several workers share.
        cpus: cores of each worker.
        memory: memory of each worker in powers of two, such as ``8G``.
        time: Slurm's time limit of a job, ``[DAYS-]HOURS:MINUTES:SECONDS``; None uses the limit of the partition.
        grace: seconds from SIGTERM to SIGKILL.
        image: container image with hpsearch.
        storage_url: database URL without a password; None if workers use the embedded stack, or if the Kubernetes
            Secret contains the URL.
        home: home folder, with the embedded stack, runs and logs; None uses the default of each machine.
        command: command that starts hpsearch on the machines; if empty, this Python interpreter is used.
        folder: folder with the user's objectives.

    Raises:
        SearchError: a setting is invalid.
        StorageError: `storage_url` is not a Postgres URL.
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
            raise SearchError(f"unknown engine {self.engine!r}{suggest_names(self.engine, ENGINES)}")
        if not re.fullmatch(NAME_PATTERN.removesuffix("$"), self.study) or len(self.study) > 100:
            raise SearchError(f"STUDY {self.study!r} is not a study name; use letters, digits, '.', '_' and '-'")
        for option, number, least, most in (
            ("--workers", self.workers, 1, _MAX_WORKERS),
            ("--cpus-per-worker", self.cpus, 1, 1024),
            ("--grace", self.grace, _MIN_GRACE_SECONDS, _MAX_GRACE_SECONDS),
        ):
            if not least <= number <= most:
                raise SearchError(f"{option} must be in [{least}, {most}], not {number}")
        self._check_gpus()
        if not _MEMORY.fullmatch(self.memory):
            raise SearchError(f"--memory {self.memory!r} is not a size; give a whole number with M, G or T, such as 8G")
        for name, engines in _OPTION_ENGINES.items():
            if getattr(self, name) and self.engine not in engines:
                raise SearchError(f"--{name} is only for {' and '.join(engines)}; remove --{name} for {self.engine}")
        self._check_time()
        if self.engine == "kubernetes" and not self.image:
            raise SearchError("--image is missing; give a container image with hpsearch, built from the Dockerfile")
        if self.image and not _IMAGE.fullmatch(self.image):
            raise SearchError(f"--image {self.image!r} is not an image name such as registry.example/hpsearch:0.1.0")
        self._check_url()
        for name, text in (("--home", self.home), ("--command", " ".join(self.command)), ("this folder", self.folder)):
            if text and not text.isprintable():
                raise SearchError(f"{name} {text!r} contains an unprintable character; choose another value")
        if self.engine == "systemd" and self.folder.endswith("\\"):  # systemd would join the next line
            raise SearchError(f"this folder {self.folder!r} ends with a backslash; change to another folder")

    def _check_gpus(self) -> None:
        gpus = self.gpus
        if not (math.isfinite(gpus) and 0 <= gpus <= 64 and (gpus < 1 or gpus == int(gpus))):
            raise SearchError(f"--gpus-per-worker must be a whole number, or below 1 for a shared GPU, not {gpus:g}")
        if 0 < gpus < 1 / 64:
            raise SearchError(f"--gpus-per-worker {gpus:g} lets more than 64 workers share a GPU; give at least 0.016")
        if self.engine == "kubernetes" and 0 < gpus < 1:
            raise SearchError(
                f"--gpus-per-worker {gpus:g} is not available for kubernetes, which assigns whole GPUs; give 1, and "
                "share GPUs with the time slicing of the device plugin"
            )

    def _check_time(self) -> None:
        if self.time is None:
            return
        if not (parts := _TIME.fullmatch(self.time)):
            raise SearchError(f"--time {self.time!r} is invalid; give [DAYS-]HOURS:MINUTES:SECONDS, such as 4:00:00")
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        if ((days * 24 + hours) * 60 + minutes) * 60 + seconds <= self.grace:
            raise SearchError(f"--time {self.time!r} is not longer than --grace {self.grace} s; give a longer --time")

    def _check_url(self) -> None:
        if self.storage_url is None:
            return
        if redact(self.storage_url) != self.storage_url:
            raise SearchError(
                f"--storage-url {redact(self.storage_url)!r} contains a password, which the job file would show; move "
                f"the password {_PASSWORD_PLACES[self.engine]}"
            )
        normalise_url(self.storage_url)
        if not self.storage_url.isprintable():
            raise SearchError(f"--storage-url {self.storage_url!r} contains an unprintable character; correct the URL")

    @property
    def workers_per_gpu(self) -> int:
        """The number of workers that share a GPU."""
        return int(1 / self.gpus + 1e-9) if 0 < self.gpus < 1 else 1

    @property
    def worker_grace(self) -> int:
        """The `--grace` of the workers in seconds."""
        return self.grace - SHUTDOWN_MARGIN_SECONDS

    @property
    def memory_parts(self) -> tuple[int, str]:
        """The memory of a worker as number and unit letter, such as (8, "G")."""
        found = _MEMORY.fullmatch(self.memory)
        assert found is not None
        return int(found[1]), found[2]


_UNIT_BITS = {"M": 20, "G": 30, "T": 40}
_MAX_JOB_NAME = 45  # of a Kubernetes Job: a pod name has at most 63 characters, including an index and a random suffix


def render_manifest(launch: LaunchConfig) -> str:
    """Return the text of the job file for the engine of `launch`."""
    environment = Environment(
        loader=PackageLoader("hpsearch.search.launch"),
        autoescape=False,  # noqa: S701 not HTML: the filter of its language quotes each value
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": shlex.quote,
        "json": json.dumps,
        "python": repr,
        "unit": quote_systemd_word,
        "dollars": _escape_dollars,
    }
    return environment.get_template(f"{launch.engine}.j2").render(launch=launch, **_make_template_values(launch))


def _make_template_values(launch: LaunchConfig) -> dict[str, Any]:
    number, letter = launch.memory_parts
    together = min(launch.workers_per_gpu, launch.workers)
    return {
        "study": launch.study,
        "worker": make_worker_command(launch),
        "tasks": -(-launch.workers // together),  # Slurm tasks: one for each worker, or for each shared GPU
        "together": together,
        "memory_of_task": f"{number * together}{letter}",
        "memory_bytes": number << _UNIT_BITS[letter],
        "gpus": launch.gpus if 0 < launch.gpus < 1 else int(launch.gpus),
        "user": find_worker_user(),
        "job_name": make_job_name(launch.study),
        "devices": format_systemd_devices(launch),
    }


def make_worker_command(launch: LaunchConfig) -> list[str]:
    """Return the command line that starts a worker."""
    # -P: a module in the user's folder must not hide an installed package of the same name.
    start = launch.command or (sys.executable, "-P", "-m", "hpsearch")
    devices = ["--devices", str(int(launch.gpus))] if launch.gpus > 1 else []
    return [*start, "worker", "--study", launch.study, "--grace", str(launch.worker_grace), *devices]


def find_worker_user() -> str:
    """Return the user account for workers under systemd: the user of this process, or ``hpsearch`` if that is root."""
    number = os.geteuid()
    return "hpsearch" if number == 0 else pwd.getpwuid(number).pw_name


def make_job_name(study: str) -> str:
    """Return the name of a study's Kubernetes job, which has only lower-case letters, digits and dashes.

    Different studies have different names.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", study.lower()).strip("-")[:_MAX_JOB_NAME].strip("-")
    if name != study:
        mark = hashlib.sha256(study.encode()).hexdigest()[:6]
        name = f"{name[: _MAX_JOB_NAME - 7]}-{mark}".strip("-")
    return f"hpsearch-{name}"


def _escape_dollars(text: str) -> str:
    """Escape the value of an environment variable for Kubernetes, which expands $(NAME)."""
    return text.replace("$(", "$$(")


def quote_systemd_word(text: str, *, command: bool = True) -> str:
    """Quote a word for a systemd unit.

    Args:
        text: the word.
        command: whether the word is in an Exec line, in which systemd also expands variables.
    """
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if command else text}"'


def format_systemd_devices(launch: LaunchConfig) -> str:
    """Return shell arithmetic for an Exec line that computes the GPUs (counted from 0) of the unit's instance %i."""
    if launch.workers_per_gpu > 1:
        return f"$$((%i / {launch.workers_per_gpu}))"
    return ",".join(f"$$((%i * {int(launch.gpus)} + {index}))" for index in range(int(launch.gpus)))


def check_study_exists(launch: LaunchConfig) -> str | None:
    """Check that the study exists in the database.

    Returns:
        Why the check was not possible; None if the study exists.

    Raises:
        SearchError: the database has no such study.
    """
    if launch.engine == "kubernetes" and launch.storage_url is None:
        return "the database URL is only in the Kubernetes Secret 'hpsearch'"
    try:
        services = find_services({"storage_url": launch.storage_url, "home": launch.home})
        storage = open_storage(services.storage_url, application_name="hpsearch fleet print")
    except StorageError as error:
        return str(error)
    load_study(storage, launch.study)
    return None
