"""Stand-ins for training: the whole learning curve of any configuration, learnt from curves that were trained.

A curve is predicted as normal scores, which are the ranks of all values of all curves, and read back in the metric's
unit. What a surrogate did not foresee of configurations held out from it (their residual curves) is drawn as whole
curves, made as small as the difference between trainings of one configuration on two seeds, and added to each trial.
Without it a surrogate says what a configuration is truly worth.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import joblib
import numpy as np
from scipy.stats import norm, rankdata
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import KFold

from benchmarks.search_quality.curves import Curve, read_curves
from benchmarks.search_quality.problems import PROBLEMS
from benchmarks.search_quality.space import Params, encode

Family = Literal["gp", "trees"]
FAMILIES: tuple[Family, ...] = ("gp", "trees")

CACHE = Path("runs/search_quality/surrogates")  # not part of the repository

FOLDS = 5
SHAPES = 5  # components of curves that the GPs predict
TAIL = 50  # of the best values, by whose slope still better ones are told
ALIKE = 20  # residual curves, of the configurations of nearest predicted quality, that a trial draws from


class Model(Protocol):
    """Learns curves [n, epochs] of configurations [n, columns]."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> Model: ...

    def predict(self, x: np.ndarray) -> np.ndarray: ...


class CurveGP:
    """A Gaussian process, exact, for each of the curves' first principal components."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> CurveGP:
        self.shapes = PCA(n_components=SHAPES, whiten=True).fit(y)
        smooth = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.ones(x.shape[1]), (0.1, 30.0), nu=2.5)
        kernel = smooth + WhiteKernel(0.1, (1e-3, 2.0))
        weights = self.shapes.transform(y)
        self.processes = [GaussianProcessRegressor(kernel, random_state=0).fit(x, weight) for weight in weights.T]
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        # What `predict` of each does, without its checks, which take most of its time.
        weights = [process.kernel_(x, process.X_train_) @ process.alpha_ for process in self.processes]
        return self.shapes.inverse_transform(np.column_stack(weights))


class CurveTrees:
    """Extremely randomised trees whose leaves are curves."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> CurveTrees:
        forest = ExtraTreesRegressor(100, min_samples_leaf=2, max_features=0.7, random_state=0).fit(x, y)
        self.trees = [tree.tree_ for tree in forest.estimators_]
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        # What the forest's `predict` does, without its checks and threads.
        return np.mean([tree.predict(x.astype(np.float32))[..., 0] for tree in self.trees], axis=0)


def model(family: Family) -> Model:
    return CurveGP() if family == "gp" else CurveTrees()


@dataclass(frozen=True)
class Scores:
    """Normal scores of an objective's values, lower is better, and the way back."""

    values: np.ndarray  # ascending, each once
    scores: np.ndarray  # of these values, higher is higher
    sign: float  # -1 where higher is better

    @classmethod
    def of(cls, values: np.ndarray, *, maximize: bool) -> Scores:
        known = values[np.isfinite(values)]
        ranks = norm.ppf((rankdata(known) - 0.5) / len(known))
        unique, first = np.unique(known, return_index=True)
        return cls(unique, ranks[first], -1.0 if maximize else 1.0)

    def score(self, values: np.ndarray) -> np.ndarray:
        """Scores of values; what diverged is as bad as the worst."""
        scores = self.sign * np.interp(values, self.values, self.scores)
        return np.where(np.isfinite(values), scores, np.max(self.sign * self.scores))

    def value(self, scores: np.ndarray) -> np.ndarray:
        """Values of scores, none worse than the worst that was trained; what is better goes on as the best ones do."""
        scores = self.sign * scores
        values = np.interp(scores, self.scores, self.values)
        tail = min(TAIL, len(self.values) - 1)
        low, high = (0, tail) if self.sign > 0 else (-tail - 1, -1)
        slope = (self.values[high] - self.values[low]) / (self.scores[high] - self.scores[low])
        best = 0 if self.sign > 0 else -1
        beyond = (scores - self.scores[best]) * slope
        return np.where(self.sign * (scores - self.scores[best]) < 0, self.values[best] + beyond, values)


class Surrogate:
    """What stands in for the training of an objective."""

    def __init__(self, name: str, family: Family) -> None:
        self.name, self.family, self.problem = name, family, PROBLEMS[name]
        self.curves = first_seeds(read_curves(name))
        self._x = np.array([encode(self.problem.objective, curve.params) for curve in self.curves])
        values = np.array([curve.values for curve in self.curves])
        self.scores = Scores.of(values, maximize=self.problem.maximize)
        self._y = self.scores.score(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound: a parameter that is idle
            self.held_out = np.empty_like(self._y)
            for rest, part in KFold(FOLDS, shuffle=True, random_state=0).split(self._x):
                self.held_out[part] = model(family).fit(self._x[rest], self._y[rest]).predict(self._x[part])
            self._model = model(family).fit(self._x, self._y)
        residuals = self._y - self.held_out
        self.noise = min(1.0, deviation_of_seeds(name, self.scores) / float(residuals.std()))
        self._residuals = self.noise * residuals

    def true(self, params: Params) -> np.ndarray:
        """The curve [epochs] of a configuration, without noise, in the metric's unit."""
        return self.scores.value(self._predicted(params))

    def trial(self, params: Params, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The curve that one training of a configuration shows, and the true one."""
        predicted = self._predicted(params)
        alike = np.argsort(np.abs(self.held_out[:, -1] - predicted[-1]))[:ALIKE]
        residuals = self._residuals[alike]
        residual = residuals[random.integers(len(alike))] - residuals.mean(axis=0)
        return self.scores.value(predicted + residual), self.scores.value(predicted)

    def _predicted(self, params: Params) -> np.ndarray:
        return self._model.predict(encode(self.problem.objective, params)[None])[0]


def deviation_of_seeds(name: str, scores: Scores) -> float:
    """The deviation of the score of one configuration from seed to seed, over all epochs."""
    by_configuration: dict[int, list[np.ndarray]] = {}
    for curve in read_curves(name):
        by_configuration.setdefault(curve.configuration, []).append(scores.score(np.array(curve.values)))
    repeated = [np.array(group) for group in by_configuration.values() if len(group) > 1]
    return math.sqrt(np.mean([group.var(axis=0, ddof=1).mean() for group in repeated]))


def first_seeds(curves: list[Curve]) -> list[Curve]:
    """Each configuration once: a surrogate is told no more of one than of another."""
    return [curve for curve in curves if curve.seed == 0]


def made_of(name: str) -> str:
    """A digest of all that an objective's surrogates come from."""
    code = Path(__file__).read_bytes()
    return hashlib.sha256(repr((PROBLEMS[name], read_curves(name))).encode() + code).hexdigest()[:16]


@cache
def surrogate(name: str, family: Family) -> Surrogate:
    """The surrogate of an objective, fitted once and kept in a file."""
    path = CACHE / f"{name}-{family}-{made_of(name)}.joblib"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        joblib.dump(Surrogate(name, family), new)
        new.replace(path)
    found: Surrogate = joblib.load(path)
    return found
