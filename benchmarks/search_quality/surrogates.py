"""Surrogates of training: models that predict the learning curve of any configuration, fitted to trained curves.

A curve is predicted as normal scores (transformed ranks among all values of all curves) and converted back to the unit
of the metric. The noise of a trial is a whole residual curve of a configuration that was held out from the fit, scaled
to the difference between trainings of one configuration with two seeds. The prediction without noise is the true value
of a configuration.
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
SHAPES = 5  # principal components of curves that the GPs predict
TAIL = 50  # number of best values whose slope extrapolates to better ones
ALIKE = 20  # number of residual curves to draw from: those of the nearest predicted quality


class Model(Protocol):
    """A regression of curves [n, epochs] on configurations [n, columns]."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> Model: ...

    def predict(self, x: np.ndarray) -> np.ndarray: ...


class CurveGP:
    """An exact Gaussian process for each of the first principal components of the curves."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> CurveGP:
        self.shapes = PCA(n_components=SHAPES, whiten=True).fit(y)
        smooth = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.ones(x.shape[1]), (0.1, 30.0), nu=2.5)
        kernel = smooth + WhiteKernel(0.1, (1e-3, 2.0))
        weights = self.shapes.transform(y)
        self.processes = [GaussianProcessRegressor(kernel, random_state=0).fit(x, weight) for weight in weights.T]
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        # As `predict` of each process, without its checks, which take most of its time.
        weights = [process.kernel_(x, process.X_train_) @ process.alpha_ for process in self.processes]
        return self.shapes.inverse_transform(np.column_stack(weights))


class CurveTrees:
    """Extremely randomised trees whose leaves are curves."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> CurveTrees:
        forest = ExtraTreesRegressor(100, min_samples_leaf=2, max_features=0.7, random_state=0).fit(x, y)
        self.trees = [tree.tree_ for tree in forest.estimators_]
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        # As `predict` of the forest, without its checks and threads.
        return np.mean([tree.predict(x.astype(np.float32))[..., 0] for tree in self.trees], axis=0)


def model(family: Family) -> Model:
    return CurveGP() if family == "gp" else CurveTrees()


@dataclass(frozen=True)
class Scores:
    """The conversion between values of an objective and normal scores, of which lower is better."""

    values: np.ndarray  # ascending, unique
    scores: np.ndarray  # scores of these values, ascending
    sign: float  # -1 if higher values are better, else 1

    @classmethod
    def of(cls, values: np.ndarray, *, maximize: bool) -> Scores:
        known = values[np.isfinite(values)]
        ranks = norm.ppf((rankdata(known) - 0.5) / len(known))
        unique, first = np.unique(known, return_index=True)
        return cls(unique, ranks[first], -1.0 if maximize else 1.0)

    def score(self, values: np.ndarray) -> np.ndarray:
        """Return the scores of values; a diverged value gets the worst score."""
        scores = self.sign * np.interp(values, self.values, self.scores)
        return np.where(np.isfinite(values), scores, np.max(self.sign * self.scores))

    def value(self, scores: np.ndarray) -> np.ndarray:
        """Return the values of scores, at worst the worst trained value; better than the best are extrapolated."""
        scores = self.sign * scores
        values = np.interp(scores, self.scores, self.values)
        tail = min(TAIL, len(self.values) - 1)
        low, high = (0, tail) if self.sign > 0 else (-tail - 1, -1)
        slope = (self.values[high] - self.values[low]) / (self.scores[high] - self.scores[low])
        best = 0 if self.sign > 0 else -1
        beyond = (scores - self.scores[best]) * slope
        return np.where(self.sign * (scores - self.scores[best]) < 0, self.values[best] + beyond, values)


class Surrogate:
    """A replacement for the training of an objective."""

    def __init__(self, name: str, family: Family) -> None:
        self.name, self.family, self.problem = name, family, PROBLEMS[name]
        self.curves = first_seeds(read_curves(name))
        self._x = np.array([encode(self.problem.objective, curve.params) for curve in self.curves])
        values = np.array([curve.values for curve in self.curves])
        self.scores = Scores.of(values, maximize=self.problem.maximize)
        self._y = self.scores.score(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # length scales of irrelevant parameters hit a bound
            self.held_out = np.empty_like(self._y)
            for rest, part in KFold(FOLDS, shuffle=True, random_state=0).split(self._x):
                self.held_out[part] = model(family).fit(self._x[rest], self._y[rest]).predict(self._x[part])
            self._model = model(family).fit(self._x, self._y)
        residuals = self._y - self.held_out
        self.noise = min(1.0, deviation_of_seeds(name, self.scores) / float(residuals.std()))
        self._residuals = self.noise * residuals

    def true(self, params: Params) -> np.ndarray:
        """Return the curve [epochs] of a configuration without noise, in the unit of the metric."""
        return self.scores.value(self._predicted(params))

    def trial(self, params: Params, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the learning curve of one training of a configuration, and the true one."""
        predicted = self._predicted(params)
        alike = np.argsort(np.abs(self.held_out[:, -1] - predicted[-1]))[:ALIKE]
        residuals = self._residuals[alike]
        residual = residuals[random.integers(len(alike))] - residuals.mean(axis=0)
        return self.scores.value(predicted + residual), self.scores.value(predicted)

    def _predicted(self, params: Params) -> np.ndarray:
        return self._model.predict(encode(self.problem.objective, params)[None])[0]


def deviation_of_seeds(name: str, scores: Scores) -> float:
    """Return the standard deviation of scores between seeds of one configuration, over all epochs."""
    by_configuration: dict[int, list[np.ndarray]] = {}
    for curve in read_curves(name):
        by_configuration.setdefault(curve.configuration, []).append(scores.score(np.array(curve.values)))
    repeated = [np.array(group) for group in by_configuration.values() if len(group) > 1]
    return math.sqrt(np.mean([group.var(axis=0, ddof=1).mean() for group in repeated]))


def first_seeds(curves: list[Curve]) -> list[Curve]:
    """Return one curve per configuration, so that a fit weights all configurations equally."""
    return [curve for curve in curves if curve.seed == 0]


def made_of(name: str) -> str:
    """Return a digest of the data and code that determine the surrogates of an objective."""
    code = Path(__file__).read_bytes()
    return hashlib.sha256(repr((PROBLEMS[name], read_curves(name))).encode() + code).hexdigest()[:16]


@cache
def surrogate(name: str, family: Family) -> Surrogate:
    """Return the surrogate of an objective, from its file or fitted."""
    path = CACHE / f"{name}-{family}-{made_of(name)}.joblib"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        joblib.dump(Surrogate(name, family), new)
        new.replace(path)
    found: Surrogate = joblib.load(path)
    return found
