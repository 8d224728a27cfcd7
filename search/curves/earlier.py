"""What earlier studies tell a new one: some points of their trials, taken when it is made, and kept with it.

Whatever becomes of the earlier studies afterwards (they run on, are extended, are deleted), the new one's suggestions
are a function of itself alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    distribution_to_json,
    json_to_distribution,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from hpsearch.search.curves.points import losses, seen

EARLIER = "curves:earlier"  # the study's system attribute with what its warm start tells
TRIALS = 150  # of earlier studies together, at most: with two points each, half of the points of a process


@dataclass(frozen=True)
class EarlierTrial:
    """A trial of an earlier study.

    Attributes:
        study: index of its study, from 1.
        number: its own there.
        params: those that the new study has too.
        points: logarithm of the epochs, as of `Seen`, and the normal score among all points of its study.
    """

    study: int
    number: int
    params: dict[str, Any]
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Earlier:
    """Trials of earlier studies, in the space of a new one.

    Attributes:
        studies: their names.
        distributions: of the new study's parameters.
        drawn: configurations of the new study's space, from which it is seen what depends on what.
        trials: of each study the most telling ones first.
    """

    studies: list[str] = field(default_factory=list)
    distributions: dict[str, BaseDistribution] = field(default_factory=dict)
    drawn: list[dict[str, Any]] = field(default_factory=list)
    trials: list[EarlierTrial] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        studies: Mapping[str, Sequence[FrozenTrial]],
        *,
        distributions: Mapping[str, BaseDistribution],
        drawn: Sequence[Mapping[str, Any]],
        direction: StudyDirection,
        epochs: int,
        random: np.random.Generator,
    ) -> Self:
        """What trials tell a new study.

        Epochs count as epochs: those beyond the new study's length are left out. So are trials with a value out of its
        range or choices: put at the end of the range, they would tell of that end what is true elsewhere.

        Args:
            studies: trials by the names of their studies, each of which has reported something or ended.
            distributions: of the new study's parameters.
            drawn: configurations of its space.
            direction: of all studies.
            epochs: of a full trial of the new study.
            random: chooses where there are too many.

        Raises:
            ValueError: a study has no trial in the new one's space; one line says so.
        """
        found: list[EarlierTrial] = []
        for index, (name, trials) in enumerate(studies.items(), 1):
            there: list[tuple[int, dict[str, Any]]] = []
            curves: list[dict[int, float]] = []
            for trial in trials:
                by_epoch = losses(trial, maximize=direction == StudyDirection.MAXIMIZE, epochs=epochs)
                curve = {epoch: loss for epoch, loss in by_epoch.items() if epoch <= epochs}
                if (params := _translated(trial.params, distributions)) and curve:
                    there.append((trial.number, params))
                    curves.append(curve)
            if not curves:
                raise ValueError(f"{name}: none of its trials is in this search space: name another, or leave it out")
            points = seen(curves, epochs, random)
            of_trial: dict[int, list[tuple[float, float]]] = {}
            for place, s, score in zip(points.trial.tolist(), points.s.tolist(), points.scores.tolist(), strict=True):
                of_trial.setdefault(place, []).append((round(s, 6), round(score, 6)))
            chosen = _most_telling(of_trial, TRIALS // len(studies), random)
            found += [EarlierTrial(index, *there[i], of_trial[i]) for i in chosen]
        return cls(list(studies), dict(distributions), [dict(params) for params in drawn], found)

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return {
            "studies": self.studies,
            "distributions": {name: distribution_to_json(d) for name, d in self.distributions.items()},
            "drawn": self.drawn,
            "trials": [[t.study, t.number, t.params, t.points] for t in self.trials],
        }

    @classmethod
    def read(cls, kept: Mapping[str, Any] | None) -> Self:
        """From what is kept with a study; none where that is nothing."""
        if kept is None:
            return cls()
        distributions = {name: json_to_distribution(text) for name, text in kept["distributions"].items()}
        trials = [EarlierTrial(*fields) for fields in kept["trials"]]
        return cls(kept["studies"], distributions, kept["drawn"], trials)


def _translated(params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> dict[str, Any] | None:
    """The parameters that a space has; None where a value is not in it."""
    shared = {name: value for name, value in params.items() if name in distributions}
    return shared if all(_contains(distributions[name], value) for name, value in shared.items()) else None


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return any(value == choice and type(value) is type(choice) for choice in distribution.choices)
    # Between the steps is as good as on them: nothing is run with it.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and distribution.low <= value <= distribution.high  # type: ignore[attr-defined]  # of numbers


def _most_telling(
    points: Mapping[int, Sequence[tuple[float, float]]], most: int, random: np.random.Generator
) -> list[int]:
    """Those that went furthest, and the best of them, first; beyond half of `most` any of the others."""
    order = sorted(points, key=lambda trial: (-points[trial][-1][0], points[trial][-1][1], trial))
    if len(order) <= most:
        return order
    others = random.permutation(len(order) - most // 2)[: most - most // 2]
    return [*order[: most // 2], *(order[most // 2 + int(i)] for i in others)]
