"""What the epochs of a trial came to, by all metrics that its study asks for."""

from __future__ import annotations

from collections.abc import Mapping

from hpsearch.objectives.errors import ObjectiveError, nearest
from hpsearch.objectives.measured import value_of
from hpsearch.search.spec.spec import StudySpec


class EpochValues:
    """The metrics of a trial's epochs: those that are optimised, and those that have bounds."""

    def __init__(self, spec: StudySpec) -> None:
        self._spec = spec
        self._reported: dict[int, dict[str, float]] = {}

    def add(self, epoch: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take those that are asked for from an epoch's record, and return them by their names.

        Raises:
            ObjectiveError: one is not there; one line names it and what is.
        """
        names = (self._spec.metric, *self._spec.also_reported)
        try:
            self._reported[epoch] = {name: value_of(metrics, name) for name in names}
        except KeyError as missing:
            there = sorted({key.removeprefix("val_") for key in metrics if not key.startswith("train_")})
            raise ObjectiveError(f"metric {missing} is not reported{nearest(str(missing.args[0]), there)}") from None
        return self._reported[epoch]

    def __contains__(self, epoch: int) -> bool:
        """Whether an epoch was added."""
        return epoch in self._reported

    def of(self, epoch: int) -> dict[str, float]:
        """Return those of an epoch, by their names."""
        return self._reported[epoch]

    def vector(self, epoch: int) -> list[float]:
        """Return the values of an epoch, of all metrics that are optimised, in their order."""
        return [self._reported[epoch][name] for name in self._spec.ways]

    def best(self, until: int) -> int:
        """Return the best epoch up to one, by the first metric; of equal ones the earliest."""
        sign = -1 if self._spec.maximize else 1
        epochs = [epoch for epoch in sorted(self._reported) if epoch <= until]
        return min(epochs, key=lambda epoch: sign * self._reported[epoch][self._spec.metric])


def violations(spec: StudySpec, reported: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each bound is broken, as system attributes that Optuna's samplers and dashboard read."""
    return {f"constraints:{bound.metric}": bound.violation(reported[bound.metric]) for bound in spec.bounds}
