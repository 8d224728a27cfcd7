"""The hypervolume that a study of several metrics has in hand after each epoch of all its trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import TrialState

from hpsearch.search.report.spent import in_hand
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.pareto import hypervolume, losses_of
from hpsearch.storage.trials.epoch_values import read_epoch_values

_POINTS = 1000  # of the figure: of more epochs every second is looked at, or third


@dataclass(frozen=True)
class Volume:
    """What share of the final hypervolume a study had after so many epochs.

    Attributes:
        epochs: that were trained in the whole study.
        points: after how many of them, the share, and whose epoch (from 1) made it so: where it changed.
        reference: the worst of each metric among complete trials, up to which volume is counted.
    """

    epochs: int
    points: list[tuple[int, float, int, int]]
    reference: list[float]

    @property
    def figure(self) -> dict[str, Any]:
        """What the page's script draws, fit for JSON."""
        return {"epochs": self.epochs, "points": [(at, float(f"{share:.4g}"), *of) for at, share, *of in self.points]}


def volume(study: StoredStudy, order: Sequence[tuple[int, int]]) -> Volume | None:
    """Return the hypervolume over the epochs of a study; None while no volume is dominated.

    A trial is in hand with the values of its best epoch so far by the first metric, as its model is kept and as it
    ends. Where that epoch moves another metric may be worse than it was, and the volume may shrink.

    Args:
        study: of several metrics.
        order: trial and epoch (from 0) of all that were trained, in the order in which they ended.
    """
    maximize, trials = study.spec.maximized, study.trials()
    complete = [t.values for t in trials if t.state == TrialState.COMPLETE and t.values]
    ended = [values for values in complete if all(map(math.isfinite, values))]
    if not ended:
        return None
    worst = losses_of(ended, maximize).max(axis=0)
    reported, usable = read_epoch_values(study.engine, study.study_id), in_hand(study)
    held = np.full((len(trials), len(maximize)), np.inf)
    stride = math.ceil(len(order) / _POINTS) or 1
    found: list[tuple[int, float, int, int]] = []
    changed: tuple[int, int] | None = None
    for count, (number, step) in enumerate(order, start=1):
        values = reported.get(trials[number]._trial_id, {}).get(step)
        if number in usable and values is not None:
            [losses] = losses_of([values], maximize)
            if losses[0] < held[number, 0]:
                held[number], changed = losses, (number, step + 1)
        if changed is not None and (count % stride == 0 or count == len(order)):
            now = hypervolume(held, worst.tolist())
            if now != (found[-1][1] if found else 0.0):
                found.append((count, now, *changed))
            changed = None
    if not found or not found[-1][1]:
        return None
    signs = np.where(maximize, -1.0, 1.0)
    points = [(count, now / found[-1][1], number, epoch) for count, now, number, epoch in found]
    return Volume(len(order), points, (worst * signs).tolist())
