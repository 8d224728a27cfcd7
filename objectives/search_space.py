"""What an objective may ask of the trial that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SearchSpace(Protocol):
    """Suggests values for named parameters; `optuna.Trial` and `optuna.trial.FixedTrial` fit it.

    A name stands for one distribution in the whole study: give the parameters of different branches different names.
    """

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A float in [low, high], uniform or uniform in its logarithm."""
        ...

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """An integer in [low, high], both included."""
        ...

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of the choices: None, bool, int, float or str."""
        ...
