"""What a sampler is to a study: options, and how they become Optuna's sampler."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from search.kinds import Kind

if TYPE_CHECKING:  # a wrong setting is refused before Optuna is loaded
    from optuna.samplers import BaseSampler


class SamplerSpec(Kind):
    """A sampler and its options."""

    family: ClassVar[str] = "sampler"

    @abstractmethod
    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        """Return Optuna's sampler for one trial.

        Args:
            seed: of this trial alone.
            common_seed: the same for all trials of the study.
            epochs: of a full trial.
        """
