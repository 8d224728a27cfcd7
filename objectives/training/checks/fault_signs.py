"""Signs of faults in a model, its step or its metrics, which a falling loss does not rule out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.checks.evaluation_signs import (
    compute_evaluation_loss,
    find_active_dropout,
    find_dependence_on_inputs,
    find_evaluation_gap,
    find_visible_targets,
)
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.tree import index_rows
from hpsearch.objectives.training.evaluation.evaluate import as_floats, evaluation_mode
from hpsearch.objectives.training.evaluation.metrics import BINARY, CLASSIFICATION
from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reproducibility.seeds import set_seed
from hpsearch.short_lists import join_first

_IDEAL_VALUES = {**dict.fromkeys((*CLASSIFICATION, *BINARY, "r2"), 1.0), "rmse": 0.0, "mae": 0.0}
_MORE_BATCHES = 8  # that are searched for a gradient
_MAX_NAMES = 3  # of parameters in a message


class FaultFinder:
    """Search for signs of faults, from the state before and after the steps of a smoke test on one batch.

    Args:
        objective: the objective of the run.
        run: the run, before the first step.
        batch: the batch that the run overfits.
        scores: validation metrics before the first step.
    """

    def __init__(self, objective: Objective, run: Run, batch: Batch, scores: Mapping[str, float]) -> None:
        self._objective, self._run, self._batch, self._scores = objective, run, batch, scores
        self._without_gradient = self._find_parameters_without_gradient()
        self._value = self._compute_metric()
        self._evaluated = self._evaluate_batch()
        self._evaluation_loss = compute_evaluation_loss(run, batch)

    def find(self, *, is_fitted: bool) -> tuple[str, ...]:
        """Return the signs after the last step, one sentence each; the metric counts only if the loss fell enough."""
        signs = (
            self._find_untrained_parameters(),
            self._find_unregistered_layers(),
            self._find_foreign_parameters(),
            find_dependence_on_inputs(self._run, self._batch),
            find_active_dropout(self._run, self._batch),
            find_visible_targets(self._run, self._batch),
            self._find_evaluate_fault(),
            self._find_augment_fault(),
        )
        signs_of_fitted = self._find_signs_of_fitted_batch() if is_fitted else ()
        return tuple(sign for sign in (*signs, *signs_of_fitted) if sign)

    def _find_signs_of_fitted_batch(self) -> tuple[str, ...]:
        return (
            self._find_metric_fault() or self._find_constant_metric(),
            find_evaluation_gap(self._run, self._batch, self._evaluation_loss, self._objective.loss_floor),
        )

    def _find_parameters_without_gradient(self) -> set[str]:
        """Return the names of the parameters without a gradient for several batches, or with lr 0.

        A batch may not reach all layers: a mixture of experts, for example, sends no sample to some of its experts.
        """
        found = set(self._list_parameters_without_gradient(self._batch))
        train = self._run.splits.train
        generator = torch.Generator().manual_seed(self._run.plan.seed)
        for _ in range(_MORE_BATCHES if found and not train.is_stream else 0):
            rows = torch.randperm(len(train), generator=generator)[: self._batch.size]
            found &= set(self._list_parameters_without_gradient(train.batch(rows).to(self._run.device)))
        return found

    def _list_parameters_without_gradient(self, batch: Batch) -> Iterator[str]:
        run = self._run
        set_seed(run.plan.seed, "smoke", "step")
        run.model.zero_grad(set_to_none=True)
        run.step_function(run.model, batch, nullcontext()).loss.backward()  # type: ignore[no-untyped-call]  # torch's
        frozen = {id(p) for group in run.optimizer.param_groups if group["lr"] == 0 for p in group["params"]}
        for name, parameter in run.model.named_parameters():
            has_gradient = parameter.grad is not None and bool(parameter.grad.any())
            if parameter.requires_grad and (not has_gradient or id(parameter) in frozen):
                yield name
        run.model.zero_grad(set_to_none=True)

    def _find_untrained_parameters(self) -> str:
        # A gradient may be zero only at the start, for example behind weights that start at zero.
        untrained = [
            name for name in self._list_parameters_without_gradient(self._batch) if name in self._without_gradient
        ]
        if not untrained:
            return ""
        names = join_first(untrained, _MAX_NAMES)
        return f"the batch does not train {names}: the loss does not depend on them, or their lr is 0"

    def _find_unregistered_layers(self) -> str:
        known = {id(module) for module in self._run.model.modules()}
        for module in self._run.model.modules():
            for name, value in vars(module).items():
                members = list(value.values()) if isinstance(value, Mapping) else value
                if name.startswith("_") or not isinstance(members, (list, tuple)):
                    continue
                unregistered = [
                    member for member in members if isinstance(member, nn.Module) and id(member) not in known
                ]
                if any(parameter.requires_grad for member in unregistered for parameter in member.parameters()):
                    kind = "ModuleDict" if isinstance(value, Mapping) else "ModuleList"
                    return f"the layers in {type(module).__name__}.{name} are not trained or saved; use nn.{kind}"
        return ""

    def _find_foreign_parameters(self) -> str:
        """Find parameters of the loss, or of other modules, that are not parameters of the model."""
        run, seen = self._run, set[Any]()
        set_seed(run.plan.seed, "smoke", "step")
        nodes: list[Any] = [run.step_function(run.model, self._batch, nullcontext()).loss.grad_fn]
        while nodes:
            if (node := nodes.pop()) is not None and node not in seen:
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
        known = {id(parameter) for parameter in run.model.parameters()}
        leaves = [getattr(node, "variable", None) for node in seen]
        foreign = [list(leaf.shape) for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in known]
        if not foreign:
            return ""
        return (
            f"the loss depends on a parameter outside of the model (shape {foreign[0]}), which would not be trained or "
            "saved; make its module a part of the model, or freeze it by requires_grad_(False)"
        )

    @torch.no_grad()
    def _compute_metric(self) -> float | None:
        """Return the metric of the batch in training mode; None if the metric is undefined for one batch."""
        run, metric = self._run, self._objective.metric
        if metric == "loss":
            return None
        running = RunningMetrics(run.metrics)
        set_seed(run.plan.seed, "smoke", "step")
        running.add(run.step_function(run.model, self._batch, nullcontext()), self._batch.size)
        try:
            found = running.compute()
            return as_floats({metric: found[metric]})[metric] if metric in found else None
        except Exception:  # of the user's metrics, which may need other samples
            return None

    def _find_metric_fault(self) -> str:
        before, after = self._value, self._compute_metric()
        if before is None or after is None or math.isnan(before) or math.isnan(after):
            return ""
        if (after > before) if self._objective.direction == "maximize" else (after < before):
            return ""
        ideal = {_IDEAL_VALUES.get(self._objective.metric), *self._objective.bounds}
        if after == before and before in ideal:  # such as a batch with a single class
            return ""
        name, direction = self._objective.metric, self._objective.direction
        return f"{name} of the batch ({direction}) was {before:.4g} and is {after:.4g}, although the loss fell"

    def _evaluate_batch(self) -> list[float]:
        """Return the metric from `Objective.evaluate` for the batch, a half and a quarter of it; empty if undefined."""
        evaluate, x, y = self._run.evaluate_part, self._batch.x, self._batch.y
        if evaluate is None or not self._run.splits.train.in_memory:
            return []
        found = []
        for size in (self._batch.size, self._batch.size // 2, self._batch.size // 4):
            try:
                with evaluation_mode(self._run.model, self._run.device, "evaluation"):
                    part = Dataset(index_rows(x, slice(size)), index_rows(y, slice(size)))
                    found.append(evaluate(self._run.model, part)[self._objective.metric])
            except Exception:  # of the user's code, which may need other samples; or another method has the metric
                break
        return found

    def _find_evaluate_fault(self) -> str:
        """Judge the metrics of an objective with `evaluate` for the validation split."""
        if self._run.evaluate_part is None:
            return ""
        after = self._run.validate()
        if lost := [name for name in self._scores if name not in after]:
            return f"metric {lost[0]!r} is missing after training"
        for name, value in after.items():
            if name != "loss" and not math.isfinite(value):
                return f"metric {name!r} of the validation split is {value} after training"
        return ""

    def _find_constant_metric(self) -> str:
        before, after, name = self._evaluated, self._evaluate_batch(), self._objective.metric
        if not before or not after or before[0] in self._objective.bounds:
            return ""
        if before[0] == after[0]:
            shown = f"{name} {before[0]:.4g}"
            return f"evaluate() returned {shown} for the batch before and after training, although the loss fell"
        has_parts = len(before) == len(after) == 3
        is_whole = before[0].is_integer() or after[0].is_integer()  # such as an accuracy of 1.0
        if has_parts and not is_whole and len({*before, self._scores[name]}) == 1 and len(set(after)) == 1:
            return f"evaluate() returned {name} {before[0]:.4g} for different samples: it does not use part"
        return ""

    def _find_augment_fault(self) -> str:
        augment = self._objective.augment(self._run.config)
        if augment is None or not isinstance(self._batch.x, Tensor) or not self._batch.x.is_floating_point():
            return ""
        before, after = self._batch.x, augment(self._batch.x.clone())
        if not isinstance(after, Tensor) or not len(after):
            return ""
        if not bool(after.isfinite().all()) and bool(before.isfinite().all()):
            return "augment() makes inputs that are NaN or infinite"
        if bool((after == after[:1]).all()) and not bool((before == before[:1]).all()):
            return "augment() makes all inputs equal"
        return ""
