"""Configurations that somebody gives: an objective's default, the rows of a file; and the trials that run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.errors import ObjectiveError, users_code
from hpsearch.objectives.search_space import Given, NotInSpaceError
from hpsearch.storage.attributes import ORIGIN


def default_params(objective: BaseObjective) -> dict[str, Any] | None:
    """Return the parameters of the objective's `defaults`, and the middle of those that it does not name.

    Returns:
        None where the objective gives no default.

    Raises:
        ObjectiveError: the search space does not have it.
    """
    if not objective.defaults:
        return None
    space = Given(objective.defaults)
    try:
        asked_for(objective, space)
    except NotInSpaceError as error:
        raise ObjectiveError(
            f"{type(objective).__name__}.defaults: {error}; mend it, or run with --no-default-first"
        ) from None
    return space.values


def asked_for(objective: BaseObjective, space: Given) -> dict[str, Any]:
    """Return what was given as the objective's search space has it.

    Raises:
        NotInSpaceError: it does not have it.
        ObjectiveError: `suggest` failed.
    """
    with users_code(f"{type(objective).__name__}.suggest"):
        objective.configure(space)
    space.require_all_taken(objective.name)
    return {name: space.values[name] for name in space.given}


def waiting_trial(params: Mapping[str, Any], origin: str) -> FrozenTrial:
    """Return a trial that is to run `params`, and what they leave open as the sampler has it.

    Args:
        params: some or all parameters.
        origin: who gave them, for a person to read.
    """
    system, user = {"fixed_params": dict(params)}, {ORIGIN: origin}
    return create_trial(state=TrialState.WAITING, system_attrs=system, user_attrs=user)
