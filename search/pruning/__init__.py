"""Pruning: a study's pruner asked about a trial, with what the storage knows of the others.

Imports: pruners, spec.
"""

from search.pruners.decision import Decision
from search.pruning.judge import Judge

__all__ = ["Decision", "Judge"]
