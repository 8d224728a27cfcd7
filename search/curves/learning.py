"""What trials teach a process: which of them are known, their losses, and the points that are made of both."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial
from torch import Tensor

from search.curves.points import OF_EACH, Seen, seen
from search.curves.process import Points, Process
from search.curves.space import Space
from storage.attributes import INFEASIBLE

FIT = 200  # points that hyperparameters are fitted on, at most


def known(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have reported something, or ended before they could."""
    return [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]


def parameters(trials: Iterable[FrozenTrial]) -> dict[str, BaseDistribution]:
    """All parameters that trials had, as the last of them had it; those of one value alone are none."""
    return {name: d for trial in trials for name, d in trial.distributions.items() if not d.single()}


def losses(trial: FrozenTrial, *, maximize: bool, epochs: int) -> dict[int, float]:
    """Values by epoch, from 1, as lower is better; those of a trial that diverged are as bad as any, to its end."""
    sign = -1.0 if maximize else 1.0
    found = {step + 1: sign * value for step, value in trial.intermediate_values.items()}
    if trial.user_attrs.get(INFEASIBLE) or not any(map(math.isfinite, found.values())):
        return {1: math.inf, epochs: math.inf}
    return found


@dataclass(frozen=True)
class Lesson:
    """What a process learns from: points of a space, and their scores.

    Attributes:
        space: of the trials' parameters; a row for each trial.
        seen: the points, by index of the trial.
        points: the same with the features of their configurations.
        scores: of the points [n].
    """

    space: Space
    seen: Seen
    points: Points
    scores: Tensor

    @classmethod
    def of(
        cls,
        trials: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        *,
        maximize: bool,
        epochs: int,
        random: np.random.Generator,
        of_each: int = OF_EACH,
        always: Container[int] = (),
    ) -> Lesson:
        """Of trials that are `known`.

        Args:
            trials: some.
            distributions: of the parameters that matter, see `parameters`; some.
            maximize: whether higher values are better.
            epochs: of a full trial.
            random: chooses where there are too many points.
            of_each, always: see `seen`.
        """
        space = Space(distributions, [t.params for t in trials])
        curves = [losses(t, maximize=maximize, epochs=epochs) for t in trials]
        found = seen(curves, epochs, random, of_each=of_each, always=always)
        points = Points(*map(torch.from_numpy, (space.features(space.rows)[found.trial], found.s, found.trial)))
        return cls(space, found, points, torch.from_numpy(found.scores))

    @property
    def ends(self) -> Points:
        """The trials after their last epoch, one after the other."""
        return Points.at_the_end(self.space.features(self.space.rows), np.arange(len(self.space.rows)))

    def fitted(self, process: Process) -> Process:
        """A process fitted to some of the points, sought from its hyperparameters on."""
        part = torch.from_numpy(np.linspace(0, len(self.scores) - 1, min(FIT, len(self.scores)), dtype=np.int64))
        some = Points(self.points.x[part], self.points.s[part], self.points.trial[part])
        return process.fitted(some, self.scores[part])
