"""An objective's data, made once in a process for each seed and found fit to train on."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from objectives.errors import ObjectiveError, users_code
from objectives.training.data.dataset import Splits
from objectives.training.reproducibility.seeds import set_seed

if TYPE_CHECKING:
    from objectives.objective import Objective

# By objective, the last seed's: a worker trains many trials on one split, and data may be all of the memory.
_PREPARED: WeakKeyDictionary[Objective, tuple[int, Splits, str]] = WeakKeyDictionary()


def prepared_splits(objective: Objective, split_seed: int) -> tuple[Splits, str]:
    """The objective's data, found fit to train on, and their hash.

    `data()` is called once in a process for a seed, unless the objective's code changed what it gave in place.

    Raises:
        ObjectiveError: the data are wrong.
    """
    kept = _PREPARED.get(objective)
    if kept is not None and kept[0] == split_seed and kept[1].hash() == kept[2]:
        return kept[1:]
    splits = _made(objective, split_seed)
    _PREPARED[objective] = split_seed, splits, (found := splits.hash())
    return splits, found


def _made(objective: Objective, split_seed: int) -> Splits:
    who = type(objective).__name__
    set_seed(split_seed, "data")  # so that data() is a function of the seed even where it uses a global generator
    with users_code(f"{who}.data"):
        splits = objective.data(split_seed)
    if not isinstance(splits, Splits):
        raise ObjectiveError(f"{who}.data must return Splits, not {type(splits).__name__}")
    try:
        splits.check()
    except ObjectiveError as error:
        raise ObjectiveError(f"{who}.data: {error}") from error
    return splits
