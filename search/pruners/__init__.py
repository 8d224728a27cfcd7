"""Pruners: a file for each, with its options, its verdict and the reason; one that is put here is found.

The verdicts are those of Optuna's pruners of the same names.
"""

from hpsearch.search.discovery import load_modules
from hpsearch.search.pruners.base import PrunerSpec

load_modules(__name__, __path__)

__all__ = ["PrunerSpec"]
