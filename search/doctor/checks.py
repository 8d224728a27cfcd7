"""The checks of `hpsearch doctor`. The finding of a failed check has a remedy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from hpsearch.objectives.references import locate_source
from hpsearch.search.console import format_command, pluralize
from hpsearch.search.errors import USER_ERRORS
from hpsearch.search.fleet.cores_and_gpus import count_cores
from hpsearch.search.study.study import StoredStudy, check_release
from hpsearch.search.study.trust import check_source, find_distrust
from hpsearch.storage.attributes import VERSION, WANTED_WORKERS
from hpsearch.storage.checkpoints.store import CheckpointStore
from hpsearch.storage.errors import StorageError, format_error
from hpsearch.storage.home import HOME_VARIABLE
from hpsearch.storage.mlflow.artifacts import remove_probe, write_probe
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server, describe_error, read_server_version
from hpsearch.storage.trials.history import read_progress
from hpsearch.storage.trials.worker_registry import read_loss_counts, read_workers
from hpsearch.storage.urls import redact_password

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: name of the check.
        status: ``ok``, ``skipped``, ``warning`` if a worker can run with a drawback, or ``failed`` if a worker cannot
            run or would lose data.
        found: description of the result.
        remedy: command or action that solves the problem; empty if `found` includes the remedy.
    """

    check: str = field(default="", kw_only=True)
    status: Status
    found: str
    remedy: str = ""


# Name, function, and the name of the check that must pass first.
Checks = tuple[tuple[str, Callable[[Any], Finding], str], ...]


class Checker:
    """Runner of checks. It skips checks that depend on a failed check.

    Args:
        secrets: URLs whose passwords no finding may contain.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._causes: dict[str, str] = {}  # by failed or skipped check: the failed check that caused the result

    def run(self, name: str, look: Callable[[], Finding], *needs: str) -> Finding:
        """Run a check and return its finding.

        Args:
            name: name of the check.
            look: function that performs the check; if it raises an exception, the check fails.
            needs: names of earlier checks; if one of these failed or was skipped, this check is skipped.
        """
        cause = next((self._causes[need] for need in needs if need in self._causes), None)
        found = self._try(look) if cause is None else Finding("skipped", f"not run, because the check {cause!r} failed")
        if found.status in {"failed", "skipped"}:
            self._causes[name] = cause or name
        return replace(found, check=name)

    def has_passed(self, name: str) -> bool:
        """Return whether a check neither failed nor was skipped."""
        return name not in self._causes

    def _try(self, look: Callable[[], Finding]) -> Finding:
        try:
            with redirect_stdout(sys.stderr):  # an objective may print
                return look()
        except USER_ERRORS as error:  # the message includes the remedy
            return Finding("failed", str(error))
        except Exception as error:  # the other checks still run
            message = f"{type(error).__name__}: {format_error(error)}"
            for url in self._secrets:
                message = redact_password(message, url)
            return Finding("failed", message)


def check_store(url: str) -> Finding:
    """Check that the checkpoint store at a URL is writable."""
    checkpoints = CheckpointStore(url)
    checkpoints.check(create=False)
    return Finding("ok", f"{checkpoints.url} is writable")


_NVIDIA_SMI_TIMEOUT_SECONDS = 20  # nvidia-smi can hang with its driver


def check_cores() -> Finding:
    """Count the cores that this process may use."""
    allowed, installed = count_cores(), os.cpu_count() or 1
    limited = f" (this process may not use the other {installed - allowed})" if allowed < installed else ""
    return Finding("ok", pluralize(allowed, "core") + limited)


def check_gpus() -> Finding:
    """List the GPUs that torch detects; warn about GPUs that only the NVIDIA driver detects."""
    import torch
    from rich.filesize import decimal

    if torch.cuda.is_available():
        devices = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append(f"cuda:{index} {name}, {decimal(free)} of {decimal(total)} free")
        return Finding("ok", "; ".join(devices))
    names = _list_driver_gpus()
    return warn_undetected_gpus(names) if names else Finding("ok", "no GPU; trials run on the CPU")


def warn_undetected_gpus(names: list[str]) -> Finding:
    """Return a warning about GPUs that the NVIDIA driver detects but torch does not, with the probable cause."""
    import torch

    kinds = ", ".join(sorted(set(names)))
    found = f"nvidia-smi detects {pluralize(len(names), 'GPU')} ({kinds}), torch {torch.__version__} detects none"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return Finding("warning", f"{found}; CUDA_VISIBLE_DEVICES is {hidden!r}", "unset the variable to use the GPUs")
    if torch.version.cuda is None:
        again = "install a torch with CUDA: remove .venv, set HPSEARCH_TORCH_BACKEND=auto, run ./hpsearch"
        return Finding("warning", found, again)
    return Finding("warning", found, f"install a driver that supports CUDA {torch.version.cuda}")


def _list_driver_gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists; an empty list if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    ask = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


LOW_FREE_BYTES = 1_000_000_000  # a few runs with their checkpoints and plots
MIN_FREE_BYTES = 100_000_000  # less than one run

_ELSEWHERE = f"set {HOME_VARIABLE} to a folder on another disk"


def check_home(home: Path) -> Finding:
    """Check that the home folder, with runs, logs and the outbox, is writable."""
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"hpsearch")
    except OSError as error:
        return Finding(
            "failed", f"{home} is not writable: {error.strerror or error}", f"make the folder writable, or {_ELSEWHERE}"
        )
    return Finding("ok", f"{home} is writable")


def check_free_space(home: Path) -> Finding:
    """Check the free space on the disk that contains the home folder."""
    from rich.filesize import decimal

    free = shutil.disk_usage(home).free
    text = f"{decimal(free)} free on the disk of {home}"
    limits: tuple[tuple[int, Status], ...] = ((MIN_FREE_BYTES, "failed"), (LOW_FREE_BYTES, "warning"))
    for limit, status in limits:
        if free < limit:
            remedy = f"free disk space, for example with '{format_command('gc')}', or {_ELSEWHERE}"
            return Finding(status, f"{text}, below the limit of {decimal(limit)}", remedy)
    return Finding("ok", text)


CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"  # only in a checkout, not in a wheel


def read_direct_dependencies() -> dict[str, str | None]:
    """Return the installed version of each direct dependency, by name; None for a dependency that is not installed."""
    found: dict[str, str | None] = {}
    for line in requires("hpsearch") or []:
        requirement, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        name = re.split(r"[^\w.-]", requirement.strip())[0]
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if not marker:  # dependencies with a marker may be for another platform
                found[name] = None
    return found


def check_versions() -> Finding:
    """Compare the installed versions of the direct dependencies with constraints.txt."""
    installed = read_direct_dependencies()
    if missing := [name for name, there in installed.items() if there is None]:
        return Finding("failed", f"dependencies are missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if not CONSTRAINTS.exists():
        return Finding(
            "ok",
            f"{len(installed)} direct dependencies installed; their versions are not compared with constraints.txt",
        )
    text = "".join(path.read_text() for path in sorted(CONSTRAINTS.parent.glob("constraints*.txt")))  # torch is apart
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    pinned = {_normalize_name(name): pin for name, pin in pins}
    drifted = [
        f"{name} {there} (pinned {pin})"
        for name, there in installed.items()
        # Without the build label: the pin 2.13.0 covers 2.13.0+cpu and 2.13.0+cu130.
        if there is not None and (pin := pinned.get(_normalize_name(name))) not in {None, there.partition("+")[0]}
    ]
    if not drifted:
        return Finding("ok", f"all {len(installed)} direct dependencies have the versions in constraints.txt")
    again = "remove .venv and run ./hpsearch"
    return Finding("warning", f"versions differ from constraints.txt: {', '.join(drifted)}", again)


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def check_tracking(uri: str) -> Finding:
    """Check that a tracking server answers, and compare its version with that of the installed MLflow client."""
    began = time.perf_counter()
    check_server(uri)
    took = 1000 * (time.perf_counter() - began)
    there, here = read_server_version(uri), version("mlflow-skinny")
    text = f"MLflow {there or 'of unknown version'} at {uri} answers in {took:.0f} ms"
    if there is None or there.split(".")[0] == here.split(".")[0]:
        return Finding("ok", text)
    return Finding("warning", f"{text}; this machine has MLflow {here}", "install the server's major version")


def check_artifacts(uri: str) -> Finding:
    """Check that artifacts can be written through a tracking server."""
    tracking = Tracking(uri)
    try:
        place = write_probe(tracking)
    except StorageError:
        raise
    except Exception as error:  # artifact stores have error classes of their own
        remedy = "read the server's log, and check that it may write to its --artifacts-destination"
        return Finding("failed", f"test file not written to the artifact store: {describe_error(error)}", remedy)
    try:
        remove_probe(tracking, place)
    except Exception as error:  # artifact stores have error classes of their own
        return Finding("warning", f"test file not removed: {describe_error(error)}", f"remove {place} manually")
    return Finding("ok", "a test file was written to the artifact store and removed")


def _check_study(study: StoredStudy) -> Finding:
    name = study.spec.name
    at = read_progress(study.engine, study.study_id, study.spec.direction)
    text = f"study {name}: {at.summary} ended{at.early_stop_note}, {len(at.running)} running"
    if why := study.stopped:
        return Finding("warning", f"{text}; it was stopped {why}", f"run '{format_command('start', name)}' to continue")
    if study.is_timed_out:
        return Finding("ok", f"{text}; its timeout has expired")
    return Finding("ok", f"{text}; its budget is spent" if at.finished_fraction >= 1 else text)


def _check_workers(study: StoredStudy) -> Finding:
    wanted = study.attrs.get(WANTED_WORKERS)
    active = sum(worker.state in {"running", "idle"} for worker in read_workers(study.engine, study.study_id))
    losses = ", ".join(f"{count} {kind}" for kind, count in read_loss_counts(study.engine, study.study_id).items())
    text = f"{active}{f' of {wanted} wanted' if wanted else ''} workers are active{losses and f'; attempts: {losses}'}"
    at = read_progress(study.engine, study.study_id, study.spec.direction)
    if isinstance(wanted, int) and active < wanted and not at.is_done:
        size = format_command("fleet", "size", study.spec.name)
        return Finding("warning", text, f"start workers, or store the number that you want with '{size} N'")
    return Finding("ok", text)


def _check_release(study: StoredStudy) -> Finding:
    check_release(study)
    made = study.attrs.get(VERSION)
    return Finding("ok", f"study created by hpsearch {made or 'of an early release'}; installed: {version('hpsearch')}")


def _check_objective(study: StoredStudy) -> Finding:
    """Check the objective without importing it, because every worker's database role can write its reference."""
    reference = study.spec.objective
    if (source := locate_source(reference)) is None:
        return Finding("failed", f"objective {reference} is not on this machine", "copy its file, or install it")
    return Finding("ok", f"objective {reference} is in {source}; --import-objective imports it too")


def _import_objective(study: StoredStudy) -> Finding:
    study.objective(allow_changed=True)
    return Finding("ok", f"objective {study.spec.objective} is importable; its metric is {study.spec.metric!r}")


def _check_source(study: StoredStudy) -> Finding:
    name, reference, attrs = study.spec.name, study.spec.objective, study.attrs
    check_source(name, reference, attrs, allow_changed=True)
    if (reason := find_distrust(reference, attrs)) is not None:
        remedy = f"if you trust it, run '{format_command('trust', name)}'"
        return Finding("warning", f"the objective needs your confirmation, because {reason}", remedy)
    return Finding("ok", "the objective's code is unchanged since the study was created, or you have confirmed it")


# The study is read only if the check `rights` has passed.
STUDY_CHECKS: Checks = (
    ("study", _check_study, "rights"),
    ("workers", _check_workers, "study"),
    ("release", _check_release, "study"),
    ("objective", _check_objective, "study"),
    ("source", _check_source, "objective"),
)
IMPORT_CHECKS: Checks = (("import", _import_objective, "objective"),)
