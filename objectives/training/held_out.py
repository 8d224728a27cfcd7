"""The held-out test split, opened on purpose and by nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from objectives.errors import ObjectiveError
from objectives.training.build import checked_splits
from objectives.training.evaluate import evaluate
from objectives.training.reproducibility import reproducible
from objectives.training.result import FitResult

if TYPE_CHECKING:
    from objectives.objective import Objective
    from objectives.training.config import TrainConfig


def score_test(objective: Objective, config: TrainConfig, result: FitResult, *, split_seed: int) -> dict[str, float]:
    """Loss and metrics of a result's best weights on the test split, on the CPU.

    Raises:
        ObjectiveError: the objective does not give the data that the run was trained on.
    """
    with reproducible(deterministic=config.deterministic), torch.random.fork_rng():
        splits = checked_splits(objective, split_seed)
    if splits.hash() != result.split_hash:
        raise ObjectiveError(f"{objective.name}: data({split_seed}) has changed since the run: its test is no test")
    return evaluate(
        result.model,
        splits.test,
        objective.loss(config, splits.train),
        objective.metrics(splits.train),
        batch_size=config.eval_batch_size or 256,
        device="cpu",
        num_workers=config.num_workers or 0,
    )
