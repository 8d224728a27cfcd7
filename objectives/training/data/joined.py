"""Train and validation as one, for a refit: where `data()` gives parts of its own, which `Splits.make` did not join."""

from __future__ import annotations

from dataclasses import replace

import torch

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.tree import Tree, form, refilled, tensors


def joined(splits: Splits, *, by_make: bool) -> Splits:
    """The splits with the validation samples among those that are trained on.

    Args:
        splits: as `data()` gave them.
        by_make: whether `Splits.make` joined them for it. They stay as they are then, for it may have filtered them;
            but where it has divided the joined ones once more, by itself.

    Raises:
        ObjectiveError: they cannot be joined.
    """
    if by_make and not _apart(splits.train, splits.val):
        return splits
    return replace(splits, train=_both(splits.train, splits.val))


def _apart(train: Dataset, val: Dataset) -> bool:
    """Whether it is known that no validation sample is trained on."""
    if train.rows is None or val.rows is None:
        return False
    return not bool(torch.isin(val.rows, train.rows).any())


def _both(train: Dataset, val: Dataset) -> Dataset:
    if not (train.in_memory and val.in_memory):
        raise ObjectiveError(
            "a refit is trained on train and validation, and these parts do not lie in tensors, so that they cannot be "
            "joined: let Splits.make() divide the data, or give parts in tensors"
        )
    for what, one, other in (("x", train.x, val.x), ("y", train.y, val.y)):
        if form(one) != form(other):
            raise ObjectiveError(f"a refit cannot join train and validation: {what} is {form(one)} and {form(other)}")
    rows = None if train.rows is None or val.rows is None else torch.cat([train.rows, val.rows])
    return replace(train, x=_cat(train.x, val.x), y=_cat(train.y, val.y), rows=rows)


def _cat(one: Tree, other: Tree) -> Tree:
    """The samples of two trees of one form, one after the other."""
    pairs = zip(tensors(one), tensors(other), strict=True)
    return refilled(one, (torch.cat([first, second]) for (_, first), (_, second) in pairs))
