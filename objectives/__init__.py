"""What a trial does: the training loop and the objectives that use it."""

from objectives.errors import ObjectiveError
from objectives.loading import BUILTIN, load_objective, objective_reference, source_hash
from objectives.objective import Objective

__all__ = ["BUILTIN", "Objective", "ObjectiveError", "load_objective", "objective_reference", "source_hash"]
