"""What was kept of the best epoch of an own loop, to be tested or exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest, users_code
from hpsearch.objectives.own_loop.loop_objective import FunctionObjective, LoopObjective
from hpsearch.objectives.training.reproducibility.seeds import reproducible, set_seed


@dataclass(frozen=True)
class RestoredLoop:
    """The best of an own loop, beside the objective that knows what to do with it."""

    objective: LoopObjective
    config: Any
    best: Any
    seed: int
    split_seed: int

    def test(self) -> dict[str, float]:
        """Scores on the test set, by the objective's own `test`: what is seen once cannot be unseen."""
        objective, who = self.objective, type(self.objective).__name__
        with users_code(f"{who}.test"), reproducible(deterministic=False):
            set_seed(self.seed, "test")
            found = objective.test(self.best, self.config, torch.device("cpu"), self.split_seed)
            scores = {str(name): float(value) for name, value in found.items()}
        if objective.metric not in scores:
            hint = nearest(objective.metric, list(scores))
            raise MetricError(objective.metric, f"is none that {who}.test gives: {hint}")
        return scores


def restore_loop(objective: LoopObjective, best: Mapping[str, Any]) -> RestoredLoop:
    """What a `best.pt` holds, ready to be tested.

    Raises:
        ObjectiveError: the objective has no `test`.
    """
    if isinstance(objective, FunctionObjective):
        raise ObjectiveError(
            f"{objective.name} is a function, which has no test(): make it the run() of a LoopObjective with a test()"
        )
    if not objective.defines("test"):
        raise ObjectiveError(f"{objective.name} has no test(): define it to score the best of a search on the test set")
    config = config_of(objective, best["config"])
    return RestoredLoop(objective, config, best["model"], best["seed"], best["split_seed"])


def config_of(objective: LoopObjective, values: Mapping[str, Any]) -> Any:
    """A configuration from its plain values, in the class that the objective gives it."""
    made: Any = type(objective.default_config())
    in_class = dataclasses.is_dataclass(made)
    return made(**values) if in_class else dict(values)
