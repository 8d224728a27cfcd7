"""Pruning: a study's pruner asked about a trial, with what the storage knows of the others."""

from hpsearch.search.pruners.decision import Decision
from hpsearch.search.pruning.study_pruner import StudyPruner, study_rungs

__all__ = ["Decision", "StudyPruner", "study_rungs"]
