"""Check which settings can change during a training, as population-based training changes them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hpsearch.objectives.errors import ObjectiveError, get_first_line
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import EpochSums, set_training_mode
from hpsearch.objectives.training.loop.guards import NonFiniteError
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.step_functions import get_forward_call
from hpsearch.objectives.training.reproducibility.seeds import set_seed

_SAMPLES = 8  # validation samples whose outputs are compared


class InFlightCheck:
    """Check of changes of one configuration, on the CPU, with one optimizer step per configuration.

    Args:
        objective: objective of the study.
        config: configuration before the change.
        plan: epochs and seeds of a run.
    """

    def __init__(self, objective: Objective, config: TrainConfig, plan: RunPlan) -> None:
        self._objective, self._plan = objective, plan
        self._before = self._train_one_step(config)

    def find_obstacle(self, config: TrainConfig) -> str | None:
        """Return why a training cannot continue with another configuration; None if it can.

        The model and the optimizer must keep the names, shapes and types of their state, and in evaluation mode the
        model must return the same outputs for the same weights.
        """
        before = self._before
        try:
            after = self._train_one_step(config)
        except (ObjectiveError, NonFiniteError) as error:
            return get_first_line(error)
        if _describe(before.model.state_dict()) != _describe(after.model.state_dict()):
            return "it changes the names or shapes of the model's weights"
        if _describe(before.optimizer.state_dict()) != _describe(after.optimizer.state_dict()):
            return "it changes the state of the optimizer"
        try:
            after.load_state_dict(before.state_dict(), is_other_config=True)
        except (RuntimeError, ValueError, KeyError) as error:
            return get_first_line(error)
        outputs = zip(_predict(before), _predict(after), strict=True)
        if not all(torch.equal(one, other) for one, other in outputs):
            return "it changes the outputs of the model for the same weights"
        return None

    def _train_one_step(self, config: TrainConfig) -> Run:
        run, _ = build_run(self._objective, config, self._plan, device=torch.device("cpu"))
        set_seed(self._plan.seed, "epoch", 0)
        self._objective.on_epoch(run.model, 0, config)
        set_training_mode(run.model)
        run.strategy.begin_epoch()
        EpochSums(run).step(run, next(iter(run.batch_source.iterate_steps(0))), 0)
        return run


@torch.no_grad()
def _predict(run: Run) -> list[torch.Tensor]:
    set_seed(run.plan.seed, "outputs")
    inputs = run.splits.val.inputs(slice(0, _SAMPLES))
    run.model.eval()
    outputs = get_forward_call(run.step_function)(run.model, inputs)
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _describe(state: Any) -> Any:
    """Return the structure of a state: names, shapes and types of tensors, without other values."""
    if isinstance(state, torch.Tensor):
        return tuple(state.shape), state.dtype
    if isinstance(state, dict):
        return {key: _describe(value) for key, value in state.items()}
    return [_describe(value) for value in state] if isinstance(state, list | tuple) else type(state)
