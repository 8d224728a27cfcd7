"""Going on where a run was left."""

from __future__ import annotations

from typing import Any

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.loop.epoch import EpochSums
from hpsearch.objectives.training.loop.run import FORMAT, WITHIN, Run
from hpsearch.objectives.training.reproducibility.environment import differences
from hpsearch.objectives.training.reproducibility.seeds import restore_generators, set_seed


def restore(run: Run, state: dict[str, Any]) -> None:
    """Puts a checkpoint's state into a run that was built anew.

    Raises:
        ObjectiveError: the checkpoint is of another run, or the objective's code has changed since.
    """
    if state.get("format") == WITHIN:
        state = {**state, "format": FORMAT}
    then = {key: state.get(key) for key in run.identity}
    if isinstance(then["config"], dict):  # a setting that is newer than the checkpoint had its default
        then["config"] = TrainConfig.from_dict(then["config"]).to_dict()
    require_same(then, run.identity)
    try:
        run.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        detail = str(error).strip().splitlines()[0]
        raise ObjectiveError(f"the checkpoint does not fit the objective's code of today: {detail}") from error
    changed = differences(state["environment"], run.environment)
    if changed:
        run.notes.append(f"not exact after epoch {run.progress.next_epoch}: {changed}")


def resume_within(run: Run, within: dict[str, Any], sums: EpochSums, epoch: int) -> None:
    """Goes on in the midst of an epoch: with what its steps came to, and the generators.

    On as many ranks as before each goes on with its own. On others the metrics of training count the steps from here
    on, and what is drawn at random is drawn anew.
    """
    then, ranks = within.get("ranks"), run.ranks
    if len(then or [within]) == ranks.world:
        own = then[ranks.rank] if then else {"running": within["sums"]["running"], "generators": within["generators"]}
        sums.load_state_dict({**within["sums"], "running": own["running"]})
        restore_generators(own["generators"], run.device)
        return
    sums.load_state_dict({**within["sums"], "running": None})
    set_seed(run.seed, "epoch", epoch, "from", sums.steps, *ranks.purpose())
    run.notes.append(
        f"train metrics of epoch {epoch + 1} but its loss are of the steps after {sums.steps}: it went on on "
        f"{ranks.world} in place of {len(then or [within])} devices"
    )


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
