"""Samplers: one class for each, with its options. A new module is added to the imports below."""

from hpsearch.search.samplers import listed, optuna, optunahub
from hpsearch.search.samplers.base import SamplerSpec

__all__ = ["SamplerSpec", "listed", "optuna", "optunahub"]
