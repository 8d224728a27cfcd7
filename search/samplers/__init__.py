"""Samplers: each is a class with options, which builds Optuna's sampler. Add a new module to the imports below."""

from hpsearch.search.samplers import grid, optuna, optunahub
from hpsearch.search.samplers.base import SamplerSpec

__all__ = ["SamplerSpec", "grid", "optuna", "optunahub"]
