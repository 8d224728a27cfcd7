"""How the trials of a study stand at the rungs of its pruner, for a person to read."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from hpsearch.search.console import counted
from hpsearch.search.pruning import study_rungs
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import RUNG
from hpsearch.storage.rungs.rungs import read_rungs
from hpsearch.storage.trials.attempts import seconds_of_attempts


def seconds_run(study: StoredStudy, trials: Sequence[FrozenTrial]) -> dict[int, float]:
    """Return for how long each finished trial was run, by its id: without the time that it waited at rungs."""
    paused = [trial._trial_id for trial in trials if RUNG in trial.user_attrs]
    found = {trial._trial_id: trial.duration.total_seconds() for trial in trials if trial.duration is not None}
    return found | (seconds_of_attempts(study.engine, paused) if paused else {})


def rung_lines(study: StoredStudy) -> list[str]:
    """Return a line for each rung that a trial has reached; none where no trial waits at rungs."""
    if (rungs := study_rungs(study.spec)) is None:
        return []
    lines = []
    for at in read_rungs(study.engine, study.study_id):
        epochs = counted(rungs.epochs[at.rung], "epoch")
        waiting = f", {at.waiting} {'waits' if at.waiting == 1 else 'wait'}" if at.waiting else ""
        pruned = f", {at.pruned} {'was' if at.pruned == 1 else 'were'} pruned" if at.pruned else ""
        lines.append(f"rung {at.rung}, {epochs}: {at.reached} reached it, {at.promoted} went on{waiting}{pruned}")
    return lines
