"""What this process knows better than the database does: trials it owns, and writes that it defers."""

from __future__ import annotations

from dataclasses import dataclass

from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from hpsearch.storage.study_storage.codec import copy_trial
from hpsearch.storage.study_storage.writing import Batch


@dataclass
class Owned:
    """A trial that this process alone writes, as it has written it, and the attempt by which it does."""

    trial: FrozenTrial
    attempt: int


class Deferred(Batch):
    """Writes of a trial that wait for each other."""

    def discard(self) -> None:
        """Drop what is deferred so far: it is as if it had never been set."""
        self.clear()


def overlaid(trial: FrozenTrial, batch: Batch | None) -> FrozenTrial:
    """Return a copy of the trial with what the batch would write."""
    copied = copy_trial(trial)
    if batch is not None:
        overlay(copied, batch)
    return copied


def overlay(trial: FrozenTrial, batch: Batch) -> None:
    """Change the trial as writing the batch does."""
    for name, (value, distribution) in batch.params.items():
        set_param(trial, name, value, distribution)
    trial.user_attrs.update(batch.user_attrs)
    trial.system_attrs.update(batch.system_attrs)


def set_param(trial: FrozenTrial, name: str, value: float, distribution: BaseDistribution) -> None:
    """Set a parameter, unless it is set."""
    if name not in trial.params:
        trial.params[name] = distribution.to_external_repr(value)
        trial.distributions[name] = distribution
