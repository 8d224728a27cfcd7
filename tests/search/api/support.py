"""Programs that a user writes, run as a user runs them: in a process of their own, on the stack of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from storage.embedded.stack import StackInfo

ROOT = Path(__file__).parents[3]


def run_program(source: str, *, cwd: Path, stack: StackInfo | None = None) -> str:
    """Run a program and return what it prints; the test fails when it does."""
    (cwd / "program.py").write_text(source)
    home = {} if stack is None else {"HPSEARCH_HOME": str(stack.home)}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=cwd,
        env={**os.environ, **home, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
