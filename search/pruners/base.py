"""What a pruner is to a study: options, a verdict of its own, and Optuna's pruner of the same verdicts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from hpsearch.search.kinds import Kind
from hpsearch.search.pruners.decision import Case, Decision, Peers
from hpsearch.search.pruners.halving import Halving

if TYPE_CHECKING:  # a wrong setting is refused before Optuna is loaded
    from optuna.pruners import BasePruner


class Promotion(NamedTuple):
    """Rungs at which trials wait.

    Attributes:
        epochs: after how many each is reached.
        factor: of how many that reach it one goes on.
        complete: how many trials are trained to their end at least.
    """

    epochs: tuple[int, ...]
    factor: int
    complete: int


class PrunerSpec(Kind):
    """A pruner and its options."""

    family: ClassVar[str] = "pruner"
    refused: ClassVar[Mapping[str, str]] = {
        "wilcoxon": "its test takes the steps of a trial for independent measurements, as of folds, and the epochs of "
        "one training are not; use 'median', or 'patient'"
    }

    # Whether trials end before their time at all.
    prunes: ClassVar[bool] = True

    def names_metric(self) -> str | None:
        """The metric that its options name; None where it is the study's."""
        return None

    def for_epochs(self, epochs: int) -> Self:
        """Return the options for full trials of so many epochs, with nothing left open.

        Left open, each process would derive its own.

        Raises:
            ValueError: they do not fit; one line says why.
        """
        return self

    @abstractmethod
    def build(self) -> BasePruner:
        """Return Optuna's pruner: a sampler asks it for a trial's bracket; the verdicts are :meth:`judge`'s."""

    @abstractmethod
    def judge(self, case: Case, peers: Peers) -> Decision:
        """Decide about a trial after its last reported epoch, as often as one likes."""

    def halving(self, study: str, number: int) -> Halving | None:
        """Return the successive halving that a trial of a study goes through; None where there is none."""
        return None

    def promotion(self, epochs: int) -> Promotion | None:
        """Return the rungs at which trials of so many epochs wait; None where no trial does."""
        return None
