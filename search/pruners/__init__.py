"""Pruners: one class each, with its options and its decision. Add a new module to the imports below.

The decisions are those of Optuna's pruners of the same names.
"""

from hpsearch.search.pruners import rungs, stopping
from hpsearch.search.pruners.base import PrunerSpec

__all__ = ["PrunerSpec", "rungs", "stopping"]
