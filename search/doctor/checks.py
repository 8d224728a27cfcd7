"""The checks of `hpsearch doctor`, each with a remedy for its failure."""

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

from hpsearch.search.console import command, counted
from hpsearch.search.errors import USER_ERRORS
from hpsearch.search.fleet.fork import cores
from hpsearch.search.study.study import StoredStudy, check_release
from hpsearch.storage.attributes import RELEASE, STOPPED
from hpsearch.storage.checkpoints.store import Checkpoints
from hpsearch.storage.errors import StorageError, one_line
from hpsearch.storage.home import VARIABLE
from hpsearch.storage.mlflow.artifacts import remove_probe, write_probe
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server, describe_error, server_version
from hpsearch.storage.trials.history import read_progress
from hpsearch.storage.urls import without_secret

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: its name.
        status: ``warning`` if a worker can run with a drawback, ``failed`` if it cannot run or loses data.
        found: what was found.
        remedy: what to do, where `found` does not include it.
    """

    check: str = field(default="", kw_only=True)
    status: Status
    found: str
    remedy: str = ""


# Name, check, and the check that it needs.
Checks = tuple[tuple[str, Callable[[Any], Finding], str], ...]


class Checker:
    """Runs checks, and skips those that depend on a failed one.

    Args:
        secrets: URLs whose passwords no finding may contain.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._blamed: dict[str, str] = {}  # each failed or skipped check, with the check that failed first

    def run(self, name: str, look: Callable[[], Finding], *needs: str) -> Finding:
        """Return the finding of a check.

        Args:
            name: of the check.
            look: the check itself; an exception is a failure.
            needs: names of earlier checks; if one of them failed or was skipped, this check is skipped.
        """
        blamed = next((self._blamed[need] for need in needs if need in self._blamed), None)
        found = self._try(look) if blamed is None else Finding("skipped", f"needs {blamed}")
        if found.status in {"failed", "skipped"}:
            self._blamed[name] = blamed or name
        return replace(found, check=name)

    def passed(self, name: str) -> bool:
        """Whether a check has neither failed nor been skipped."""
        return name not in self._blamed

    def _try(self, look: Callable[[], Finding]) -> Finding:
        try:
            with redirect_stdout(sys.stderr):  # an objective may print
                return look()
        except USER_ERRORS as error:  # the message has the remedy
            return Finding("failed", str(error))
        except Exception as error:  # the other checks still run
            said = f"{type(error).__name__}: {one_line(error)}"
            for url in self._secrets:
                said = without_secret(said, url)
            return Finding("failed", said)


def check_store(url: str) -> Finding:
    """Check that checkpoints can be written to a URL."""
    checkpoints = Checkpoints(url)
    checkpoints.check(create=False)
    return Finding("ok", f"{checkpoints.url} can be written")


_PATIENCE = 20  # seconds for nvidia-smi, which can hang with its driver


def check_cores() -> Finding:
    """Count the cores that this process may use."""
    allowed, there = cores(), os.cpu_count() or 1
    return Finding("ok", counted(allowed, "core") + (f" allowed of {there}" if allowed < there else ""))


def check_gpus() -> Finding:
    """List the GPUs that torch sees; warn of others."""
    import torch
    from rich.filesize import decimal

    if torch.cuda.is_available():
        devices = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append(f"cuda:{index} {name}, {decimal(free)} of {decimal(total)} free")
        return Finding("ok", "; ".join(devices))
    names = _seen_by_the_driver()
    return unseen(names) if names else Finding("ok", "none: trials run on the cores")


def unseen(names: list[str]) -> Finding:
    """Return the warning of GPUs that the driver has and torch has not, with what is probably the reason."""
    import torch

    kinds = ", ".join(sorted(set(names)))
    found = f"nvidia-smi sees {counted(len(names), 'GPU')} ({kinds}), torch {torch.__version__} none"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return Finding("warning", f"{found}; CUDA_VISIBLE_DEVICES is {hidden!r}", "unset it to use them")
    if torch.version.cuda is None:
        again = "install a torch with CUDA: remove .venv, set HPSEARCH_TORCH_BACKEND=auto, run ./hpsearch"
        return Finding("warning", found, again)
    return Finding("warning", found, f"install a driver that CUDA {torch.version.cuda} can use")


def _seen_by_the_driver() -> list[str]:
    """The names of the GPUs that nvidia-smi lists; none where it is not there or does not work."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    ask = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


LITTLE = 1_000_000_000  # bytes: a few runs with their checkpoints and plots
TOO_LITTLE = 100_000_000  # bytes: less than one

_ELSEWHERE = f"set {VARIABLE} to a folder on another disk"


def check_home(home: Path) -> Finding:
    """Check that the folder of runs, logs and the outbox can be written."""
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"hpsearch")
    except OSError as error:
        return Finding("failed", f"{home} cannot be written: {error.strerror or error}", f"mend that, or {_ELSEWHERE}")
    return Finding("ok", f"{home} can be written")


def check_free_space(home: Path) -> Finding:
    """Check the free space of the disk of the home folder."""
    from rich.filesize import decimal

    free = shutil.disk_usage(home).free
    said = f"{decimal(free)} free where {home} is"
    limits: tuple[tuple[int, Status], ...] = ((TOO_LITTLE, "failed"), (LITTLE, "warning"))
    for limit, status in limits:
        if free < limit:
            remedy = f"make room, such as with '{command('gc')}', or {_ELSEWHERE}"
            return Finding(status, f"{said}, under {decimal(limit)}", remedy)
    return Finding("ok", said)


CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"  # a checkout has it, a wheel has not


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


def check_versions() -> Finding:
    """Compare the installed direct dependencies with constraints.txt."""
    installed = direct_dependencies()
    if missing := [name for name, there in installed.items() if there is None]:
        return Finding("failed", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if not CONSTRAINTS.exists():
        return Finding("ok", f"{len(installed)} direct dependencies; there is no constraints.txt to compare them with")
    lines = (line.partition("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    pinned = {_normal(name): pin.strip() for name, equal, pin in lines if equal}
    drifted = [
        f"{name} {there} (pinned {pin})"
        for name, there in installed.items()
        # Without the label of the build: the pin 2.13.0 is for 2.13.0+cpu and 2.13.0+cu130.
        if there is not None and (pin := pinned.get(_normal(name))) not in {None, there.partition("+")[0]}
    ]
    if not drifted:
        return Finding("ok", f"{len(installed)} direct dependencies, as constraints.txt pins them")
    again = "remove .venv and run ./hpsearch, or: pip install --constraint constraints.txt --editable ."
    return Finding("warning", f"not as constraints.txt pins them: {', '.join(drifted)}", again)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def check_tracking(uri: str) -> Finding:
    """Check that a tracking server answers, and compare its version with the one here."""
    began = time.perf_counter()
    check_server(uri)
    took = 1000 * (time.perf_counter() - began)
    there, here = server_version(uri), version("mlflow-skinny")
    said = f"MLflow {there or 'of an unknown version'} at {uri}: answers in {took:.0f} ms"
    if there is None or there.split(".")[0] == here.split(".")[0]:
        return Finding("ok", said)
    return Finding("warning", f"{said}; MLflow is {here} here", "install the same series on both sides")


def check_artifacts(uri: str) -> Finding:
    """Check that artifacts can be written through a tracking server."""
    tracking = Tracking(uri)
    try:
        place = write_probe(tracking)
    except StorageError:
        raise
    except Exception as error:  # a store of artifacts has errors of its own
        remedy = "look into the server's log, and whether it may write to its --artifacts-destination"
        return Finding("failed", f"cannot be written: {describe_error(error)}", remedy)
    try:
        remove_probe(tracking, place)
    except Exception as error:  # as above
        return Finding("warning", f"can be written, not removed: {describe_error(error)}", f"remove {place} by hand")
    return Finding("ok", "written and removed")


def _check_study(study: StoredStudy) -> Finding:
    name = study.spec.name
    at = read_progress(study.engine, study.study_id, study.spec.direction)
    said = f"{name}: {at.done} have ended{at.early}, {len(at.running)} running"
    if why := study.attrs.get(STOPPED):
        return Finding("warning", f"{said}; it was stopped {why}", f"run '{command('start', name)}' to let it go on")
    if study.out_of_time:
        return Finding("ok", f"{said}; its time is up")
    return Finding("ok", f"{said}; nothing is left to do" if at.share >= 1 else said)


def _check_release(study: StoredStudy) -> Finding:
    check_release(study)
    made = study.attrs.get(RELEASE)
    return Finding("ok", f"made by hpsearch {made or 'of an early release'}, this is {version('hpsearch')}")


def _check_objective(study: StoredStudy) -> Finding:
    study.objective()
    return Finding("ok", f"{study.spec.objective} can be loaded, judged by {study.spec.metric}")


def _check_source(study: StoredStudy) -> Finding:
    if changed := study.source_warning(study.objective()):
        return Finding("warning", changed)
    return Finding("ok", "the objective's code is what the study was created with")


# Without the check `rights` there is no study, and all are skipped.
STUDY_CHECKS: Checks = (
    ("study", _check_study, "rights"),
    ("release", _check_release, "study"),
    ("objective", _check_objective, "study"),
    ("source", _check_source, "objective"),
)
