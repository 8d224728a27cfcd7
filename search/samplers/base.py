"""The base class of samplers: options, and the construction of Optuna's sampler."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from hpsearch.search.spec.kinds import RegisteredOptions

if TYPE_CHECKING:  # invalid settings are rejected without loading Optuna
    from optuna.samplers import BaseSampler

    from hpsearch.objectives.base_objective import BaseObjective


class SamplerSpec(RegisteredOptions):
    """A sampler and its options."""

    family: ClassVar[str] = "sampler"

    # Whether the trial's number determines its parameters, so that a duplicate is not sampled again.
    is_indexed_by_trial: ClassVar[bool] = False
    # Whether the sampler can repeat the parameters of another trial exactly, even if parameters are continuous.
    can_repeat: ClassVar[bool] = False
    # Whether the sampler uses trials that are paused at rungs. Without them, it would be random search for a long time.
    can_use_paused_trials: ClassVar[bool] = True
    # Whether the sampler uses the trials of earlier studies (`search.freeze_thaw.warm_start`).
    can_warm_start: ClassVar[bool] = False

    @property
    def downloaded_code_description(self) -> str | None:
        """Description of the code that `prepare` downloads and imports; None if there is none."""
        return None

    def max_trials(self) -> int | None:
        """Return the number of configurations that the sampler can suggest; None if unlimited, or not known yet."""
        return None

    def fit_to_objective(self, objective: BaseObjective) -> Self:
        """Return the options for an objective's search space, with computed values filled in; called for a new study.

        Raises:
            ValueError: the options do not fit the search space.
        """
        return self

    def check_n_trials(self, n_trials: int) -> None:
        """Check that the budget in trials fits the options.

        Raises:
            ValueError: the budget does not fit, for example because it exceeds the number of configurations.
        """
        if (most := self.max_trials()) is not None and n_trials > most:
            raise ValueError(
                f"--trials {n_trials}: {self.name} has {most} configuration{'s' if most > 1 else ''} and runs "
                "each once; lower or remove --trials"
            )

    def prepare(self) -> None:
        """Download the files that `build` needs on this machine; a worker calls this once, before its first trial.

        Raises:
            ValueError: the download failed.
        """
        return

    @abstractmethod
    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        """Return Optuna's sampler for one trial.

        Args:
            seed: seed of this trial's suggestion.
            common_seed: seed that is the same for all trials of the study.
            epochs: number of epochs of a full trial.
        """
