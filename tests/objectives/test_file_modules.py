from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

from hpsearch.objectives.loading import load_objective

_CODE = """
from hpsearch import LoopObjective

def double(number):
    return 2 * number

class Mine(LoopObjective):
    name, metric, direction, epochs = "mine", "score", "maximize", 1
    def suggest(self, trial):
        return {}
    def run(self, trial):
        trial.report({"score": 0.5})
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_new_processes_can_call_functions_of_an_objective_file(method: str, tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text(_CODE)
    module = sys.modules[type(load_objective(str(file))).__module__]
    file.write_text("changed meanwhile")
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map_async(module.double, [1, 2]).get(120) == [2, 4]
