"""Pruners: one class for each, with its options and its verdict. A new module is added to the imports below.

The verdicts are those of Optuna's pruners of the same names.
"""

from hpsearch.search.pruners import rungs, stopping
from hpsearch.search.pruners.base import PrunerSpec

__all__ = ["PrunerSpec", "rungs", "stopping"]
