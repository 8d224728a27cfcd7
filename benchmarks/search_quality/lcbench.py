"""LCBench: learning curves of networks on 34 tabular tasks of OpenML (Zimmer et al. 2021), by YAHPO Gym's surrogate.

The surrogate (Pfisterer et al. 2022, Apache-2.0) is a network that predicts the validation accuracy after each of 52
epochs. Its files are in the folder `lcbench` of https://github.com/slds-lmu/yahpo_data; the benchmark needs three:

    for file in model.onnx encoding.json config_space.json; do
        curl -LO --create-dirs --output-dir DIR https://raw.githubusercontent.com/slds-lmu/yahpo_data/main/lcbench/$file
    done
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import IntDistribution

from benchmarks.search_quality.space import distributions
from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.search_space import TrialProtocol

EPOCHS = 52
DEFAULTS = {"good": 0, "average": 12, "misleading": 24}  # rank among `DEFAULTS_AMONG` random configurations
DEFAULTS_AMONG = 25
NOISE = 0.3  # standard deviation of the reported accuracy, in percentage points
FILES = ("model.onnx", "encoding.json", "config_space.json")
VALIDATION_ACCURACY = 1  # column of the model's output

RANDOM = 20_000  # configurations that `best_known` begins with
KEPT = 50  # the best of them, which it varies
ROUNDS = 12


class LCBenchObjective(BaseObjective):
    """The search space of LCBench; it has no training of its own."""

    name = "lcbench"
    metric = "accuracy"
    direction = "maximize"

    def suggest(self, trial: TrialProtocol) -> dict[str, Any]:
        """Return the configuration; the order is that of the model's inputs."""
        return {
            "batch_size": trial.suggest_int("batch_size", 16, 512, log=True),
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
            "momentum": trial.suggest_float("momentum", 0.1, 0.99),
            "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1),
            "num_layers": trial.suggest_int("num_layers", 1, 5),
            "max_units": trial.suggest_int("max_units", 64, 1024, log=True),
            "max_dropout": trial.suggest_float("max_dropout", 0.0, 1.0),
        }


NAMES = ("batch_size", "learning_rate", "momentum", "weight_decay", "num_layers", "max_units", "max_dropout")


@dataclass(frozen=True)
class LCBench:
    """The replacement for training on one task; values are accuracies in percent.

    Attributes:
        folder: folder with the files of the surrogate.
        task: OpenML's number of the task.
        noise: standard deviation of the reported values.
    """

    folder: Path
    task: str
    noise: float = NOISE

    def trial(self, params: Mapping[str, Any], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the accuracies [EPOCHS] of a configuration with noise, and without."""
        true = self.predict(np.array([[params[name] for name in NAMES]] * EPOCHS), np.arange(1, EPOCHS + 1))
        return true + self.noise * random.standard_normal(EPOCHS), true

    def predict(self, configurations: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return the accuracies [n] of configurations [n, 7] after epochs [n]."""
        session, codes = load(self.folder)
        task = np.full((len(configurations), 1), codes[self.task], dtype=np.int32)
        inputs = np.column_stack([epochs, configurations]).astype(np.float32)
        outputs = session.run(None, {"x_cat": task, "x_cont": inputs})[0]
        return np.asarray(outputs[:, VALIDATION_ACCURACY], dtype=float)

    def default(self, kind: str, seed: int) -> dict[str, Any]:
        """Return a configuration that stands for an author's guess.

        Args:
            kind: key of `DEFAULTS`.
            seed: seed of the random configurations from which the guess is chosen by its accuracy after all epochs.
        """
        random = np.random.default_rng([int(self.task), seed])
        rows = make_configurations(random.uniform(size=(DEFAULTS_AMONG, len(NAMES))))
        order = np.argsort(-self.predict(rows, np.full(len(rows), EPOCHS)))
        pairs = zip(NAMES, rows[order[DEFAULTS[kind]]].tolist(), strict=True)
        space = distributions(LCBenchObjective)
        return {name: int(value) if isinstance(space[name], IntDistribution) else value for name, value in pairs}

    def best_known(self) -> float:
        """Return the best accuracy after the last epoch of many configurations, found by random and local search."""
        return _best_known(self)

    def digest(self) -> str:
        """Return a digest of the data and code that determine the curves."""
        made_of = repr((self.task, self.noise, digest_files(self.folder))).encode()
        return hashlib.sha256(Path(__file__).read_bytes() + made_of).hexdigest()[:16]


@cache
def _best_known(task: LCBench) -> float:
    random = np.random.default_rng(0)
    places = random.uniform(size=(RANDOM, len(NAMES)))
    width = 0.2
    for _ in range(ROUNDS):
        values = task.predict(make_configurations(places), np.full(len(places), EPOCHS))
        best = places[np.argsort(-values)[:KEPT]]
        steps = width * random.standard_normal((20, *best.shape)) * (random.uniform(size=(20, *best.shape)) < 0.5)
        places = np.concatenate([best, np.clip(best + steps, 0, 1).reshape(-1, len(NAMES))])
        width *= 0.7
    return float(task.predict(make_configurations(places), np.full(len(places), EPOCHS)).max())


def make_configurations(places: np.ndarray) -> np.ndarray:
    """Return the configurations [n, 7] at positions [n, 7] of the ranges, from 0 to 1."""
    ranges: Any = [distributions(LCBenchObjective)[name] for name in NAMES]
    log = np.array([one.log for one in ranges])
    low, high = (np.array([getattr(one, bound) for one in ranges], dtype=float) for bound in ("low", "high"))
    low[log], high[log] = np.log(low[log]), np.log(high[log])
    values = low + places * (high - low)
    values[:, log] = np.exp(values[:, log])
    is_integer = np.array([isinstance(one, IntDistribution) for one in ranges])
    return np.where(is_integer, np.round(values), values)


@cache
def load(folder: Path) -> tuple[Any, dict[str, int]]:
    """Return the model with one thread, and the code of each task."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return session, json.loads((folder / "encoding.json").read_text())["OpenML_task_id"]


@cache
def digest_files(folder: Path) -> str:
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in FILES)).hexdigest()


def read_tasks(folder: Path) -> list[str]:
    """Return the tasks of the data, of which those at even positions are for tuning."""
    space = json.loads((folder / "config_space.json").read_text())["hyperparameters"]
    choices: list[str] = next(entry["choices"] for entry in space if entry["name"] == "OpenML_task_id")
    return choices
