"""Freeze-thaw Bayesian optimization: the learning-curve Gaussian process, its sampler and the forecasts."""
