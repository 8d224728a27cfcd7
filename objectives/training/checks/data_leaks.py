"""Signs of leakage in the data of an objective, except those that the objective ignores."""

from __future__ import annotations

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.data.leakage import KINDS, find_leaks_once
from hpsearch.objectives.training.data.splits import Splits


def find_data_leaks(objective: Objective, splits: Splits, split_hash: str) -> dict[str, str]:
    """Return the signs of leakage in the splits of an objective, by kind, except those in `ignored_leaks`.

    Raises:
        ObjectiveError: all samples of a split are in another split, or `ignored_leaks` has an unknown kind.
    """
    owner = type(objective).__name__
    if unknown := sorted(set(objective.ignored_leaks) - set(KINDS)):
        raise ObjectiveError(f"{owner}.ignored_leaks has {unknown[0]!r}; choose from {', '.join(KINDS)}")
    leaks = find_leaks_once(splits, split_hash, allow_equal="shared_samples" in objective.ignored_leaks)
    return {kind: leak for kind, leak in leaks.items() if kind not in objective.ignored_leaks}
