"""Search by a sampler of OptunaHub, the registry of samplers that Optuna's users share."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from filelock import FileLock
from pydantic import Field, field_validator

from hpsearch.search.samplers.base import SamplerSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from optuna.samplers import BaseSampler

    from hpsearch.objectives.objective import BaseObjective

INSTALL = "./hpsearch add optunahub (or: pip install 'hpsearch[optunahub]') on all machines"


class OptunaHub(SamplerSpec):
    """A sampler of OptunaHub by its package and a commit of the registry, so that all workers run the same code.

    It is built anew for each trial: one that keeps what it learns in itself, and not in the study, learns nothing.
    """

    name: Literal["optunahub"] = "optunahub"
    package: str
    ref: str
    sampler_class: str | None = None
    arguments: dict[str, Any] = Field(default={})

    examples: ClassVar[Mapping[str, str]] = {"package": "samplers/auto_sampler", "ref": "<40 digits of a commit>"}

    @field_validator("package", "ref", mode="before")
    @classmethod
    def _text(cls, given: object) -> object:
        """YAML reads a commit of digits alone as a number."""
        return str(given) if isinstance(given, int) and not isinstance(given, bool) else given

    @field_validator("package")
    @classmethod
    def _package(cls, given: str) -> str:
        if not re.fullmatch(r"samplers/[A-Za-z0-9_-]+", given):
            raise ValueError(f"{given!r} is no sampler of OptunaHub: give its folder, such as samplers/auto_sampler")
        return given

    @field_validator("ref")
    @classmethod
    def _commit(cls, given: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{40}", given):
            raise ValueError(
                f"{given!r} is no commit of OptunaHub's registry: give its 40 digits, so that all workers run the same "
                "code"
            )
        return given

    def for_objective(self, objective: BaseObjective) -> Self:
        self.prepare()
        return self

    def prepare(self) -> None:
        self.build(seed=0, common_seed=0, epochs=1)

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        made = _class_in(_loaded(self.package, self.ref), self.sampler_class)
        seeded = {"seed": seed} if "seed" in inspect.signature(made).parameters else {}
        try:
            sampler: BaseSampler = made(**{**seeded, **self.arguments})
        except (TypeError, ValueError) as error:
            raise ValueError(f"sampler.arguments: {made.__name__} refuses them ({error})") from None
        return sampler


@cache
def _loaded(package: str, ref: str) -> ModuleType:
    """The package at a commit: fetched once per machine, into OptunaHub's cache."""
    if importlib.util.find_spec("optunahub") is None:
        raise ValueError(f"sampler 'optunahub' needs the package optunahub: {INSTALL}")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # a machine without git goes another way
    os.environ.setdefault("GIT_TERMINAL_PROMPT", "0")  # a registry that is not there asks for a password
    import optunahub
    from optunahub._conf import cache_home

    lock = Path(cache_home()) / "hpsearch.lock"  # two that fetch at once disturb each other
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock):
            module: ModuleType = optunahub.load_module(package, ref=ref)
    except Exception as error:  # what git, GitHub, a network or somebody's module raises
        folder = Path(cache_home(), "github.com/optuna/optunahub-registry", ref)
        what = _not_fetched(error, folder) if not (folder / "package" / package).exists() else _not_loaded(error)
        raise ValueError(f"sampler.package {package!r} at {ref} {what}") from None
    return module


def _not_loaded(error: Exception) -> str:
    return f"cannot be loaded from OptunaHub: {_in_one_line(str(error)) or type(error).__name__}"


def _not_fetched(error: Exception, folder: Path) -> str:
    """Say why a package did not come, and what would do; `folder` would have it, and others of that commit."""
    told = _in_one_line(str(getattr(error, "stderr", None) or error))  # of git, what it wrote, without its command line
    if isinstance(error, FileNotFoundError) or "not our ref" in told or getattr(error, "status", None) in (404, 422):
        return "is not in OptunaHub's registry: give the folder of one that is there, and a commit that has it"
    why = told.rpartition("fatal: ")[2].strip(" '") or type(error).__name__
    return (
        f"cannot be fetched from OptunaHub ({why}): connect this machine to github.com, or copy {folder} "
        "from a machine that has it"
    )


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _class_in(module: ModuleType, name: str | None) -> type[BaseSampler]:
    from optuna.samplers import BaseSampler

    found = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, BaseSampler)
        and value.__module__.startswith("optunahub_registry.")
    }
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is None or name not in found:
        given = "is not set" if name is None else f"is {name!r}"
        raise ValueError(f"sampler.sampler_class {given}: choose from {', '.join(sorted(found)) or 'none'}")
    return found[name]
