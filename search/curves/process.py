"""A Gaussian process over configurations and epochs: what a trial ends with that has begun, or that might be.

Its kernel is that of a level, a slope over log-epochs, a function of the configuration that changes slowly with them,
and each trial's own deviation: one exact process where Swersky et al. (2014, "Freeze-thaw Bayesian optimization") have
one for the ends and one for each curve. Some two hundred points are enough of it, and such a process is two screens of
torch, which workers have loaded anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

OWN_DECAY = 0.7  # of a trial's deviation, in units of the whole length
STEPS = 60  # of a fit, at most
_JITTER = 1e-6

# Mean and deviation of the logarithms of: level, slope, configuration, decay, own deviation, noise; then of lengths.
_MEAN = (0.0, -0.7, 0.0, 0.0, -2.3, -4.0)
_STEADY = (0.0, -0.7, 0.0, 0.0, -5.0, -5.0)  # of what does not change with the epochs, nor from trial to trial
_DEVIATION = 1.0
_LENGTH_DEVIATION = 0.8
_ALIKE = (1.5, 1.5)  # of the logit of how alike two studies are


@dataclass(frozen=True)
class Points:
    """Configurations after some epochs.

    Attributes:
        x: features of the configurations [n, columns], see `Space`.
        s: logarithms of the epochs [n], 0 after the first, 1 after the last.
        trial: whose they are [n].
        study: of which study [n]; 0 is the current one.
    """

    x: Tensor
    s: Tensor
    trial: Tensor
    study: Tensor

    @classmethod
    def at_the_end(cls, x: np.ndarray, trial: object = -1) -> Points:
        """Configurations after their last epoch; of no trial, unless it is said of which."""
        numbers = torch.from_numpy(np.broadcast_to(np.asarray(trial, dtype=np.int64), len(x)).copy())
        return cls(_tensor(x), torch.ones(len(x), dtype=torch.float64), numbers, torch.zeros_like(numbers))

    def and_then(self, other: Points) -> Points:
        """These points, then those."""
        return Points(*map(torch.cat, zip(vars(self).values(), vars(other).values(), strict=True)))

    def some(self, rows: Tensor | list[int]) -> Points:
        """Return the points at some indices [n]."""
        return Points(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Process:
    """A process with its hyperparameters.

    Attributes:
        owner: which parameter each column of features belongs to [columns].
        theta: logarithms of level, slope, configuration, decay, own deviation and noise, then of a length for each
            parameter [6 + parameters]; where there are several studies the logit of their correlation last.
        steady: which hyperparameters are probable.
    """

    owner: Tensor
    theta: Tensor
    steady: bool = False

    @classmethod
    def new(cls, owner: np.ndarray, *, several: bool = False, steady: bool = False) -> Process:
        """What is expected before anything is seen, of one study or of several.

        It is sure of more where values are `steady`: a function of the configuration, but for a little noise.
        """
        return cls(torch.from_numpy(owner), _prior(owner, several=several, steady=steady)[0], steady)

    def fitted(self, points: Points, y: Tensor) -> Process:
        """The process of the most probable hyperparameters given values [n], sought from these on."""
        mean, deviation = _prior(self.owner.numpy(), several=self._several, steady=self.steady)

        def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
            at = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
            factor, failed = torch.linalg.cholesky_ex(Process(self.owner, at).noisy(points))
            if failed.item():
                return 1e10, np.zeros_like(theta)
            white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
            value = 0.5 * white.square().sum() + factor.diagonal().log().sum()
            value = value + 0.5 * ((at - mean) / deviation).square().sum()
            (gradient,) = torch.autograd.grad(value, at)
            return value.item(), gradient.numpy()

        bounds = [(float(m - 6 * d), float(m + 6 * d)) for m, d in zip(mean, deviation, strict=True)]
        start = self.theta.numpy()
        with torch.enable_grad():
            found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": STEPS})
        return Process(self.owner, torch.from_numpy(found.x), self.steady)

    def given(self, points: Points, y: Tensor) -> Posterior:
        """What is expected after values [n] were seen."""
        factor = torch.linalg.cholesky(self.noisy(points))
        return Posterior(self, points, y, factor, torch.cholesky_solve(y[:, None], factor)[:, 0])

    def noisy(self, points: Points) -> Tensor:
        """The covariance of values that are seen [n, n]."""
        noise = self.theta[5].exp() + _JITTER
        return self.covariance(points, points) + noise * torch.eye(len(points.s), dtype=torch.float64)

    def covariance(self, a: Points, b: Points) -> Tensor:
        """Of what is true [n, m]."""
        level, slope, config, decay, own = self.theta[:5].exp()
        weights = (-self.theta[6:]).exp()[self.owner]
        one, other = a.x * weights, b.x * weights
        squared = one.square().sum(1)[:, None] + other.square().sum(1) - 2 * one @ other.T
        r = (5 * squared.clamp(min=0) + 1e-12).sqrt()
        near = (1 + r + r * r / 3) * torch.exp(-r)  # Matern 5/2
        apart = (a.s[:, None] - b.s).abs()
        same = a.trial[:, None] == b.trial
        if self._several:  # the same configuration in another study tells as much as they are alike (Bonilla 2007)
            near = near * torch.where(a.study[:, None] == b.study, 1.0, self.theta[-1].sigmoid())
        shared: Tensor = level + slope * a.s[:, None] * b.s + config * near * torch.exp(-apart / decay)
        shared += own * same * torch.exp(-apart / OWN_DECAY)
        return shared

    @property
    def _several(self) -> bool:
        return len(self.theta) > len(_MEAN) + int(self.owner.max()) + 1

    def variance(self, points: Points) -> Tensor:
        """Of what is true [n], before anything is seen."""
        level, slope, config, _, own = self.theta[:5].exp()
        found: Tensor = level + slope * points.s.square() + config + own
        return found


@dataclass(frozen=True)
class Posterior:
    """What is expected after values were seen."""

    process: Process
    points: Points
    y: Tensor
    factor: Tensor
    weights: Tensor

    def at(self, points: Points) -> tuple[Tensor, Tensor]:
        """Means and deviations [m] of what is true there."""
        cross = self.process.covariance(points, self.points)
        white = torch.linalg.solve_triangular(self.factor, cross.T, upper=False)
        variance = self.process.variance(points) - white.square().sum(0)
        return cross @ self.weights, variance.clamp(min=1e-10).sqrt()

    def believing(self, points: Points) -> Posterior:
        """As if at points the mean had been seen: of trials that run, so that others are suggested."""
        mean, _ = self.at(points)
        return self.process.given(self.points.and_then(points), torch.cat([self.y, mean]))


def log_expected_improvement(mean: Tensor, deviation: Tensor, best: float) -> Tensor:
    """The logarithm of the expected improvement below `best` [n], finite where there is hardly any (Ament et al. 2023).

    Args:
        mean: expected [n].
        deviation: of it [n].
        best: to be improved on.
    """
    z = (best - mean) / deviation
    log_density = -0.5 * z.square() - 0.5 * math.log(2 * math.pi)
    above = torch.log((log_density.exp() + z * torch.special.ndtr(z)).clamp(min=1e-300))
    low = z.clamp(max=0.0)
    mills = math.sqrt(math.pi / 2) * torch.special.erfcx(-low / math.sqrt(2))
    below = log_density + torch.log1p((low * mills).clamp(min=-1 + 1e-12))
    return torch.where(z > -1.0, above, below) + deviation.log()


def _prior(owner: np.ndarray, *, several: bool, steady: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the logarithms of all hyperparameters; lengths grow with the number of parameters."""
    parameters = int(owner.max()) + 1
    length = math.log(0.5) + 0.5 * math.log(parameters)
    means = [*(_STEADY if steady else _MEAN), *[length] * parameters]
    deviations = [_DEVIATION] * len(_MEAN) + [_LENGTH_DEVIATION] * parameters
    if several:
        means, deviations = [*means, _ALIKE[0]], [*deviations, _ALIKE[1]]
    return _tensor(means), _tensor(deviations)


def _tensor(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64).copy())
