"""Pruning: the verdicts of Optuna's pruners, from what a study has finished, each with the reason a person can read.

Imports: spec.
"""

from search.pruning.decision import Decision
from search.pruning.judge import Judge

__all__ = ["Decision", "Judge"]
