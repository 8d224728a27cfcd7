"""The tensors of the folds of a trial as tensors with a leading dimension of folds, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.nn import functional

from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import Tree, leaves, map_tensors, tensors, unflatten_like
from hpsearch.objectives.training.evaluation.step import LossStep
from hpsearch.objectives.training.loop.epoch import set_training_mode
from hpsearch.objectives.training.loop.run import Run

Tensors = dict[str, Tensor]


class StepOutputs(NamedTuple):
    """StepOutputs [folds, ...] of the trained tensors, mean losses [folds] and outputs [folds, size, ...]."""

    gradients: list[Tensor]
    losses: Tensor
    outputs: Tree


class LossModule(nn.Module):
    """The model and the loss of a run as one module, from a batch to its mean loss and outputs."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        assert isinstance(run.step_function, LossStep)
        self.model, self.loss = run.model, run.step_function.loss
        self._step = run.step_function

    def forward(self, x: Tree, y: Tree, size: int) -> tuple[Tensor, Any]:
        """Return the mean loss, a scalar, and the outputs [size, ...]."""
        step = self._step(self.model, Batch(x, y, size))
        return step.loss, step.outputs


class StackedFolds:
    """Copies of the tensors of all folds, as tensors [folds, ...], and one gradient function for all folds.

    The tensors of a parameter group are views of one tensor [folds, values], so that one operation changes all of them.

    The function is recorded once as a graph of plain tensor operations, because the dispatch of `vmap` would take
    longer than the operations of a small model.

    Args:
        runs: the runs of the folds.
        batches: one batch of each fold, of equal shapes.

    Raises:
        Exception: PyTorch cannot vectorize or record the model or the loss, or the models differ in their structure.
    """

    def __init__(self, runs: Sequence[Run], batches: Sequence[Batch]) -> None:
        self.modules = [LossModule(run) for run in runs]
        parameters, buffers = stack_module_state(self.modules)
        self.constants = {name: tensor.detach() for name, tensor in (parameters | buffers).items()}
        names = {id(p): name for name, p in self.modules[0].named_parameters()}
        own_groups = [group["params"] for group in runs[0].optimizer.param_groups]
        self.groups = [{names[id(p)]: self.constants.pop(names[id(p)]) for p in own} for own in own_groups]
        self.flat = [flatten(group) for group in self.groups]
        self.groups = [unflatten(flat, group) for flat, group in zip(self.flat, self.groups, strict=True)]
        self.trained = {name: tensor for group in self.groups for name, tensor in group.items()}
        self.shapes = get_shapes(batches[0])
        set_training_mode(runs[0].model)
        self._compute = _vectorize_gradient(self.modules[0], batches[0].size)
        inputs = self.trained, self.constants, *self.stack(batches)
        recorded = make_fx(self._compute)(*inputs)
        self.is_complete = all(node.op != "get_attr" for node in recorded.graph.nodes)
        if self.is_complete:  # otherwise `compute` is not available
            self._outputs = _simplify(recorded, inputs).outputs
            self._recorded = _compile(recorded)

    def compute(self, x: Tree, y: Tree) -> StepOutputs:
        """Return the gradients for the inputs and targets [folds, size, ...] of a batch of each fold."""
        found, count = self._recorded(*(leaf for _, leaf in leaves((x, y)))), len(self.trained)
        return StepOutputs(found[:count], found[count], unflatten_like(self._outputs, iter(found[count + 1 :])))

    def compute_unrecorded(self, x: Tree, y: Tree) -> StepOutputs:
        """Return the result of `compute` without the recorded graph."""
        return self._compute(self.trained, self.constants, x, y)

    def stack(self, batches: Sequence[Batch]) -> tuple[Tree, Tree]:
        """Return the inputs and targets [folds, size, ...] of batches of equal shapes."""
        return _stack([batch.x for batch in batches]), _stack([batch.y for batch in batches])

    def bind(self) -> None:
        """Make the tensors of the folds' models views of the stacked tensors, so that they always have equal values."""
        for index, module in enumerate(self.modules):
            own = dict([*module.named_parameters(), *module.named_buffers()])
            for name, stacked in (self.trained | self.constants).items():
                own[name].data = stacked[index]


def _vectorize_gradient(module: LossModule, size: int) -> Callable[[Tensors, Tensors, Tree, Tree], StepOutputs]:
    """Return a function from the tensors `trained` and `constants` and batches of all folds to their gradients."""

    def compute_each(tensors: Tensors, x: Tree, y: Tree) -> tuple[Tensor, Any]:
        return cast("tuple[Tensor, Any]", functional_call(module, tensors, (x, y, size)))

    def compute_sum(trained: Tensors, constants: Tensors, x: Tree, y: Tree) -> tuple[Tensor, Any]:
        # The losses of the folds are independent, so that the gradient of their sum contains the gradient of each.
        losses, outputs = vmap(compute_each, randomness="different")({**trained, **constants}, x, y)
        if type(module.loss) is nn.CrossEntropyLoss and module.loss.weight is None and outputs.ndim == 3:
            losses = _compute_cross_entropy(module.loss, outputs, y)
        return losses.sum(), (losses, outputs)

    def compute_gradients(trained: Tensors, constants: Tensors, x: Tree, y: Tree) -> StepOutputs:
        gradients, (losses, outputs) = grad(compute_sum, has_aux=True)(trained, constants, x, y)
        return StepOutputs([gradients[name] for name in trained], losses, outputs)

    return compute_gradients


def _compute_cross_entropy(loss: nn.CrossEntropyLoss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy of each fold [folds] by one operation, instead of about 20 of `vmap`.

    Args:
        loss: loss without class weights.
        outputs: logits [folds, size, classes].
        y: classes [folds, size], none of which is ignored, or probabilities [folds, size, classes].
    """
    logits, targets = outputs.float().flatten(0, 1), y.flatten(0, 1)
    each = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=loss.label_smoothing)
    return each.view(outputs.shape[:2]).mean(dim=1)


def flatten(group: Tensors) -> Tensor:
    """Return tensors [folds, ...] as one tensor [folds, values]."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in group.values()], dim=1)


def unflatten(flat: Tensor, like: Tensors) -> Tensors:
    """Return views of `flat` [folds, values] with the shapes of the tensors in `like` [folds, ...]."""
    parts = torch.split(flat, [tensor[0].numel() for tensor in like.values()], dim=1)
    return {name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, like.items(), strict=True)}


def get_shapes(batch: Batch) -> list[torch.Size]:
    """Return the shapes of the tensors of a batch."""
    if isinstance(batch.x, Tensor) and isinstance(batch.y, Tensor):
        return [batch.x.shape, batch.y.shape]
    return [tensor.shape for _, tensor in tensors((batch.x, batch.y))]


def split_folds(tree: Tree, folds: int) -> Sequence[Tree]:
    """Return the parts of a tree of tensors [folds, ...] that belong to each fold."""
    if isinstance(tree, Tensor):
        return tree.unbind()
    return [map_tensors(lambda tensor: tensor[index], tree) for index in range(folds)]  # noqa: B023 called at once


def _stack(trees: Sequence[Tree]) -> Tree:
    if isinstance(trees[0], Tensor):
        return torch.stack(list(trees))
    columns = zip(*([tensor for _, tensor in tensors(tree)] for tree in trees), strict=True)
    return unflatten_like(trees[0], (torch.stack(column) for column in columns))


def _simplify(recorded: GraphModule, inputs: tuple[Tensors, Tensors, Tree, Tree]) -> StepOutputs:
    """Remove operations that return their input unchanged, repeated operations, and those with always equal results.

    The first two inputs become part of the graph. The values of the first ones, which are trained, change in each step,
    so that only views of them are always equal.

    Returns:
        The result for `inputs`.
    """
    aten, graph = torch.ops.aten, recorded.graph
    reshapes = {getattr(aten, name).default for name in ("detach", "expand", "permute", "view", "_unsafe_view")}
    interpreter = Interpreter(recorded, garbage_collect_values=False)
    result, values = cast("StepOutputs", interpreter.run(*inputs)), interpreter.env
    fixed = graph.find_nodes(op="placeholder")[: len(inputs[0]) + len(inputs[1])]
    changing = {*fixed[: len(inputs[0])]}
    seen: dict[tuple[Any, str, str], Node] = {}
    for node in _find_pure(recorded):
        target, own = cast("OpOverload[..., Any]", node.target), node.all_input_nodes
        same = seen.setdefault((target, repr(node.args), repr(node.kwargs)), node)
        if target in reshapes or (target is aten.mul.Scalar and node.args[1] == 1):
            before, after = ((each.shape, each.stride(), each.dtype) for each in (values[own[0]], values[node]))
            same = own[0] if before == after else same
        is_changing = not changing.isdisjoint(own)
        if same is not node:
            node.replace_all_uses_with(same)
        elif isinstance(values[node], Tensor) and (
            target is aten.ones_like.default or (set(own).issubset(fixed) and (target.is_view or not is_changing))
        ):
            fixed.append(node)
            # Not the value found above, which may be a view of a copy that an earlier node no longer makes.
            arguments: Any = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = target(*arguments[0], **arguments[1])
            if is_changing:
                changing.add(node)
    for node in fixed:
        setattr(recorded, f"fixed_{node.name}", values[node])
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.create_node("get_attr", f"fixed_{node.name}"))
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return result


def _compile(recorded: GraphModule) -> Callable[..., list[Any]]:
    """Return a function from the leaves of the inputs to those of the outputs, without PyTorch's Python code."""
    for node in recorded.graph.nodes:
        if isinstance(node.target, OpOverload):
            operation: Any = partial(node.target._op)
            operation.__name__, operation.__module__ = f"call_{node.name}", "recorded"  # in the generated code
            node.target = operation
    recorded.graph.set_codegen(CodeGen())
    recorded.recompile()
    return cast("Callable[..., list[Any]]", recorded.forward)


def _find_pure(recorded: GraphModule) -> list[Node]:
    """Return the operations that neither are random nor take part in a change of a tensor in place."""
    operations = {node: node.target for node in recorded.graph.nodes if isinstance(node.target, OpOverload)}
    left = [node for node, target in operations.items() if target._schema.is_mutable]
    changed: set[Node] = set()
    while left:
        if (node := left.pop()) not in changed:
            changed.add(node)
            left += node.all_input_nodes
    random = torch.Tag.nondeterministic_seeded
    return [node for node, target in operations.items() if node not in changed and random not in target.tags]
