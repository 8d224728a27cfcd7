"""The number of validations of a study's settings before its first worker starts."""

from __future__ import annotations

from pathlib import Path

from hpsearch.storage.embedded.stack import StackInfo
from tests.faults.harness import Zygote
from tests.search.api.support import run_forked

PROGRAM = """
import os
from hpsearch.search.cli import run_command
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.spec.spec import StudySpec

validate, count = StudySpec.model_validate, 0

def counted(*args, **kwargs):
    global count
    count += 1
    return validate(*args, **kwargs)

def start(fleet):
    print("validations:", count, flush=True)
    os._exit(0)

StudySpec.model_validate, Fleet.start = counted, start
run_command({arguments})
"""


def validations(*arguments: str, cwd: Path, stack: StackInfo, zygote: Zygote) -> int:
    source = PROGRAM.replace("{arguments}", repr(["run", "digits", "--name", "validations", *arguments]))
    said = run_forked(source, cwd=cwd, stack=stack, zygote=zygote)
    return int(said.rpartition("validations: ")[2])


def test_a_run_validates_its_spec_twice_before_any_worker(tmp_path: Path, stack: StackInfo, zygote: Zygote) -> None:
    """Once before libraries are loaded, once with the objective's defaults, and once more for a joined study."""
    given = ("--pruner", "hyperband", "--trials", "2", "--epochs", "3", "--workers", "1")
    assert validations(*given, cwd=tmp_path, stack=stack, zygote=zygote) <= 2
    assert validations(*given, cwd=tmp_path, stack=stack, zygote=zygote) <= 3, "joined"
