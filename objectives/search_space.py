"""The trial interface for `Objective.suggest`, and trials that need no study."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from hpsearch.objectives.errors import ObjectiveError, suggest_names


class TrialProtocol(Protocol):
    """Interface of a trial that suggests parameter values; `optuna.Trial` and `optuna.trial.FixedTrial` implement it.

    A parameter name has one distribution in the whole study, so parameters of different branches of `suggest` need
    different names.
    """

    @property
    def number(self) -> int:
        """The number of the trial in its study; 0 without a study."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The values that were suggested so far, by name."""

    @property
    def user_attrs(self) -> Mapping[str, Any]:
        """The attributes that `set_user_attr` set, by key."""

    def set_user_attr(self, key: str, value: Any) -> None:
        """Set a user attribute."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Suggest a float in [low, high], on a linear or logarithmic scale."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Suggest an integer in [low, high], both included."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Suggest one of the choices: None, bool, int, float or str."""


_LONGEST_NAME = 512  # characters; the type of the name of a parameter or attribute in Optuna's tables


def check_name(kind: str, name: str) -> None:
    """Check that the database accepts the name of a parameter or user attribute.

    Raises:
        ObjectiveError: the database rejects it.
    """
    if not isinstance(name, str):
        raise ObjectiveError(f"the name of a {kind} is {repr(name)[:80]}, of type {type(name).__name__}; use a text")
    if not name:
        raise ObjectiveError(f"a {kind} has an empty name; give it a name")
    if len(name) > _LONGEST_NAME:
        raise ObjectiveError(
            f"{kind} {name[:40] + '...'!r} has a name of {len(name)} characters; use at most {_LONGEST_NAME}"
        )
    _check_text(f"{kind} {name!r} has the name", name)


def _check_text(head: str, text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ObjectiveError(f"{head} {text!r}, which contains a null character or is not valid UTF-8; use another one")


def check_parameter(name: str, choices: Sequence[Any] = (), bounds: Sequence[float] = ()) -> None:
    """Check that samplers accept the bounds of a parameter, and the database its name and choices.

    Raises:
        ObjectiveError: the database or the samplers reject one of them.
    """
    check_name("parameter", name)
    for choice in choices:
        if choice is not None and not isinstance(choice, (bool, int, float, str)):
            raise ObjectiveError(
                f"parameter {name!r} has the choice {choice!r}, which is of type {type(choice).__name__}, but the "
                "database holds only None, bool, int, float and str; let the choices be the keys of a dictionary"
            )
    first: dict[Any, Any] = {}
    for choice in choices:
        other = first.setdefault(choice, choice)
        if not isinstance(choice, str) and type(choice) is not type(other):  # such as 1 and True
            raise ObjectiveError(
                f"parameter {name!r} has the choices {other!r} and {choice!r}, which are equal in Python, so that "
                "trials would get only one of them; let the choices be texts, or remove one"
            )
    for choice in choices:
        if isinstance(choice, str):
            _check_text(f"parameter {name!r} has the choice", choice)
    for bound in bounds:
        if isinstance(bound, float) and not math.isfinite(bound):
            raise ObjectiveError(f"parameter {name!r} has the bound {bound}; give a finite number")


class StudylessTrial:
    """Base class of trials without a study, with the attributes of `optuna.trial.FixedTrial`.

    `values` contains the suggested values by name.
    """

    number = 0

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.user_attrs: dict[str, Any] = {}
        self.system_attrs: dict[str, Any] = {}
        self.datetime_start = datetime.now()  # without a time zone, as in Optuna

    @property
    def params(self) -> dict[str, Any]:
        """The values that were suggested so far, by name."""
        return dict(self.values)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Set a user attribute of this trial.

        Raises:
            ObjectiveError: the study's database rejects the name, or the value cannot be converted to JSON.
        """
        check_name("user attribute", key)
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise ObjectiveError(
                f"the user attribute {key!r} has a value of type {type(value).__name__} that JSON cannot represent; "
                "use None, bool, int, float, str, and lists and dictionaries of them"
            ) from None
        self.user_attrs[key] = value

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number in [low, high], on the grid of `step`."""
        check_parameter(name, bounds=(low, high))
        self.values[name] = value = float(self._range(name, low, high, step, log=log))
        return value

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return an integer in [low, high], on the grid of `step`."""
        check_parameter(name, bounds=(low, high))
        self.values[name] = value = round(self._range(name, low, high, step, log=log))
        return value

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""
        check_parameter(name, choices)
        if not len(choices):
            raise ObjectiveError(f"parameter {name!r} has no choices; give one or more")
        self.values[name] = value = self._category(name, choices)
        return value

    def _range(self, name: str, low: float, high: float, step: float | None, *, log: bool) -> float:
        raise NotImplementedError

    def _category(self, name: str, choices: Sequence[Any]) -> Any:
        raise NotImplementedError


class FixedTrial(StudylessTrial):
    """Trial that returns given values, and for other parameters the midpoint of the range or the first choice.

    On a log scale, the midpoint is the geometric mean. A given value outside the search space raises NotInSpaceError.
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

    def require_all_used(self, owner: str) -> None:
        """Check that every given parameter was suggested; `owner` is the name of the objective in messages.

        Raises:
            NotInSpaceError: a given parameter was not suggested.
        """
        for name in self.given:
            if name not in self.values:
                raise NotInSpaceError(name, f"does not exist in {owner}; {suggest_names(name, list(self.values))}")

    def _choice(self, name: str, choices: Sequence[Any]) -> Any:
        value = self.given[name]
        for choice in choices:
            if choice == value and isinstance(choice, bool) == isinstance(value, bool):
                return choice
        raise NotInSpaceError(name, f"must be one of {', '.join(map(repr, choices))}, not {value!r}")

    def _number(self, name: str, low: float, high: float, step: float | None) -> float:
        value = self.given[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotInSpaceError(name, f"must be a number, not {value!r}")
        if not low <= value <= high or not _is_on_grid(value - low, step):
            grid = f" with step {step}" if step else ""
            raise NotInSpaceError(name, f"must be in [{low}, {high}]{grid}, not {value!r}")
        return value


def _is_on_grid(distance: float, step: float | None) -> bool:
    return step is None or abs(distance / step - round(distance / step)) <= 1e-8


class TextFixedTrial(FixedTrial):
    """Trial whose given values are texts that it parses, such as cells of a table: `0.001`, `adam`, `true`, `none`."""

    def _choice(self, name: str, choices: Sequence[Any]) -> Any:
        text = self.given[name].strip()
        for choice in choices:
            if str(choice) == text or (not isinstance(choice, str) and str(choice).lower() == text.lower()):
                return choice
            if isinstance(choice, int | float) and not isinstance(choice, bool) and _parse_number(text) == choice:
                return choice
        raise NotInSpaceError(name, f"must be one of {', '.join(map(repr, choices))}, not {text!r}")

    def _number(self, name: str, low: float, high: float, step: float | None) -> float:
        if (number := _parse_number(self.given[name])) is None:
            raise NotInSpaceError(name, f"must be a number, not {self.given[name]!r}")
        return FixedTrial({name: number})._number(name, low, high, step)


def _parse_number(text: str) -> float | None:
    if "_" in text:  # Python accepts it between digits
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


class NotInSpaceError(ObjectiveError):
    """Error for a parameter or value that is not in the search space.

    The message is `parameter NAME` followed by `reason`.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"parameter {name!r} {reason}")
        self.name, self.reason = name, reason
