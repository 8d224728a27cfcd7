"""The base class of samplers and pruners. A spec selects a sampler and a pruner by name, with options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hpsearch.search.errors import suggest_names


def _no_switch(given: Any) -> Any:
    """Return a boolean as text, so that pydantic rejects it instead of converting it to 0 or 1."""
    return str(given).lower() if isinstance(given, bool) else given


# Not strict, because the value of a flag is text.
Number = Annotated[float, Field(strict=False, allow_inf_nan=False), BeforeValidator(_no_switch)]


class Options(BaseModel):
    """Immutable settings. Pydantic does not convert types and rejects unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RegisteredOptions(Options):
    """A sampler or pruner with its options. A subclass whose field `name` has a default is registered under this name.

    Attributes:
        family: `sampler` or `pruner`, for messages. Direct subclasses set it.
        registry: the registered subclasses of the family, by name.
        examples: example values of required options, by name.
        can_be_multi_objective: whether the sampler or pruner supports several metrics.
    """

    family: ClassVar[str]
    registry: ClassVar[dict[str, type[Any]]]
    examples: ClassVar[Mapping[str, str]] = {}
    can_be_multi_objective: ClassVar[bool] = True
    name: str

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        name = cls.model_fields["name"].default
        if RegisteredOptions in cls.__bases__:
            cls.registry = {}
        elif isinstance(name, str):
            if name in cls.registry:
                raise TypeError(f"{cls.family} {name!r} is already registered by {cls.registry[name].__qualname__}")
            cls.registry[name] = cls

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return the sampler or pruner for a dictionary with `name` and options; return an instance unchanged.

        Raises:
            ValueError: the name is unknown, or an option is invalid.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{cls.family} is {value!r}; give a name, or a table with name and options")
        name = value.get("name")
        kind: type[Self] | None = cls.registry.get(str(name))
        if kind is None:
            raise ValueError(f"{cls.family}: unknown {cls.family} {name!r}{suggest_names(str(name), cls.registry)}")
        try:
            return kind.model_validate(dict(value))
        except ValidationError as error:
            raise ValueError(kind._format_error(error.errors(include_url=False)[0])) from None

    def check_multi_objective(self) -> None:
        """Check that the sampler or pruner supports several metrics.

        Raises:
            ValueError: it supports only one metric.
        """
        if not self.can_be_multi_objective:
            others = ", ".join(sorted(name for name, kind in self.registry.items() if kind.can_be_multi_objective))
            raise ValueError(
                f"--{self.family} {self.name} supports a single metric; with --directions use one of {others}, or "
                "replace --directions with one --metric"
            )

    @classmethod
    def _format_error(cls, first: Mapping[str, Any]) -> str:
        setting = ".".join(map(str, (cls.family, *first["loc"])))
        if first["type"] == "missing":
            name = str(first["loc"][-1])
            example = cls.examples.get(name, "...")
            return f"{setting} is not set; give --{cls.family}-option '{name}={example}', or set it in a spec file"
        if first["type"] == "extra_forbidden":
            options = set(cls.model_fields) - {"name"}
            return f"{setting}: {cls.model_fields['name'].default} has no such option" + (
                suggest_names(str(first["loc"][-1]), options) if options else f"; remove {setting}"
            )
        return format_validation_error(setting, first)

    @property
    def options(self) -> dict[str, Any]:
        """The options as a dictionary, without the name."""
        return self.model_dump(exclude={"name"})


def format_validation_error(setting: str, first: Mapping[str, Any]) -> str:
    """Return a pydantic error as one line with the setting, its value and the constraint."""
    if first["type"] == "value_error":
        return f"{setting}: {first['ctx']['error']}"
    return f"{setting} {rephrase_error(str(first['msg'])).removeprefix('it ')}, not {first['input']!r}"


def rephrase_error(message: str) -> str:
    """Return a pydantic message as a clause: ``it must have at least 1 character``."""
    clause = re.sub(r"\b[A-Z]\w+ should (.+?)(, unable to .+| after validation, .+)?$", r"it must \1", message)
    clause = clause.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return clause.replace("greater than", "above").replace("less than", "below")
