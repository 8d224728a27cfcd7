"""The objective of bench_search.py names functions of hpsearch as text, which no type checker compares."""

import subprocess
import sys
from pathlib import Path


def test_the_timed_functions_exist():
    code = "import timed_digits; timed_digits.watch()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
