"""The held-out test split, opened on purpose and by nothing else; and the best weights of a run, judged again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpsearch.kill_points import kill_point
from hpsearch.objectives.errors import ObjectiveError, users_code
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.evaluate import evaluate, evaluation_rows
from hpsearch.objectives.training.evaluation.metrics import as_metrics
from hpsearch.objectives.training.evaluation.step import Call, Stepping
from hpsearch.objectives.training.exportable import example_of, exportable
from hpsearch.objectives.training.loop.prepared import prepared_splits
from hpsearch.objectives.training.loop.stepping import build_stepping, call_in
from hpsearch.objectives.training.reproducibility.seeds import reproducible, set_seed
from hpsearch.objectives.training.result import Exported

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective


@dataclass(frozen=True)
class Restored:
    """The model of a run with its best weights, on the CPU, and the run's splits."""

    objective: Objective
    config: TrainConfig
    splits: Splits
    model: nn.Module

    def validate(self) -> dict[str, float]:
        """Loss and metrics on the validation split, which the run has seen."""
        return self._score(self.splits.val)

    @kill_point("evaluate test set")
    def test(self) -> dict[str, float]:
        """Loss and metrics on the test split: what is seen once cannot be unseen."""
        return self._score(self.splits.test)

    def exported(self) -> Exported:
        """Return the model in the form in which it is served."""
        example = example_of(self.splits.val)
        return Exported(*exportable(self.model, self.call, example.x), example.free)

    @property
    def call(self) -> Call:
        """How the model is called with a batch of inputs."""
        return call_in(self._stepping)

    @property
    def _stepping(self) -> Stepping:
        return build_stepping(self.objective, self.config, self.splits, self.model, torch.device("cpu"))

    def _score(self, split: Dataset) -> dict[str, float]:
        with reproducible(deterministic=self.config.deterministic), torch.random.fork_rng():
            return evaluate(
                self.model,
                split,
                self._stepping,
                as_metrics(self.objective.metrics(self.splits.train), self.objective.metric),
                batch_size=evaluation_rows(self.config),
                device="cpu",
                num_workers=self.config.num_workers or 0,
            )


def restore_best(objective: Objective, best: Mapping[str, Any]) -> Restored:
    """Load the weights of a `best.pt` into the objective's model.

    Raises:
        ObjectiveError: the objective's data have changed since the run, or the weights do not fit its model.
    """
    config = TrainConfig.from_dict(best["config"])
    split_seed = best["split_seed"]
    with reproducible(deterministic=config.deterministic), torch.random.fork_rng():
        splits, split_hash = prepared_splits(objective, split_seed, "all" if "refit" in best else None)
        if split_hash != best["split_hash"]:
            raise ObjectiveError(
                f"{objective.name}: data({split_seed}) has changed since the run: what it scored cannot be judged again"
            )
        set_seed(best["seed"], "init")
        with users_code(f"{type(objective).__name__}.model"):
            model = objective.model(config, splits.train)
    try:
        model.load_state_dict(best["model"])
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:200]
        raise ObjectiveError(f"{objective.name}: the weights do not fit the model of today's code: {detail}") from error
    return Restored(objective, config, splits, model.eval())
