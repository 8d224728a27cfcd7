"""Run users' programs in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpsearch.storage.embedded.stack import StackInfo
from tests.faults.harness import Command, Zygote


def run_program(source: str, *, cwd: Path) -> str:
    """Run a program in a new interpreter and return its output; the test fails if the program does."""
    (cwd / "program.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(source: str, *, cwd: Path, stack: StackInfo, zygote: Zygote) -> str:
    """Run a program with the tests' services in a fork with all libraries loaded, and return its output."""
    (cwd / "program.py").write_text(source)
    log = cwd / "said"
    pid = zygote.start(["program.py"], {"HPSEARCH_HOME": str(stack.home)}, log, puppet=False, cwd=cwd)
    done = Command(zygote, pid, log)
    said, _ = done.communicate()
    assert done.returncode == 0, said
    return said
