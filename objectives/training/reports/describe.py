"""The settings of a training run and the search space of an objective, in words."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from hpsearch.objectives.training.config import FIELDS, TrainConfig, type_name

if TYPE_CHECKING:
    from hpsearch.objectives.base import BaseObjective


class Setting(NamedTuple):
    """One field of a `TrainConfig`: its name, type, value and what it does."""

    name: str
    type: str
    value: Any
    help: str


def settings(config: TrainConfig) -> list[Setting]:
    """All fields of a configuration, in their order, with the class's own words."""
    return [
        Setting(name, type_name(field), getattr(config, name), field.description or "")
        for name, field in FIELDS.items()
    ]


def own_settings(config: Any) -> list[Setting]:
    """The settings of an own loop: a dictionary, or a dataclass whose fields may be `Annotated` with words."""
    values = dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)
    words = {} if isinstance(config, Mapping) else _annotated(type(config))
    return [Setting(str(name), type(value).__name__, value, words.get(name, "")) for name, value in values.items()]


def _annotated(cls: type) -> dict[str, str]:
    """What the annotations of a dataclass say of its fields: a text, or what `about` makes of one."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # of names that are imported for type checkers alone
        return {}
    said = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    texts = {name: [getattr(part, "description", part) for part in parts] for name, parts in said.items()}
    return {name: "; ".join(text for text in found if isinstance(text, str)) for name, found in texts.items()}


def search_space(objective: BaseObjective, draws: int = 64) -> dict[str, str]:
    """The parameters that `suggest` asks for, with their ranges, as many random trials find them.

    Raises:
        ObjectiveError: `suggest` gives no configuration, or one that is not valid.
    """
    recorder = _Recorder()
    for _ in range(draws):
        objective.configure(recorder)
    return recorder.seen


class _Recorder:
    """A trial that answers at random and notes what it was asked."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self._random = random.Random(0)  # noqa: S311 nothing secret is drawn

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self._note(name, low, high, step, log)
        if step is not None:
            return low + step * self._random.randint(0, int((high - low) / step + 1e-9))
        return self._draw(low, high, log)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        self._note(name, low, high, None if step == 1 else step, log)
        return min(int(self._draw(low, high, log)), high) if log else self._random.randrange(low, high + 1, step)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        self.seen[name] = "one of " + ", ".join(map(str, choices))
        return self._random.choice(choices)

    def _note(self, name: str, low: float, high: float, step: float | None, log: bool) -> None:
        extra = " on a log scale" if log else "" if step is None else f" in steps of {step:g}"
        self.seen[name] = f"{low:g} to {high:g}{extra}"

    def _draw(self, low: float, high: float, log: bool) -> float:
        share: float = self._random.random()
        return low * (high / low) ** share if log else low + (high - low) * share
