"""Kinds of samplers and pruners: chosen by name, with options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hpsearch.search.errors import nearest


def _no_switch(given: Any) -> Any:
    """Make a word of what pydantic would take for 0 or 1."""
    return str(given).lower() if isinstance(given, bool) else given


# From a flag it comes as a word.
Number = Annotated[float, Field(strict=False, allow_inf_nan=False), BeforeValidator(_no_switch)]


class Options(BaseModel):
    """Settings that are what they are said to be: nothing is converted, nothing unknown is taken, nothing changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Kind(Options):
    """One choice of a family, and its options. A subclass that gives `name` a default is a choice by that name.

    Attributes:
        family: what is chosen, for messages; a direct subclass sets it.
        kinds: the choices of the family by their names.
        refused: why some that one might look for are none of them, by their names.
        examples: of options that have to be given, by their names.
        knows_several: whether it can be chosen where several metrics are optimised.
    """

    family: ClassVar[str]
    kinds: ClassVar[dict[str, type[Any]]]
    refused: ClassVar[Mapping[str, str]] = {}
    examples: ClassVar[Mapping[str, str]] = {}
    knows_several: ClassVar[bool] = True
    name: str

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        name = cls.model_fields["name"].default
        if Kind in cls.__bases__:
            cls.kinds = {}
        elif isinstance(name, str):
            if name in cls.kinds:
                raise TypeError(f"there is a {cls.family} {name!r} already: {cls.kinds[name].__qualname__}")
            cls.kinds[name] = cls

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return a table of a name and options as the kind of that name, and a kind as it is.

        Raises:
            ValueError: it is none; one line names the option, its value and what is allowed.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{cls.family} is {value!r}: give its name, or a table with its name and options")
        name = value.get("name")
        kind: type[Self] | None = cls.kinds.get(str(name))
        if kind is None:
            if (why := cls.refused.get(str(name))) is not None:
                raise ValueError(f"{cls.family}: there is no {name!r}: {why}")
            raise ValueError(f"{cls.family}: unknown {cls.family} {name!r}{nearest(str(name), cls.kinds)}")
        try:
            return kind.model_validate(dict(value))
        except ValidationError as error:
            raise ValueError(kind._refusal(error.errors(include_url=False)[0])) from None

    def for_several(self) -> None:
        """Check that it knows several metrics.

        Raises:
            ValueError: it compares one number; one line says what else there is.
        """
        if not self.knows_several:
            others = ", ".join(sorted(name for name, kind in self.kinds.items() if kind.knows_several))
            raise ValueError(
                f"--{self.family} {self.name} knows one metric only: with --directions use one of {others}, or "
                "optimise one --metric"
            )

    @classmethod
    def _refusal(cls, first: Mapping[str, Any]) -> str:
        setting = ".".join(map(str, (cls.family, *first["loc"])))
        if first["type"] == "missing":
            name = str(first["loc"][-1])
            example = cls.examples.get(name, "...")
            return f"{setting} is not set: give --{cls.family}-option '{name}={example}', or set it in a spec file"
        if first["type"] == "extra_forbidden":
            options = set(cls.model_fields) - {"name"}
            return f"{setting}: {cls.model_fields['name'].default} has no such option" + (
                nearest(str(first["loc"][-1]), options) if options else "; it takes none"
            )
        return refusal(setting, first)

    @property
    def options(self) -> dict[str, Any]:
        """What is set beside the name."""
        return self.model_dump(exclude={"name"})


def refusal(setting: str, first: Mapping[str, Any]) -> str:
    """Return pydantic's error as a sentence that names the setting, its value and the constraint."""
    if first["type"] == "value_error":
        return f"{setting}: {first['ctx']['error']}"
    return f"{setting} is {first['input']!r}: {must(str(first['msg']))}"


def must(message: str) -> str:
    """Return a message with pydantic's words as part of a sentence: ``it must have at least 1 character``."""
    said = re.sub(r"\b[A-Z]\w+ should (.+?)(, unable to .+| after validation, .+)?$", r"it must \1", message)
    return said.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
