"""Samplers: each is a class with options, which builds Optuna's sampler. Add a new module to the imports below."""

from hpsearch.search.samplers import grid_and_brute_force, optuna, optunahub
from hpsearch.search.samplers.base import SamplerSpec

__all__ = ["SamplerSpec", "grid_and_brute_force", "optuna", "optunahub"]
