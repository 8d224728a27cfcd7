"""What an objective may ask of the trial that it is given, and what answers without a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hpsearch.objectives.errors import ObjectiveError, nearest


class SearchSpace(Protocol):
    """Suggests values for named parameters; `optuna.Trial` and `optuna.trial.FixedTrial` fit it.

    A name stands for one distribution in the whole study: give the parameters of different branches different names.
    """

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A float in [low, high], uniform or uniform in its logarithm."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """An integer in [low, high], both included."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of the choices: None, bool, int, float or str."""


class _Answers:
    """A search space without a study: subclasses answer a range and a choice. `values` has all answers by name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number in [low, high], on the grid of `step`."""
        self.values[name] = value = float(self._range(name, low, high, step, log=log))
        return value

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return an integer in [low, high], on the grid of `step`."""
        self.values[name] = value = round(self._range(name, low, high, step, log=log))
        return value

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""
        self.values[name] = value = self._category(name, choices)
        return value

    def _range(self, name: str, low: float, high: float, step: float | None, *, log: bool) -> float:
        raise NotImplementedError

    def _category(self, name: str, choices: Sequence[Any]) -> Any:
        raise NotImplementedError


class Given(_Answers):
    """Suggests the given value of a parameter, or else the middle of its range and the first of its choices.

    The middle of a range on a log scale is that of its logarithm. A given value that is not in the space raises a
    NotInSpaceError.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = given

    def _range(self, name: str, low: float, high: float, step: float | None, *, log: bool) -> float:
        if name in self.given:
            return self._number(name, low, high, step)
        middle = math.sqrt(low * high) if log else (low + high) / 2
        return min(max(middle if step is None else low + step * round((middle - low) / step), low), high)

    def _category(self, name: str, choices: Sequence[Any]) -> Any:
        return self._choice(name, choices) if name in self.given else choices[0]

    def require_all_taken(self, whose: str) -> None:
        """Raise a NotInSpaceError if a given parameter was not asked for."""
        for name in self.given:
            if name not in self.values:
                raise NotInSpaceError(name, f"{whose} asks for no such parameter: {nearest(name, list(self.values))}")

    def _choice(self, name: str, choices: Sequence[Any]) -> Any:
        value = self.given[name]
        for choice in choices:
            if choice == value and isinstance(choice, bool) == isinstance(value, bool):
                return choice
        raise NotInSpaceError(name, f"{value!r} is none of {', '.join(map(repr, choices))}")

    def _number(self, name: str, low: float, high: float, step: float | None) -> float:
        value = self.given[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotInSpaceError(name, f"{value!r} is no number")
        steps = 0.0 if step is None else (value - low) / step
        if not low <= value <= high or abs(steps - round(steps)) > 1e-8:
            raise NotInSpaceError(name, f"{value!r} is not in [{low}, {high}]" + (f" by {step}" if step else ""))
        return value


class Written(Given):
    """Suggests what was given as text, as in a table: `0.001`, `adam`, `true`, `none`."""

    def _choice(self, name: str, choices: Sequence[Any]) -> Any:
        text = self.given[name].strip()
        for choice in choices:
            if str(choice) == text or (not isinstance(choice, str) and str(choice).lower() == text.lower()):
                return choice
            if isinstance(choice, int | float) and not isinstance(choice, bool) and _number_of(text) == choice:
                return choice
        raise NotInSpaceError(name, f"{text!r} is none of {', '.join(map(repr, choices))}")

    def _number(self, name: str, low: float, high: float, step: float | None) -> float:
        if (number := _number_of(self.given[name])) is None:
            raise NotInSpaceError(name, f"{self.given[name]!r} is no number")
        return Given({name: number})._number(name, low, high, step)


def _number_of(text: str) -> float | None:
    if "_" in text:  # which Python takes between digits
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


class NotInSpaceError(ObjectiveError):
    """A value of the parameter `name` that a search space does not have, and `why`."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def every_configuration(configure: Callable[[SearchSpace], object]) -> Iterator[dict[str, Any]]:
    """Iterate over all configurations of a search space, as `configure` asks for their parameters.

    Raises:
        NotInSpaceError: a parameter is a range without steps, which is infinite.
    """
    taken: list[int] = []  # of each parameter in turn, which of its values is next
    while True:
        space = _Enumerated(taken)
        configure(space)
        yield space.values
        taken = [*taken, *[0] * (len(space.counts) - len(taken))][: len(space.counts)]
        while taken and taken[-1] + 1 == space.counts[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        taken[-1] += 1


class _Enumerated(_Answers):
    """Suggests the values of the parameters by their places, and the first of those beyond."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self._places = places
        self.counts: list[int] = []

    def _range(self, name: str, low: float, high: float, step: float | None, *, log: bool) -> float:  # noqa: ARG002
        if step is None and low < high:
            raise NotInSpaceError(name, f"a range from {low} to {high} without steps has no last value: give it a step")
        count = math.floor((high - low) / step + 1e-8) + 1 if step else 1
        number: float = self._suggest(name, count, lambda place: low + place * (step or 0))
        return number

    def _category(self, name: str, choices: Sequence[Any]) -> Any:
        return self._suggest(name, len(choices), lambda place: choices[place])

    def _suggest(self, name: str, count: int, value: Callable[[int], Any]) -> Any:
        if name in self.values:  # one that is asked for again has the value that it had
            return self.values[name]
        place = len(self.counts)
        self.counts.append(count)
        return value(self._places[place] if place < len(self._places) else 0)
