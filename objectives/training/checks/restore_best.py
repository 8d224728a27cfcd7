"""Restore the best weights of a run, and evaluate them on the validation or the held-out test split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpsearch.kill_points import kill_point
from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.ensemble import Ensemble
from hpsearch.objectives.training.evaluation.evaluate import evaluate, get_eval_batch_size
from hpsearch.objectives.training.evaluation.metrics import as_metrics
from hpsearch.objectives.training.evaluation.step import ForwardCall, StepFunction
from hpsearch.objectives.training.loop.prepare import prepare_folds, prepare_splits
from hpsearch.objectives.training.loop.step_functions import (
    bind_export,
    bind_part_evaluator,
    build_step_function,
    get_forward_call,
)
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible, set_seed
from hpsearch.objectives.training.result import ExportableModel
from hpsearch.objectives.training.serving_module import build_example, make_exportable

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective


@dataclass(frozen=True)
class RestoredModel:
    """Model of a run with its best weights, on the CPU, and the splits of the run.

    The model of a cross-validation is the `Ensemble` of its folds. Each fold is a `RestoredModel` too, and `splits` are
    those of the first fold.
    """

    objective: Objective
    config: TrainConfig
    splits: Splits
    model: nn.Module
    folds: Sequence[RestoredModel] = ()

    def validate(self) -> dict[str, float]:
        """Return loss and metrics on the validation split, on which the run selected its best epoch.

        For a cross-validation, these are the means over the folds, each of which is validated on its own samples.
        """
        if not self.folds:
            return self._score(self.splits.val)
        scores = [fold.validate() for fold in self.folds]
        return {name: fmean(score[name] for score in scores) for name in scores[0]}

    @kill_point("evaluate test set")
    def test(self) -> dict[str, float]:
        """Return loss and metrics on the test split. Call this method only once per study."""
        return self._score(self.splits.test)

    def exportable_model(self) -> ExportableModel:
        """Return the model in the form in which it is served."""
        if (export := bind_export(self.objective, self.config)) is not None:
            return export(self.model)
        example = build_example(self.splits.val)
        return ExportableModel(*make_exportable(self.model, self.call, example.x), example.dynamic_dims)

    @property
    def call(self) -> ForwardCall:
        """Function that calls the model with a batch of inputs."""
        return get_forward_call(self._step_function)

    @property
    def _step_function(self) -> StepFunction:
        return build_step_function(self.objective, self.config, self.splits, self.model, torch.device("cpu"))

    def _score(self, split: Dataset) -> dict[str, float]:
        with make_reproducible(deterministic=self.config.deterministic), torch.random.fork_rng():
            return evaluate(
                self.model,
                split,
                self._step_function,
                as_metrics(self.objective.metrics(self.splits.train), self.objective.metric),
                batch_size=get_eval_batch_size(self.config),
                device="cpu",
                num_workers=self.config.num_workers or 0,
                evaluate_part=bind_part_evaluator(self.objective, self.config),
            )


def restore_best(objective: Objective, best: Mapping[str, Any]) -> RestoredModel:
    """Load the weights of a `best.pt` into the objective's model.

    Raises:
        ObjectiveError: the objective's data has changed since the run, or the weights do not fit its model.
    """
    config = TrainConfig.from_dict(best["config"])
    split_seed = best["split_seed"]
    with make_reproducible(deterministic=config.deterministic), torch.random.fork_rng():
        if "folds" in best:
            parts, split_hash = prepare_folds(objective, split_seed, best["folds"])
        else:
            splits, split_hash = prepare_splits(objective, split_seed, "all" if "refit" in best else None)
            parts = [splits]
        if split_hash != best["split_hash"]:
            raise ObjectiveError(f"{objective.name}: data({split_seed}) has changed since training; restore the data")
        set_seed(best["seed"], "init")
        with wrap_user_errors(f"{type(objective).__name__}.model"):
            models = [objective.model(config, splits.train) for splits in parts]
    model = Ensemble(models) if "folds" in best else models[0]
    try:
        model.load_state_dict(best["model"])
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:200]
        raise ObjectiveError(f"{objective.name}: the saved weights do not fit the current model ({detail})") from error
    model.eval()
    restored = [RestoredModel(objective, config, splits, own) for splits, own in zip(parts, models, strict=True)]
    return RestoredModel(objective, config, parts[0], model, restored) if "folds" in best else restored[0]
