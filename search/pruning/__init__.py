"""Pruning: a study's pruner asked about a trial, with what the storage knows of the others.

Imports: pruners, spec.
"""

from search.pruners.decision import Decision
from search.pruning.study_pruner import StudyPruner

__all__ = ["Decision", "StudyPruner"]
