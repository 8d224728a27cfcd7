"""`objectives` needs only torch, numpy, scikit-learn, pydantic and their dependencies."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALONE = '''
import importlib, importlib.machinery, pkgutil, sys
from pathlib import Path

ALLOWED = set(sys.argv[2].split(","))


class Few(importlib.machinery.PathFinder):
    """Finds what is allowed, as where nothing else is installed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ALLOWED or top.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if known else None


others = [finder for finder in sys.meta_path if finder.__module__ == "_frozen_importlib"]  # built-in and frozen
sys.meta_path[:] = [*others, Few]
import hpsearch.objectives

for module in pkgutil.walk_packages(hpsearch.objectives.__path__, "hpsearch.objectives."):
    if not module.name.startswith("hpsearch.objectives.adapters."):  # each is for those who have its library
        importlib.import_module(module.name)

import torch
from hpsearch.objectives.builtin.digits import Digits
from hpsearch import TrainConfig, Trainer


class Accuracy:
    def reset(self):
        self.right, self.count = torch.zeros(()), 0

    def update(self, output, target):
        self.right, self.count = self.right + (output.argmax(1) == target).sum(), self.count + len(target)

    def compute(self):
        return {"accuracy": self.right / self.count}

    def to(self, device):
        return self


class Alone(Digits):
    def metrics(self, train):
        return Accuracy()


config = TrainConfig(lr=1e-2, ema_decay=0.9, model={"kind": "mlp", "layers": 1, "width": 32, "dropout": 0.1})
for epochs in (2, 2):  # the second run resumes the first one: there is nothing left to train
    result = Trainer(Alone(), config, epochs=epochs, seed=0, run_dir=Path(sys.argv[1])).fit()
print(result.best_value, sorted(path.name for path in Path(sys.argv[1]).iterdir()))
'''


def _modules_of(*distributions: str) -> set[str]:
    """Return the top-level modules of distributions and their requirements."""
    providers: dict[str, set[str]] = {}
    for module, names in importlib.metadata.packages_distributions().items():
        for name in names:
            providers.setdefault(_normal(name), set()).add(module)
    found, waiting = set[str](), [_normal(name) for name in distributions]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or an extra
        waiting += [_normal(re.split(r"[^\w.-]", line)[0]) for line in required if "extra ==" not in line]
    return {module for name in found for module in providers.get(name, set())}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.soak  # uses a separate environment
@pytest.mark.slow
def test_objectives_need_only_torch_numpy_scikit_learn_and_pydantic(tmp_path: Path) -> None:
    allowed = _modules_of("torch", "numpy", "scikit-learn", "pydantic") | {"hpsearch"}
    assert {"torch", "sklearn", "scipy", "sympy"} <= allowed
    assert not {"torchmetrics", "pytorch_optimizer", "matplotlib", "yaml", "optuna", "mlflow"} & allowed
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "run"), ",".join(sorted(allowed))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "report.md" in done.stdout
