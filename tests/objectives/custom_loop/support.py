"""A custom loop on ranks, stopped after an epoch and resumed in new processes."""

from hpsearch import load_objective
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from tests.objectives.training.ranks.support import on_ranks
from tests.objectives.training.support import Stopped, exact

EPOCHS = 3


def trained(ranks, objective, folder, after=None):
    """Return the status of a run on this rank, with its metrics."""
    objective = load_objective(objective) if isinstance(objective, str) else objective
    with ranks.fail_together():
        session = Stopped(folder, after) if ranks.is_rank_zero else None
        config = objective.default_config()
        result = fit(objective, config, RunPlan(EPOCHS, 7, 7), session=session, device="cpu")
    return result.status, exact(result.history)


def _whole_and_stopped(ranks, objective, folder):
    return trained(ranks, objective, folder / "whole"), trained(ranks, objective, folder / "parts", 0)


def whole_and_resumed(objective, folder, world=2):
    """Return each rank's results of an uninterrupted run, and of a run that was stopped after one epoch and resumed.

    The stopped run has the processes of the uninterrupted one, the resumed run has new processes.
    """
    begun = on_ranks(world, _whole_and_stopped, objective, folder)
    assert [(status, len(history)) for _, (status, history) in begun] == [("stopped", 1)] * world
    return [whole for whole, _ in begun], on_ranks(world, trained, objective, folder / "parts")
