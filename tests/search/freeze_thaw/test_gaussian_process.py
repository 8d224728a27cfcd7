"""The Gaussian process follows its kernel, learns length scales, and predicts final values from first epochs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from hpsearch.search.freeze_thaw.gaussian_process import (
    TRIAL_DECAY,
    GaussianProcess,
    Points,
    factorize,
    log_expected_improvement,
)

OWNER = np.array([0, 0, 1])  # of two columns and of one


def points(count: int, *, seed: int = 0, trials: int = 5, columns: int = 3) -> Points:
    random = np.random.default_rng(seed)
    return Points(
        torch.from_numpy(random.random((count, columns))),
        torch.from_numpy(random.random(count)),
        torch.from_numpy(random.integers(trials, size=count)),
        torch.zeros(count, dtype=torch.int64),
    )


def test_the_kernel_follows_its_formula():
    process = GaussianProcess(
        torch.from_numpy(OWNER), torch.log(torch.tensor([0.9, 0.5, 1.1, 2.0, 0.3, 0.01, 0.7, 1.5]).double())
    )
    a, b = points(6), points(4, seed=1)
    level, slope, config, decay, own, _, *lengths = process.theta.exp().tolist()
    expected = np.empty((6, 4))
    for i in range(6):
        for j in range(4):
            difference = (a.x[i] - b.x[j]).numpy() / np.array([lengths[k] for k in OWNER])
            r = math.sqrt(5) * float(np.linalg.norm(difference))
            apart = abs(float(a.log_epoch[i] - b.log_epoch[j]))
            expected[i, j] = level + slope * float(a.log_epoch[i] * b.log_epoch[j])
            expected[i, j] += config * (1 + r + r * r / 3) * math.exp(-r) * math.exp(-apart / decay)
            expected[i, j] += own * math.exp(-apart / TRIAL_DECAY) * bool(a.trial[i] == b.trial[j])
    np.testing.assert_allclose(process.covariance(a, b).numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(process.covariance(a, a).diagonal().numpy(), process.variance(a).numpy(), rtol=1e-6)


def test_predictions_match_observations_and_revert_to_the_prior_far_away():
    process = GaussianProcess.from_prior(OWNER)
    seen = points(8, trials=1000)
    y = torch.sin(5 * seen.x[:, 0])
    posterior = process.posterior(seen, y)
    mean, deviation = posterior.predict(seen)
    assert torch.allclose(mean, y, atol=0.15)
    _, far = posterior.predict(Points(seen.x + 100, seen.log_epoch, seen.trial - 10**6, seen.study))
    assert (far > 5 * deviation).all()


def test_a_fit_raises_the_likelihood_and_finds_the_relevant_parameter():
    random = np.random.default_rng(0)
    x = random.random((60, 2))
    seen = Points.at_final_epoch(x, np.arange(60))
    y = torch.from_numpy(np.sin(6 * x[:, 0]) + 0.05 * random.standard_normal(60))
    new = GaussianProcess.from_prior(np.array([0, 1]))
    fitted = new.fit(seen, y)

    def likelihood(process: GaussianProcess) -> float:
        covariance = process.noisy_covariance(seen)
        found = torch.distributions.MultivariateNormal(torch.zeros(60, dtype=torch.float64), covariance)
        return float(found.log_prob(y))

    assert likelihood(fitted) > likelihood(new) + 10
    matters, idle = fitted.theta[-2:].exp().tolist()
    assert idle > 3 * matters
    again = fitted.fit(seen, y)
    assert likelihood(again) == pytest.approx(likelihood(fitted), abs=0.1)


def test_a_trial_with_a_better_start_has_a_better_forecast():
    x = np.full((2, 3), 0.5)
    early = Points(torch.from_numpy(x), torch.full((2,), 0.3).double(), torch.tensor([0, 1]), torch.tensor([0, 0]))
    posterior = GaussianProcess.from_prior(OWNER).posterior(early, torch.tensor([-0.5, 0.5]).double())
    mean, deviation = posterior.predict(Points.at_final_epoch(x, [0, 1]))
    assert mean[0] < mean[1]
    new, unknown = posterior.predict(Points.at_final_epoch(x[:1]))
    assert mean[0] < new[0] < mean[1]  # a third of that configuration
    assert (unknown[0] > deviation).all()


def test_running_trials_count_with_their_predicted_values():
    seen = points(5)
    posterior = GaussianProcess.from_prior(OWNER).posterior(seen, torch.linspace(-1, 1, 5).double())
    running = Points.at_final_epoch(np.full((1, 3), 0.9), [77])
    before, wide = posterior.predict(running)
    after, narrow = posterior.fantasize(running).predict(running)
    assert after[0] == pytest.approx(float(before[0]), abs=0.02)
    assert narrow[0] < 0.5 * wide[0]


def test_the_posterior_and_the_expected_improvement_equal_the_textbook_formulas():
    """Rasmussen and Williams (2006), equations 2.25 and 2.26; Jones et al. (1998), equation 15."""
    process, seen, new = GaussianProcess.from_prior(OWNER), points(12), points(7, seed=1, trials=20)
    y = torch.sin(5 * seen.x[:, 0])
    inverse = np.linalg.inv(process.noisy_covariance(seen).numpy())
    cross = process.covariance(new, seen).numpy()
    mean = cross @ inverse @ y.numpy()
    deviation = np.sqrt(np.diag(process.covariance(new, new).numpy() - cross @ inverse @ cross.T))
    best = -0.3
    z = (best - mean) / deviation
    improvement = (best - mean) * norm.cdf(z) + deviation * norm.pdf(z)

    found = process.posterior(seen, y).predict(new)
    np.testing.assert_allclose(found[0].numpy(), mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found[1].numpy(), deviation, rtol=1e-6)
    np.testing.assert_allclose(log_expected_improvement(*found, best).exp().numpy(), improvement, rtol=1e-6)


def test_the_factorization_of_an_indefinite_matrix_adds_jitter_and_stays_differentiable():
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    covariance = scale * torch.ones(5, 5, dtype=torch.float64) - 1e-9 * torch.eye(5, dtype=torch.float64)
    assert torch.linalg.cholesky_ex(covariance)[1] > 0
    factor = factorize(covariance)
    torch.testing.assert_close(factor @ factor.T, covariance, atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(factor.diagonal().log().sum(), scale)
    assert torch.isfinite(gradient)
    assert gradient > 0
    regular = torch.eye(3, dtype=torch.float64) + 1
    torch.testing.assert_close(factorize(regular), torch.linalg.cholesky(regular), atol=0, rtol=0)
    with pytest.raises(torch.linalg.LinAlgError):
        factorize(-regular)


@pytest.mark.parametrize("z", [3.0, 0.5, -0.5, -2.0, -6.0])
def test_the_expected_improvement_equals_the_integral(z):
    deviation, best = 0.7, 0.2
    mean = best - z * deviation
    integral, _ = quad(lambda value: (best - value) * norm.pdf(value, mean, deviation), best - 40 * deviation, best)
    found = log_expected_improvement(torch.tensor([mean]).double(), torch.tensor([deviation]).double(), best)
    assert float(found) == pytest.approx(math.log(integral), rel=1e-5)


def test_log_expected_improvement_orders_hopeless_configurations():
    means = torch.tensor([20.0, 30.0, 40.0]).double()
    found = log_expected_improvement(means, torch.ones(3).double(), 0.0)
    assert torch.isfinite(found).all()
    assert found[0] > found[1] > found[2]
