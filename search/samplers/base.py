"""What a sampler is to a study: options, and how they become Optuna's sampler."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from hpsearch.search.spec.kinds import Kind

if TYPE_CHECKING:  # a wrong setting is refused before Optuna is loaded
    from optuna.samplers import BaseSampler

    from hpsearch.objectives.objective import BaseObjective


class SamplerSpec(Kind):
    """A sampler and its options."""

    family: ClassVar[str] = "sampler"

    # Whether what it suggests stands, though another trial had the same: it is the trial's by its number.
    by_number: ClassVar[bool] = False
    # Whether it suggests what another trial had, number for number, though there are ranges of floats.
    repeats: ClassVar[bool] = False
    # Whether it learns from trials of earlier studies (`search.curves.earlier`).
    warm_starts: ClassVar[bool] = False

    def most(self) -> int | None:
        """How many trials it has something to suggest for; None where that has no end, or is not known yet."""
        return None

    def for_objective(self, objective: BaseObjective) -> Self:
        """Return the options for an objective's search space, with nothing left open; called for a new study.

        Raises:
            ValueError: they do not fit; one line says why.
        """
        return self

    def for_trials(self, n_trials: int) -> None:
        """Check that the options go with a budget.

        Raises:
            ValueError: they do not; one line says why.
        """
        if (most := self.most()) is not None and n_trials > most:
            raise ValueError(
                f"--trials {n_trials}: {self.name} has {most} configuration{'s' if most > 1 else ''}, and runs none "
                "twice: give no more, or leave --trials out"
            )

    def get_ready(self) -> None:
        """Fetch what `build` needs on this machine; called once by a worker, before it takes a trial.

        Raises:
            ValueError: it cannot be had; one line says why.
        """
        return

    @abstractmethod
    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        """Return Optuna's sampler for one trial.

        Args:
            seed: of this trial alone.
            common_seed: the same for all trials of the study.
            epochs: of a full trial.
        """
