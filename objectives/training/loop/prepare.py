"""An objective's data, made once in a process for each seed and found fit to train on."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.split_rows import Division, resplit
from hpsearch.objectives.training.data.splits import Splits, merge_train_val
from hpsearch.objectives.training.reproducibility.seeds import set_seed

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective

log = logging.getLogger("hpsearch.objectives.training")

# By objective, the last division's: a worker trains many trials on one split, and data may be all of the memory.
_PREPARED: WeakKeyDictionary[Objective, tuple[tuple[int, Division], Splits, str]] = WeakKeyDictionary()
_OWN: WeakKeyDictionary[Objective, _Own] = WeakKeyDictionary()  # which other divisions are compared with


def prepare_splits(objective: Objective, split_seed: int, division: Division = None) -> tuple[Splits, str]:
    """The objective's data, found fit to train on, and their hash.

    `data()` is called once in a process for a seed, unless the objective's code changed what it gave in place; for
    another division once more, to see that the test split stays what it is.

    Args:
        objective: whose data.
        split_seed: of the study.
        division: seed by which train and validation are divided anew, where `data()` lets `Splits.make` divide, and
            the test split stays; "all" for a refit, where the validation samples are trained on as well; the study's
            own division unless given.

    Raises:
        ObjectiveError: the data are wrong.
    """
    key = split_seed, division
    kept = _PREPARED.get(objective)
    if kept is not None and kept[0] == key and kept[1].hash() == kept[2]:
        return kept[1:]
    own = None if division is None else _own_parts(objective, split_seed)
    splits = _made(objective, split_seed, division)
    if own is not None and own.test != (digest := _samples(splits.test, splits.hash_of("test"), by_labels=True)):
        changes = f"the test split is {digest[:12]}, and {own.test[:12]} in the study"
        remedy = "give the same test samples for one seed, and keep their rows: dataclasses.replace(part, x=...)"
        if division == "all":
            raise ObjectiveError(f"{type(objective).__name__}.data, train and validation joined: {changes}: {remedy}")
        log.warning("the study's own division is kept, for with another %s: %s", changes, remedy)
        splits = _made(objective, split_seed, None)
    _PREPARED[objective] = key, splits, (found := splits.hash())
    return splits, found


def is_resplit(objective: Objective, split_seed: int, splits: Splits) -> bool:
    """Whether the validation split is another than the study's: `data()` may give an official one."""
    return _samples(splits.val, splits.hash_of("validation")) != _own_parts(objective, split_seed).val


class _Own(NamedTuple):
    """What says which samples are the validation and the test split of the study's own division."""

    seed: int
    val: str
    test: str


def _own_parts(objective: Objective, split_seed: int) -> _Own:
    kept = _OWN.get(objective)
    if kept is None or kept.seed != split_seed:
        own = _made(objective, split_seed, None)
        parts = _samples(own.val, own.hash_of("validation")), _samples(own.test, own.hash_of("test"), by_labels=True)
        kept = _OWN[objective] = _Own(split_seed, *parts)
    return kept


def _samples(part: Dataset, contents: str, *, by_labels: bool = False) -> str:
    """Which samples a part has: by their rows where these are known, for `data()` may scale by what is trained on.

    Without rows by the contents, or by the labels alone: of one seed only `Splits.make` gives another division.
    """
    if part.rows is not None:
        contents = str(part.rows.tolist())
    elif by_labels and isinstance(part.y, Tensor) and not part.y.dtype.is_floating_point:
        contents = str(part.y.tolist())
    return hashlib.sha256(contents.encode()).hexdigest()


def _made(objective: Objective, split_seed: int, division: Division) -> Splits:
    who = type(objective).__name__
    set_seed(split_seed, "data")  # so that data() is a function of the seed even where it uses a global generator
    with wrap_user_errors(f"{who}.data"), resplit(division) as wanted:
        splits = objective.data(split_seed)
    if not isinstance(splits, Splits):
        raise ObjectiveError(f"{who}.data must return Splits, not {type(splits).__name__}")
    try:
        if division == "all":
            splits = merge_train_val(splits, by_make=wanted.joined)
        splits.check(joined=division == "all")
    except ObjectiveError as error:
        raise ObjectiveError(f"{who}.data: {error}") from error
    return splits
