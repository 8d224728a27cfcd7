"""Gaussian process over configurations and epochs, which predicts the final score of started and new trials.

The kernel is the sum of four terms: a level, a slope over log-epochs, a function of the configuration that changes
slowly with the epochs, and a deviation per trial. A single exact Gaussian process models all values, while Swersky et
al. (2014, "Freeze-thaw Bayesian optimization") use one process for the final values and one per learning curve. The
process is implemented in torch, because about two hundred points suffice, and workers have already loaded torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

TRIAL_DECAY = 0.7  # length scale of a trial's deviation, in scaled log-epochs
MAX_FIT_STEPS = 60  # L-BFGS iterations
_JITTER = 1e-6
MAX_RELATIVE_JITTER = 1e-2  # largest jitter of a Cholesky factorization, relative to the mean variance

# Prior of the logarithms of level, slope, configuration, decay, trial deviation and noise; then of length scales.
_PRIOR_MEAN = (0.0, -0.7, 0.0, 0.0, -2.3, -4.0)
_INVARIANT_PRIOR_MEAN = (0.0, -0.7, 0.0, 0.0, -5.0, -5.0)  # for metrics that depend on the configuration only
_PRIOR_DEVIATION = 1.0
_LENGTH_DEVIATION = 0.8
_TASK_CORRELATION_LOGIT = (1.5, 1.5)  # mean and deviation of the logit


@dataclass(frozen=True)
class Points:
    """Configurations at given epochs.

    Attributes:
        x: features of the configurations [n, columns], see `Space`.
        log_epoch: scaled log-epochs [n]: 0 after the first epoch, 1 after the last.
        trial: trial index of each point [n].
        study: study index of each point [n]; 0 is the current study.
    """

    x: Tensor
    log_epoch: Tensor
    trial: Tensor
    study: Tensor

    @classmethod
    def at_final_epoch(cls, x: np.ndarray, trial: object = -1) -> Points:
        """Return the points of configurations after the last epoch.

        Args:
            x: features of the configurations [n, columns].
            trial: trial indices [n], or one trial index for all points; -1 means a new trial.
        """
        numbers = torch.from_numpy(np.broadcast_to(np.asarray(trial, dtype=np.int64), len(x)).copy())
        return cls(_to_tensor(x), torch.ones(len(x), dtype=torch.float64), numbers, torch.zeros_like(numbers))

    def concat(self, other: Points) -> Points:
        """Return the concatenation of these points and the points of `other`."""
        return Points(*map(torch.cat, zip(vars(self).values(), vars(other).values(), strict=True)))

    def select(self, rows: Tensor | list[int]) -> Points:
        """Return the points at the given indices [n]."""
        return Points(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class GaussianProcess:
    """Gaussian process with its hyperparameters.

    Attributes:
        param_by_feature: for each feature column, the index of the parameter that it encodes [columns].
        theta: logarithms of level, slope, configuration, decay, trial deviation and noise, then of a length scale per
            parameter [6 + parameters]. If the points are from several studies, the last entry is the logit of the task
            correlation.
        is_epoch_invariant: whether the prior is for a metric that does not change with the epochs.
    """

    param_by_feature: Tensor
    theta: Tensor
    is_epoch_invariant: bool = False

    @classmethod
    def from_prior(
        cls, param_by_feature: np.ndarray, *, multi_study: bool = False, is_epoch_invariant: bool = False
    ) -> Self:
        """Return the process with the prior means of its hyperparameters.

        Args:
            param_by_feature: for each feature column, the index of the parameter that it encodes [columns].
            multi_study: whether the points are from several studies.
            is_epoch_invariant: whether values depend only on the configuration, apart from a little noise.
        """
        mean, _ = _make_prior(param_by_feature, multi_study=multi_study, is_epoch_invariant=is_epoch_invariant)
        return cls(torch.from_numpy(param_by_feature), mean, is_epoch_invariant)

    def fit(self, points: Points, y: Tensor) -> GaussianProcess:
        """Return the process with the most probable hyperparameters, given the scores `y` [n] of the points."""
        columns, is_invariant = self.param_by_feature.numpy(), self.is_epoch_invariant
        mean, deviation = _make_prior(columns, multi_study=self._is_multi_study, is_epoch_invariant=is_invariant)

        def compute_loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
            at = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
            factor = factorize(GaussianProcess(self.param_by_feature, at).noisy_covariance(points))
            white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
            value = 0.5 * white.square().sum() + factor.diagonal().log().sum()
            value = value + 0.5 * ((at - mean) / deviation).square().sum()
            (gradient,) = torch.autograd.grad(value, at)
            return value.item(), gradient.numpy()

        bounds = [(float(m - 6 * d), float(m + 6 * d)) for m, d in zip(mean, deviation, strict=True)]
        start, options = self.theta.numpy(), {"maxiter": MAX_FIT_STEPS}
        with torch.enable_grad():
            found = minimize(compute_loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return GaussianProcess(self.param_by_feature, torch.from_numpy(found.x), self.is_epoch_invariant)

    def posterior(self, points: Points, y: Tensor) -> Posterior:
        """Return the posterior, given the scores `y` [n] of the points."""
        factor = factorize(self.noisy_covariance(points))
        return Posterior(self, points, y, factor, torch.cholesky_solve(y[:, None], factor)[:, 0])

    def noisy_covariance(self, points: Points) -> Tensor:
        """Return the covariance of noisy observations at the points, K + noise [n, n]."""
        noise = self.theta[5].exp() + _JITTER
        return self.covariance(points, points) + noise * torch.eye(len(points.log_epoch), dtype=torch.float64)

    def covariance(self, a: Points, b: Points) -> Tensor:
        """Return the prior covariance [n, m] of the latent function between points `a` [n] and `b` [m]."""
        level, slope, config, decay, own = self.theta[:5].exp()
        weights = (-self.theta[6:]).exp()[self.param_by_feature]
        one, other = a.x * weights, b.x * weights
        squared = one.square().sum(1)[:, None] + other.square().sum(1) - 2 * one @ other.T
        r = (5 * squared.clamp(min=0) + 1e-12).sqrt()
        near = (1 + r + r * r / 3) * torch.exp(-r)  # Matern 5/2
        apart = (a.log_epoch[:, None] - b.log_epoch).abs()
        same = a.trial[:, None] == b.trial
        if self._is_multi_study:  # covariance between studies is scaled by the task correlation (Bonilla et al. 2007)
            near = near * torch.where(a.study[:, None] == b.study, 1.0, self.theta[-1].sigmoid())
        shared: Tensor = level + slope * a.log_epoch[:, None] * b.log_epoch + config * near * torch.exp(-apart / decay)
        shared += own * same * torch.exp(-apart / TRIAL_DECAY)
        return shared

    @property
    def _is_multi_study(self) -> bool:
        return len(self.theta) > len(_PRIOR_MEAN) + int(self.param_by_feature.max()) + 1

    def variance(self, points: Points) -> Tensor:
        """Return the prior variance of the latent function at the points [n]."""
        level, slope, config, _, own = self.theta[:5].exp()
        found: Tensor = level + slope * points.log_epoch.square() + config + own
        return found


@dataclass(frozen=True)
class Posterior:
    """Posterior of a Gaussian process.

    Attributes:
        process: the process.
        points: the observed points.
        y: observed scores [n].
        cholesky_factor: Cholesky factor of the noisy covariance [n, n].
        weights: inverse noisy covariance times `y` [n].
    """

    process: GaussianProcess
    points: Points
    y: Tensor
    cholesky_factor: Tensor
    weights: Tensor

    def predict(self, points: Points) -> tuple[Tensor, Tensor]:
        """Return the means and standard deviations [m] of the latent function at the points."""
        cross = self.process.covariance(points, self.points)
        white = torch.linalg.solve_triangular(self.cholesky_factor, cross.T, upper=False)
        variance = self.process.variance(points) - white.square().sum(0)
        return cross @ self.weights, variance.clamp(min=1e-10).sqrt()

    def fantasize(self, points: Points) -> Posterior:
        """Return a posterior that treats the predicted means of pending points as observations.

        This is the kriging believer (Ginsbourger et al. 2010).
        """
        mean, _ = self.predict(points)
        return self.process.posterior(self.points.concat(points), torch.cat([self.y, mean]))


def factorize(covariance: Tensor) -> Tensor:
    """Return the Cholesky factor of a covariance matrix [n, n].

    If rounding errors make the matrix indefinite, a jitter on the diagonal is multiplied by ten until the factorization
    succeeds. The factor stays differentiable, so that a fit can leave the region in which this happens.

    Raises:
        torch.linalg.LinAlgError: the matrix is not a covariance matrix.
    """
    factor, info = torch.linalg.cholesky_ex(covariance)
    jitter, scale = 1e-10, covariance.diagonal().mean()
    while info.item() and jitter <= MAX_RELATIVE_JITTER:
        jitter *= 10
        identity = torch.eye(len(covariance), dtype=covariance.dtype)
        factor, info = torch.linalg.cholesky_ex(covariance + jitter * scale * identity)
    found: Tensor = factor if not info.item() else torch.linalg.cholesky(covariance)
    return found


def log_expected_improvement(mean: Tensor, deviation: Tensor, best: float) -> Tensor:
    """Return the logarithm of the expected improvement [n], which is finite even for tiny values (Ament et al. 2023).

    Args:
        mean: predicted means [n]; lower is better.
        deviation: predicted standard deviations [n].
        best: score of the incumbent.
    """
    z = (best - mean) / deviation
    log_density = -0.5 * z.square() - 0.5 * math.log(2 * math.pi)
    above = torch.log((log_density.exp() + z * torch.special.ndtr(z)).clamp(min=1e-300))
    low = z.clamp(max=0.0)
    mills = math.sqrt(math.pi / 2) * torch.special.erfcx(-low / math.sqrt(2))
    below = log_density + torch.log1p((low * mills).clamp(min=-1 + 1e-12))
    return torch.where(z > -1.0, above, below) + deviation.log()


def _make_prior(
    param_by_feature: np.ndarray, *, multi_study: bool, is_epoch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Return prior means and deviations of the hyperparameters; length scales grow with the number of parameters."""
    parameters = int(param_by_feature.max()) + 1
    length = math.log(0.5) + 0.5 * math.log(parameters)
    means = [*(_INVARIANT_PRIOR_MEAN if is_epoch_invariant else _PRIOR_MEAN), *[length] * parameters]
    deviations = [_PRIOR_DEVIATION] * len(_PRIOR_MEAN) + [_LENGTH_DEVIATION] * parameters
    if multi_study:
        means, deviations = [*means, _TASK_CORRELATION_LOGIT[0]], [*deviations, _TASK_CORRELATION_LOGIT[1]]
    return _to_tensor(means), _to_tensor(deviations)


def _to_tensor(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64).copy())
