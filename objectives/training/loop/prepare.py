"""Prepare an objective's data: call `data()` once per process and seed, and check the result."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.data.resplit import ResplitSeed, request_split
from hpsearch.objectives.training.data.splits import Splits, merge_train_val
from hpsearch.objectives.training.reproducibility.seeds import set_seed, use_one_thread

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective

log = logging.getLogger("hpsearch.objectives.training")

# Per objective (a dataclass has no hash), only the last split, or its folds: a worker trains many trials on one split,
# and two may not fit in memory.
_PREPARED: MutableMapping[Objective, dict[_SplitKey, tuple[Splits, str]]] = WeakIdKeyDictionary()
_STUDY_SPLITS: MutableMapping[Objective, _StudySplit] = WeakIdKeyDictionary()  # for comparisons with other splits


class _SplitKey(NamedTuple):
    split_seed: int
    resplit_seed: ResplitSeed
    fold: Fold | None


def prepare_splits(
    objective: Objective, split_seed: int, resplit_seed: ResplitSeed = None, fold: Fold | None = None
) -> tuple[Splits, str]:
    """Return the objective's data after checks, and their hash.

    `data()` is called once per process and seed, and again only if the objective's code has changed the result in
    place. For a split other than the study's, `data()` is also called for the study's split, to check that the test
    split does not change.

    Args:
        objective: objective whose `data` is called.
        split_seed: seed of the study's split.
        resplit_seed: the split: None for the study's; a seed for a new train/validation split with an unchanged test
            split (the study's split if `data()` does not use `Splits.make`); "all" for a refit, which also trains on
            the validation samples.
        fold: fold of the training and validation samples, which `resplit_seed` or else `split_seed` divides.

    Raises:
        ObjectiveError: `data()` raised an error, a check failed, or the data cannot be divided into folds.
    """
    key = _SplitKey(split_seed, resplit_seed, fold)
    kept = _PREPARED.setdefault(objective, {})
    if key in kept and kept[key][0].hash() == kept[key][1]:
        return kept[key]
    for other in [other for other in kept if fold is None or other.fold is None or other[:2] != key[:2]]:
        del kept[other]
    own = None if resplit_seed is None and fold is None else _get_study_split(objective, split_seed)
    splits = _call_data(objective, split_seed, resplit_seed, fold)
    if own is not None and own.test != (digest := _digest_samples(splits.test, splits.hash_of("test"), by_labels=True)):
        change = f"changes the test split from {own.test[:12]} to {digest[:12]}"
        remedy = "return the same test samples for a seed; change a split with dataclasses.replace(split, x=...)"
        if resplit_seed == "all" or fold is not None:
            what = "joining train and validation" if fold is None else "a fold"
            raise ObjectiveError(f"{type(objective).__name__}.data: {what} {change}; {remedy}")
        log.warning("using the study's split instead of a new one, because data() %s; %s", change, remedy)
        splits = _call_data(objective, split_seed, None)
    kept[key] = splits, splits.hash()
    return kept[key]


def prepare_folds(objective: Objective, split_seed: int, count: int) -> tuple[list[Splits], str]:
    """Return the splits of all folds of the study's training and validation samples, and one hash of them.

    Raises:
        ObjectiveError: see `prepare_splits`; or the test inputs differ between folds.
    """
    prepared = [prepare_splits(objective, split_seed, None, Fold(index, count)) for index in range(count)]
    if len({splits.hash_of("test") for splits, _ in prepared}) > 1:
        raise ObjectiveError(
            f"{type(objective).__name__}.data: the test samples differ between folds, because data() transforms them "
            "by statistics of the training samples; transform them in model(), as with Standardize.fit(train.x)"
        )
    return [splits for splits, _ in prepared], combine_hashes([found for _, found in prepared])


def combine_hashes(hashes: Sequence[str]) -> str:
    """Return one SHA-256 of several."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def is_resplit(objective: Objective, split_seed: int, splits: Splits) -> bool:
    """Return whether the validation split differs from the study's; False if `data()` returns a fixed split."""
    return _digest_samples(splits.val, splits.hash_of("validation")) != _get_study_split(objective, split_seed).val


class _StudySplit(NamedTuple):
    """Digests of the samples in the validation and test splits of the study."""

    seed: int
    val: str
    test: str


def _get_study_split(objective: Objective, split_seed: int) -> _StudySplit:
    kept = _STUDY_SPLITS.get(objective)
    if kept is None or kept.seed != split_seed:
        own = _call_data(objective, split_seed, None)
        val = _digest_samples(own.val, own.hash_of("validation"))
        test = _digest_samples(own.test, own.hash_of("test"), by_labels=True)
        kept = _STUDY_SPLITS[objective] = _StudySplit(split_seed, val, test)
    return kept


def _digest_samples(part: Dataset, contents: str, *, by_labels: bool = False) -> str:
    """Return a digest that identifies the samples of a split, from its rows if known, else from labels or contents.

    Rows are preferred because `data()` may scale the contents by statistics of the training split.
    """
    if part.rows is not None:
        contents = str(part.rows.tolist())
    elif by_labels and isinstance(part.y, Tensor) and not part.y.dtype.is_floating_point:
        contents = str(part.y.tolist())
    return hashlib.sha256(contents.encode()).hexdigest()


def _call_data(objective: Objective, split_seed: int, resplit_seed: ResplitSeed, fold: Fold | None = None) -> Splits:
    owner = type(objective).__name__
    set_seed(split_seed, "data")  # data() may use the global generators
    fold_seed = resplit_seed if isinstance(resplit_seed, int) else split_seed
    with (
        wrap_user_errors(f"{owner}.data"),
        request_split(resplit_seed, fold, fold_seed) as request,
        use_one_thread(),  # the last digits, and so the hash of the data, depend on the number of threads
    ):
        splits = objective.data(split_seed)
    if fold is not None and not request.has_divided:
        raise ObjectiveError(
            f"{owner}.data did not call Splits.make(), or has a cache of its result, so the samples cannot be divided "
            "into folds; call Splits.make() in each call of data(), or remove --folds"
        )
    if not isinstance(splits, Splits):
        raise ObjectiveError(f"{owner}.data must return Splits, not {type(splits).__name__}")
    try:
        if resplit_seed == "all":
            splits = merge_train_val(splits, by_make=request.has_merged)
        splits.check(joined=resplit_seed == "all")
    except ObjectiveError as error:
        raise ObjectiveError(f"{owner}.data: {error}") from error
    return splits
