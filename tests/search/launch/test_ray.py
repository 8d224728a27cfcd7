"""The program for Ray: it can be read, and quotes what it is given.

What a real Ray makes of it is in test_ray_engine.py.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.search.launch.support import HOME, URL, text


def constants(program: str) -> dict[str, Any]:
    """Return the constants that the program assigns."""
    found = {}
    for node in ast.parse(program).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            found[node.targets[0].id] = node.value.value
    return found


def actor(program: str) -> dict[str, Any]:
    """Return the resources that each worker requests from Ray."""
    (made,) = [node for node in ast.parse(program).body if isinstance(node, ast.ClassDef)]
    (call,) = made.decorator_list
    assert isinstance(call, ast.Call)
    return {one.arg or "": ast.literal_eval(one.value) for one in call.keywords}


@pytest.mark.parametrize(("gpus", "found"), [(0.0, 0), (0.25, 0.25), (1.0, 1), (2.0, 2)])
def test_the_arguments_of_each_worker(gpus: float, found: float) -> None:
    program = text(engine="ray", gpus=gpus, cpus=3, memory="6G", workers=7, grace=90)
    assert actor(program) == {
        "num_cpus": 3, "num_gpus": found, "memory": 6 * 2**30, "max_restarts": -1, "max_concurrency": 2,
    }  # fmt: skip
    assert "range(7)" in program
    assert "grace=85" in program
    assert "timeout=90" in program


def test_no_module_of_the_working_folder_is_imported(tmp_path: Path) -> None:
    """`python -` searches it before its own modules, and another user may own it."""
    (tmp_path / "ray.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    command: dict[str, Any] = {"cwd": tmp_path, "input": text(engine="ray"), "capture_output": True, "text": True}
    unsafe = subprocess.run([sys.executable, "-"], check=False, **command)
    assert (unsafe.returncode, unsafe.stdout) == (1, "")
    assert unsafe.stderr.startswith("hpsearch: pipe the program into python -P -")
    command["env"] = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}  # no cluster, if Ray is installed
    subprocess.run([sys.executable, "-P", "-"], check=False, **command)
    assert not (tmp_path / "imported").exists()


def test_ray_adds_no_folder_of_the_user_to_the_module_path_of_its_workers() -> None:
    lines = text(engine="ray").splitlines()
    (change,) = [number for number, line in enumerate(lines) if line.startswith('os.chdir("/")')]
    assert lines[change + 1].startswith("ray.init(")


def test_values_are_passed_unchanged() -> None:
    found = constants(text(engine="ray", storage_url=URL, home=HOME, folder=HOME))
    assert {name: found[name] for name in ("STUDY", "STORAGE_URL", "HOME", "FOLDER")} == {
        "STUDY": "wine", "STORAGE_URL": URL, "HOME": HOME, "FOLDER": HOME,
    }  # fmt: skip
    assert constants(text(engine="ray", storage_url=None))["STORAGE_URL"] is None
