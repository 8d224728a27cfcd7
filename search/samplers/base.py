"""The base class of samplers: their options, and the construction of Optuna's sampler."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from hpsearch.search.spec.kinds import RegisteredOptions

if TYPE_CHECKING:  # wrong settings are rejected before Optuna is loaded
    from optuna.samplers import BaseSampler

    from hpsearch.objectives.objective import BaseObjective


class SamplerSpec(RegisteredOptions):
    """A sampler and its options."""

    family: ClassVar[str] = "sampler"

    # Whether the trial's number determines its parameters; duplicates are then not sampled again.
    is_indexed_by_trial: ClassVar[bool] = False
    # Whether it can repeat the parameters of another trial exactly, even with ranges of floats.
    can_repeat: ClassVar[bool] = False
    # Whether it uses the trials of source studies (`search.freeze_thaw.warm_start`).
    can_warm_start: ClassVar[bool] = False

    def max_trials(self) -> int | None:
        """Return the number of configurations; None if it is unlimited or not known yet."""
        return None

    def fit_to_objective(self, objective: BaseObjective) -> Self:
        """Return the options, completed for an objective's search space; called for a new study.

        Raises:
            ValueError: the options do not fit the search space.
        """
        return self

    def check_n_trials(self, n_trials: int) -> None:
        """Check the budget against the number of configurations.

        Raises:
            ValueError: the budget exceeds the number of configurations.
        """
        if (most := self.max_trials()) is not None and n_trials > most:
            raise ValueError(
                f"--trials {n_trials}: {self.name} has {most} configuration{'s' if most > 1 else ''} and runs "
                "each once; lower --trials, or omit it"
            )

    def prepare(self) -> None:
        """Fetch what `build` needs on this machine; called once by a worker, before it takes a trial.

        Raises:
            ValueError: the download failed.
        """
        return

    @abstractmethod
    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        """Return Optuna's sampler for one trial.

        Args:
            seed: seed of this trial.
            common_seed: seed of all trials of the study.
            epochs: epochs of a full trial.
        """
