"""The checks of `hpsearch doctor`, each with a remedy for its failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from hpsearch.objectives.objective import BaseObjective
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
class Found:
    """What a look came to: the status, what was found, and what to do where that does not say it already."""

    status: Status
    found: str
    remedy: str = ""


def ok(found: str) -> Found:
    """Nothing is to be done."""
    return Found("ok", found)


def warning(found: str, remedy: str) -> Found:
    """A worker can work, with a drawback."""
    return Found("warning", found, remedy)


def failed(found: str, remedy: str) -> Found:
    """A worker cannot work here, or loses something."""
    return Found("failed", found, remedy)


@dataclass(frozen=True)
class Check:
    """One thing that is looked at.

    Attributes:
        name: in one word.
        look: finds out; what it raises is a failure.
        needs: the names of earlier checks without which there is nothing to look at.
    """

    name: str
    look: Callable[[], Found]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What a check came to, by its name."""

    check: str
    status: Status
    found: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        """Return it as JSON has it."""
        return asdict(self)


class Checker:
    """Does checks one after the other, and remembers what cannot be looked at for want of another.

    Args:
        secrets: URLs whose passwords no finding may show.
    """

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._lacking: dict[str, str] = {}  # a check that did not come to anything: the one that was to blame

    def run(self, checks: Iterable[Check]) -> Iterator[Finding]:
        """Yield what each check came to as soon as it is known."""
        for check in checks:
            blamed = next((self._lacking[need] for need in check.needs if need in self._lacking), None)
            found = self._look(check) if blamed is None else Found("skipped", f"needs {blamed}")
            if found.status in {"failed", "skipped"}:
                self._lacking[check.name] = blamed or check.name
            yield Finding(check.name, found.status, found.found, found.remedy)

    def lacks(self, name: str) -> bool:
        """Whether a check has failed or was skipped."""
        return name in self._lacking

    def _look(self, check: Check) -> Found:
        try:
            return check.look()
        except USER_ERRORS as error:  # says itself what to do
            return failed(str(error), "")
        except Exception as error:  # whatever it is, the other checks go on
            said = f"{type(error).__name__}: {one_line(error)}"
            for url in self._secrets:
                said = without_secret(said, url)
            return failed(said, "")


def checkpoint_check(url: str, setting: str, *, needs: tuple[str, ...]) -> Check:
    """Return the check of a URL, which was given by `setting`."""
    return Check("checkpoints", partial(_check_store, url, setting), needs)


def _check_store(url: str, setting: str) -> Found:
    checkpoints = Checkpoints(url, setting=setting)
    checkpoints.check()
    return ok(f"written and removed in {checkpoints.url}")


_PATIENCE = 20  # seconds for nvidia-smi, which can hang with its driver


def device_checks() -> list[Check]:
    """Return the checks of the processors and of the GPUs."""
    return [Check("cpu", _processors), Check("gpu", _gpus)]


def _processors() -> Found:
    allowed, there = cores(), os.cpu_count() or 1
    return ok(counted(allowed, "core") + (f" allowed of {there}" if allowed < there else ""))


def _gpus() -> Found:
    import torch
    from rich.filesize import decimal

    if torch.cuda.is_available():
        devices = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append(f"cuda:{index} {name}, {decimal(free)} of {decimal(total)} free")
        return ok("; ".join(devices))
    names = _seen_by_the_driver()
    return unseen(names) if names else ok("none: trials run on the cores")


def unseen(names: list[str]) -> Found:
    """Return the warning of GPUs that the driver has and torch has not, with what is probably the reason."""
    import torch

    kinds = ", ".join(sorted(set(names)))
    found = f"nvidia-smi sees {counted(len(names), 'GPU')} ({kinds}), torch {torch.__version__} none"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return warning(f"{found}; CUDA_VISIBLE_DEVICES is {hidden!r}", "unset it to use them")
    if torch.version.cuda is None:
        return warning(
            found, "install a torch with CUDA: remove .venv, set HPSEARCH_TORCH_BACKEND=auto, run ./hpsearch"
        )
    return warning(found, f"install a driver that CUDA {torch.version.cuda} can use")


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


def disk_checks(home: Path) -> list[Check]:
    """Return the checks of the folder where runs, logs and the outbox lie."""
    return [Check("home", partial(_check_home, home)), Check("disk", partial(_check_free_space, home))]


def _check_home(home: Path) -> Found:
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"hpsearch")
    except OSError as error:
        return failed(f"{home} cannot be written: {error.strerror or error}", f"mend that, or {_ELSEWHERE}")
    return ok(f"{home} can be written")


def _check_free_space(home: Path) -> Found:
    from rich.filesize import decimal

    free = shutil.disk_usage(home).free
    said, remedy = (
        f"{decimal(free)} free where {home} is",
        f"make room, such as with '{command('gc')}', or {_ELSEWHERE}",
    )
    if free < TOO_LITTLE:
        return failed(f"{said}, under {decimal(TOO_LITTLE)}", remedy)
    if free < LITTLE:
        return warning(f"{said}, under {decimal(LITTLE)}", remedy)
    return ok(said)


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


def tracking_checks(uri: str | None, setting: str, *, needs: tuple[str, ...], otherwise: Found) -> list[Check]:
    """Return the checks of a tracking server.

    Args:
        uri: its address.
        setting: where that was given, for messages.
        needs: what the first check needs.
        otherwise: what to say where there is no address.
    """
    return [
        Check("mlflow", lambda: otherwise if uri is None else _answers(uri, setting), needs),
        Check("artifacts", partial(_artifacts, uri or ""), ("mlflow",)),
    ]


def _answers(uri: str, setting: str) -> Found:
    began = time.perf_counter()
    check_server(uri, setting=setting)
    took = 1000 * (time.perf_counter() - began)
    there, here = server_version(uri), version("mlflow")
    said = f"MLflow {there or 'of an unknown version'} at {uri}: answers in {took:.0f} ms"
    if there is None or there.split(".")[0] == here.split(".")[0]:
        return ok(said)
    return warning(f"{said}; MLflow is {here} here", "install the same series on both sides")


def _artifacts(uri: str) -> Found:
    tracking = Tracking(uri)
    try:
        place = write_probe(tracking)
    except StorageError:
        raise
    except Exception as error:  # a store of artifacts has errors of its own
        remedy = "look into the server's log, and whether it may write to its --artifacts-destination"
        return failed(f"cannot be written: {describe_error(error)}", remedy)
    try:
        remove_probe(tracking, place)
    except Exception as error:  # as above
        return warning(f"can be written, not removed: {describe_error(error)}", f"remove {place} by hand")
    return ok("written and removed")


def study_checks(study: StoredStudy | None) -> list[Check]:
    """Return the checks of a study; None where the database does not give it, so that they are skipped."""
    looks = _Looks(study)
    return [
        Check("study", looks.stands, ("rights",)),
        Check("release", looks.release, ("study",)),
        Check("objective", looks.objective, ("study",)),
        Check("source", looks.source, ("objective",)),
    ]


class _Looks:
    """The looks at one study; the objective is loaded once."""

    def __init__(self, study: StoredStudy | None) -> None:
        self._study = study
        self._loaded: BaseObjective | None = None

    @property
    def study(self) -> StoredStudy:
        assert self._study is not None
        return self._study

    def stands(self) -> Found:
        name = self.study.spec.name
        at = read_progress(self.study.engine, self.study.study_id, self.study.spec.direction)
        said = f"{name}: {at.done} have ended{at.early}, {len(at.running)} running"
        if why := self.study.attrs.get(STOPPED):
            return warning(f"{said}; it was stopped {why}", f"run '{command('start', name)}' to let it go on")
        if self.study.out_of_time:
            return ok(f"{said}; its time is up")
        return ok(f"{said}; nothing is left to do" if at.share >= 1 else said)

    def release(self) -> Found:
        check_release(self.study)
        made = self.study.attrs.get(RELEASE)
        return ok(f"made by hpsearch {made or 'of an early release'}, this is {version('hpsearch')}")

    def objective(self) -> Found:
        spec = self.study.spec
        with redirect_stdout(sys.stderr):  # what its code prints is none of our lines
            self._loaded = self.study.objective()
        return ok(f"{spec.objective} can be loaded, judged by {spec.metric}")

    def source(self) -> Found:
        assert self._loaded is not None
        if changed := self.study.source_warning(self._loaded):
            return warning(changed, "")
        return ok("the objective's code is what the study was created with")
