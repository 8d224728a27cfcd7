"""Pruners: each is a class with options and a method that makes the decision. Add a new module to the imports below.

A pruner with the name of one of Optuna's pruners makes the same decisions.
"""

from hpsearch.search.pruners import hyperband_and_asha, pbt, stopping, wilcoxon
from hpsearch.search.pruners.base_and_halving import PrunerSpec

__all__ = ["PrunerSpec", "hyperband_and_asha", "pbt", "stopping", "wilcoxon"]
