"""Warm start: observations of earlier studies, copied into a new study when it is created.

Because of the copy, suggestions of the new study do not depend on later changes of the earlier studies, such as more
trials or deletion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from hpsearch.search.freeze_thaw.observations import read_losses, select_observations
from hpsearch.search.freeze_thaw.space import contains_value

WARM_START_KEY = "curves:earlier"  # study system attribute with the warm-start data
MAX_SOURCE_TRIALS = 150  # maximum number of trials of all earlier studies; with two points each, half of MAX_POINTS


@dataclass(frozen=True)
class SourceTrial:
    """A trial of an earlier study.

    Attributes:
        study: index of the trial's study, from 1.
        number: number of the trial in its study.
        params: the trial's values of the parameters that the new study has too.
        points: (scaled log-epoch as in `Observations`, normal score among all points of the trial's study).
    """

    study: int
    number: int
    params: dict[str, Any]
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class WarmStartData:
    """Trials of earlier studies, restricted to the search space of a new study.

    Attributes:
        studies: names of the earlier studies.
        distributions: distributions of the new study's parameters.
        sampled_configurations: configurations sampled from the new search space, from which its conditions are
            inferred.
        trials: selected trials of all studies; per study, the most informative trials first.
    """

    studies: list[str] = field(default_factory=list)
    distributions: dict[str, BaseDistribution] = field(default_factory=dict)
    sampled_configurations: list[dict[str, Any]] = field(default_factory=list)
    trials: list[SourceTrial] = field(default_factory=list)

    @classmethod
    def from_studies(
        cls,
        studies: Mapping[str, Sequence[FrozenTrial]],
        *,
        distributions: Mapping[str, BaseDistribution],
        sampled: Sequence[Mapping[str, Any]],
        direction: StudyDirection,
        epochs: int,
        random: np.random.Generator,
    ) -> Self:
        """Select the trials of earlier studies that are in the search space of a new study.

        Epochs after the last epoch of the new study are omitted. Trials with a value outside the ranges or choices of
        the new study are omitted too: if the value were clipped to the end of a range, the trial would misrepresent the
        results at this end.

        Args:
            studies: trials by study name; each trial has reported a value or has ended.
            distributions: distributions of the new study's parameters.
            sampled: configurations sampled from the new search space.
            direction: direction of optimization, which is the same in all studies.
            epochs: number of epochs of a full trial of the new study.
            random: random generator for subsampling.

        Raises:
            ValueError: an earlier study has no trial in the new search space.
        """
        found: list[SourceTrial] = []
        for index, (name, trials) in enumerate(studies.items(), 1):
            kept: list[tuple[int, dict[str, Any]]] = []
            curves: list[dict[int, float]] = []
            for trial in trials:
                by_epoch = read_losses(trial, maximize=direction == StudyDirection.MAXIMIZE, epochs=epochs)
                curve = {epoch: loss for epoch, loss in by_epoch.items() if epoch <= epochs}
                if (params := _select_shared(trial.params, distributions)) and curve:
                    kept.append((trial.number, params))
                    curves.append(curve)
            if not curves:
                raise ValueError(f"{name}: no trial is in the new search space; give another study")
            points = select_observations(curves, epochs, random)
            of_trial: dict[int, list[tuple[float, float]]] = {}
            for place, s, score in zip(
                points.trial.tolist(), points.log_epoch.tolist(), points.scores.tolist(), strict=True
            ):
                of_trial.setdefault(place, []).append((round(s, 6), round(score, 6)))
            chosen = _select_most_informative(of_trial, MAX_SOURCE_TRIALS // len(studies), random)
            found += [SourceTrial(index, *kept[i], of_trial[i]) for i in chosen]
        return cls(list(studies), dict(distributions), [dict(params) for params in sampled], found)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON data that is stored with the study."""
        return {
            "studies": self.studies,
            "distributions": {name: distribution_to_json(d) for name, d in self.distributions.items()},
            "drawn": self.sampled_configurations,
            "trials": [[t.study, t.number, t.params, t.points] for t in self.trials],
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any] | None) -> Self:
        """Return the warm-start data from the stored JSON data; None gives empty warm-start data."""
        if kept is None:
            return cls()
        distributions = {name: json_to_distribution(text) for name, text in kept["distributions"].items()}
        trials = [SourceTrial(*fields) for fields in kept["trials"]]
        return cls(kept["studies"], distributions, kept["drawn"], trials)


def _select_shared(params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> dict[str, Any] | None:
    """Return the parameters that the new search space has too; None if a value is outside its range or choices."""
    shared = {name: value for name, value in params.items() if name in distributions}
    # A value between two steps is allowed, because the value is only an observation, and no trial runs with it.
    return shared if all(contains_value(distributions[name], value) for name, value in shared.items()) else None


def _select_most_informative(
    points: Mapping[int, Sequence[tuple[float, float]]], most: int, random: np.random.Generator
) -> list[int]:
    """Return at most `most` trials: half are those with the most epochs and best scores, the others a random sample."""
    order = sorted(points, key=lambda trial: (-points[trial][-1][0], points[trial][-1][1], trial))
    if len(order) <= most:
        return order
    others = random.permutation(len(order) - most // 2)[: most - most // 2]
    return [*order[: most // 2], *(order[most // 2 + int(i)] for i in others)]
