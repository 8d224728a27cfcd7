"""The wheel, installed without the extra `server`, and a project that has packages with names of hpsearch's."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from docs.packages import FOLDERS, ROOT
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.web.token import read_token

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("installed")]

PROJECT = {
    "objectives/__init__.py": """
        def labels(x):
            return (x.sum(1) > 0).long()
        """,
    "search/__init__.py": """
        def width(trial):
            return trial.suggest_int("width", 8, 16)
        """,
    "storage/__init__.py": "",
    "storage/files.py": """
        from pathlib import Path

        from torch.utils.data import get_worker_info

        def load(row):
            if get_worker_info() is not None:
                Path(__file__).with_name("loaded").touch()
            return row * 2
        """,
    "mine.py": """
        import multiprocessing
        import os

        import torch
        from torch import nn

        import objectives
        import search
        from hpsearch import Objective, Splits, TrainConfig
        from storage.files import load

        if method := os.environ.get("START_METHOD"):
            multiprocessing.set_start_method(method, force=True)

        class Mine(Objective):
            metric, direction, epochs = "accuracy", "maximize", 1

            def suggest(self, trial):
                return TrainConfig(
                    lr=trial.suggest_float("lr", 1e-2, 1e-1, log=True),
                    model={"width": search.width(trial)},
                    num_workers=1,
                )

            def data(self, seed):
                x = torch.randn(200, 4, generator=torch.Generator().manual_seed(seed))
                return Splits.make(x, objectives.labels(x), seed=seed, load=load)

            def model(self, config, train):
                width = config.model["width"]
                return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
        """,
}


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of its files, and return its path in `folder`."""
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    source = folder / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE", *tracked()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([sys.executable, "-c", build, folder], cwd=source, capture_output=True, text=True, check=True)
    return folder / done.stdout.split()[-1]


def tracked() -> set[str]:
    """Return the files of the package in a clone, including those behind the links of src/hpsearch."""
    root = ROOT / "src" / "hpsearch"
    paths = [path for folder in (root, *(root / name for name in FOLDERS)) for path in folder.rglob("*")]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and "__pycache__" not in path.parts}


class Installed:
    """A virtual environment with hpsearch's wheel and its requirements, and a user's project."""

    def __init__(self, folder: Path, stack: StackInfo) -> None:
        self.project = folder / "project"
        for name, text in PROJECT.items():
            path = self.project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        for name in required("hpsearch"):
            link(name, site)
        self.wheel = build_wheel(folder)
        uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--no-deps", "--offline"]
        subprocess.run([*uv, "--python", self.python, self.wheel], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HPSEARCH_"))}
        self.alone = {**kept, "HPSEARCH_HOME": str(folder / "home")}
        self.environment = {
            **self.alone,
            "HPSEARCH_STORAGE_URL": stack.storage_url,
            "HPSEARCH_TRACKING_URI": stack.tracking_uri,
            "MLFLOW_TRACKING_TOKEN": read_token(stack.home) or ""
        }  # fmt: skip

    def __call__(self, *arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> str:
        command = [self.python.with_name("hpsearch"), *arguments]
        done = subprocess.run(
            command, cwd=self.project, env=environment or self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(stack: StackInfo, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), stack)


def required(root: str) -> set[str]:
    """Return the distributions that `pip install` of a distribution without extras installs."""
    found, left = set[str](), [(root, "")]
    while left:
        name, extra = left.pop()
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                new = normal(requirement.name) not in found
                found.add(normal(requirement.name))
                left += [(requirement.name, "")] if new else []
                left += [(requirement.name, asked) for asked in requirement.extras]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def recorded(distribution: importlib.metadata.Distribution) -> set[Path]:
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    paths = {Path(row[0]) for row in rows}
    return {path for path in paths if ".." not in path.parts and "__pycache__" not in path.parts}


OWNERS = Counter(top for each in importlib.metadata.distributions() for top in {p.parts[0] for p in recorded(each)})


def link(name: str, site: Path) -> None:
    """Install a distribution as symbolic links to this environment; in shared folders, link each file."""
    distribution = importlib.metadata.distribution(name)
    for path in recorded(distribution):
        if OWNERS[path.parts[0]] == 1:
            path = Path(path.parts[0])  # noqa: PLW2901 the loop needs the folder only
        here, there = Path(str(distribution.locate_file(path))), site / path
        there.parent.mkdir(parents=True, exist_ok=True)
        compiled = (here.with_name("__pycache__"), there.with_name("__pycache__"))
        for source, target in [(here, there), *([compiled] if len(path.parts) > 1 else [])]:
            if source.exists() and not target.exists():
                target.symlink_to(source)


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(installed: Installed) -> None:
    wheel = zipfile.ZipFile(installed.wheel)
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == {path.removeprefix("src/") for path in tracked()}
    points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "hpsearch = hpsearch.__main__:main" in wheel.read(points).decode()


def test_a_project_may_have_packages_of_the_same_names(installed: Installed) -> None:
    name = "own-packages"
    marker = installed.project / "storage" / "loaded"
    installed("run", "mine.py", "--name", name, "--trials", "3", "--workers", "2", "--pruner", "none")
    assert marker.exists(), "a forked worker's DataLoader imported the user's storage"
    marker.unlink()
    installed("extend", name, "--trials", "+1")
    spawned = {**installed.environment, "START_METHOD": "spawn"}
    installed("worker", "--study", name, environment=spawned)
    assert marker.exists(), "a spawned DataLoader worker imported the user's storage"
    installed("finalists", name, "--top", "1", "--seeds", "1", "--workers", "1")
    assert "@champion" in installed("promote", name)
    assert "score reproduced in a process without the code of hpsearch and the objective" in installed(
        "serve-check", f"{name}@champion"
    )


@pytest.mark.parametrize("name", ["search", "objectives", "storage"])
def test_top_level_package_names_are_not_installed(installed: Installed, name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed.python, "-c", f"import {name}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f"No module named '{name}'" in done.stderr


@pytest.mark.parametrize("command", ["run mine.py", "up", "serve mlflow", "serve dashboard"])
def test_services_without_the_server_extra_are_rejected_in_one_line(installed: Installed, command: str) -> None:
    said = installed(*command.split(), code=2, environment=installed.alone)
    line = said.splitlines()[-1]
    assert line.startswith("hpsearch: the package mlflow of the embedded services is not installed")
    assert "pip install 'hpsearch[server]'" in line
    assert "Traceback" not in said


def test_version_prints_the_version(installed: Installed) -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert installed("--version") == f"hpsearch {version[1]}\n"
