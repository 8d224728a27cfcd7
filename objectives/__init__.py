"""What a trial does: the training loop and the objectives that use it."""

from objectives.base import BaseObjective
from objectives.errors import ObjectiveError
from objectives.loading import BUILTIN, load_objective, objective_reference, source_hash
from objectives.objective import Objective
from objectives.own_loop.loop_objective import LoopObjective

__all__ = [
    "BUILTIN",
    "BaseObjective",
    "LoopObjective",
    "Objective",
    "ObjectiveError",
    "load_objective",
    "objective_reference",
    "source_hash",
]
