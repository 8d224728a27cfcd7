"""Going on where a run was left."""

from __future__ import annotations

from typing import Any

from objectives.errors import ObjectiveError
from objectives.training.loop.run import FORMAT, WITHIN, Run
from objectives.training.reproducibility.environment import differences


def restore(run: Run, state: dict[str, Any]) -> None:
    """Puts a checkpoint's state into a run that was built anew.

    Raises:
        ObjectiveError: the checkpoint is of another run, or the objective's code has changed since.
    """
    if state.get("format") == WITHIN:
        state = {**state, "format": FORMAT}
    require_same({key: state.get(key) for key in run.identity}, run.identity)
    try:
        run.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        detail = str(error).strip().splitlines()[0]
        raise ObjectiveError(f"the checkpoint does not fit the objective's code of today: {detail}") from error
    changed = differences(state["environment"], run.environment)
    if changed:
        run.notes.append(f"not exact after epoch {run.progress.next_epoch}: {changed}")


def require_same(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses a checkpoint of another run.

    Raises:
        ObjectiveError: it says what differs.
    """
    for key, value in now.items():
        other = then.get(key)
        if other == value:
            continue
        if key == "config" and isinstance(other, dict):
            require_same(other, value)
        raise ObjectiveError(f"the checkpoint is of another run: {key} is {other!r} there and {value!r} here")
