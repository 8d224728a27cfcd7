"""Freeze-thaw Bayesian optimization: a Gaussian process over learning curves, the sampler and the forecasts."""
