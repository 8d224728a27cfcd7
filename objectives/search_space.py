"""What an objective may ask of the trial that it is given."""

from __future__ import annotations

import math
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


class Middle:
    """Suggests what is in the middle: of a range, of its logarithm where that is searched; and the first choice."""

    def suggest_float(
        self,
        name: str,  # noqa: ARG002 a space's
        low: float,
        high: float,
        *,
        step: float | None = None,
        log: bool = False,
    ) -> float:
        """The middle of [low, high], on the grid of `step`."""
        middle = math.sqrt(low * high) if log else (low + high) / 2
        return middle if step is None else low + step * round((middle - low) / step)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:  # noqa: ARG002 a space's
        """The integer in the middle of [low, high], on the grid of `step`."""
        middle = math.sqrt(low * high) if log else (low + high) / 2
        return low + step * round((middle - low) / step)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:  # noqa: ARG002 a space's
        """The first choice."""
        return choices[0]
