"""Samplers of OptunaHub, the community registry of Optuna."""

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

    from hpsearch.objectives.base_objective import BaseObjective

INSTALL_COMMAND = "./hpsearch add optunahub (or: pip install 'hpsearch[optunahub]') on all machines"


class OptunaHub(SamplerSpec):
    """Use a sampler of OptunaHub, given by its package and a commit, so that all workers run the same code.

    A new sampler object is created for each trial, so samplers with state outside of the study do not work.
    """

    name: Literal["optunahub"] = "optunahub"
    package: str
    ref: str
    sampler_class: str | None = None
    arguments: dict[str, Any] = Field(default={})

    examples: ClassVar[Mapping[str, str]] = {"package": "samplers/auto_sampler", "ref": "<40 digits of a commit>"}

    @field_validator("package", "ref", mode="before")
    @classmethod
    def _to_text(cls, given: object) -> object:
        """Convert a commit hash without letters, which YAML reads as a number, to text."""
        return str(given) if isinstance(given, int) and not isinstance(given, bool) else given

    @field_validator("package")
    @classmethod
    def _check_package(cls, given: str) -> str:
        if not re.fullmatch(r"samplers/[A-Za-z0-9_-]+", given):
            raise ValueError(f"{given!r} is not a sampler of OptunaHub; give a folder such as samplers/auto_sampler")
        return given

    @field_validator("ref")
    @classmethod
    def _check_commit(cls, given: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{40}", given):
            raise ValueError(f"{given!r} is not a commit hash; give all 40 digits of a commit of OptunaHub's registry")
        return given

    @property
    def downloaded_code_description(self) -> str:
        return f"{self.package} of OptunaHub at {self.ref}"

    def fit_to_objective(self, objective: BaseObjective) -> Self:
        self.prepare()
        return self

    def prepare(self) -> None:
        self.build(seed=0, common_seed=0, epochs=1)

    def build(self, *, seed: int, common_seed: int, epochs: int) -> BaseSampler:
        sampler_class = _find_class(_load_module(self.package, self.ref), self.sampler_class)
        seeded = {"seed": seed} if "seed" in inspect.signature(sampler_class).parameters else {}
        try:
            sampler: BaseSampler = sampler_class(**{**seeded, **self.arguments})
        except (TypeError, ValueError) as error:
            raise ValueError(f"sampler.arguments: {sampler_class.__name__} rejects these arguments ({error})") from None
        return sampler


@cache
def _load_module(package: str, ref: str) -> ModuleType:
    """Return the module of a package at a commit; the package is downloaded to OptunaHub's cache once per machine."""
    if importlib.util.find_spec("optunahub") is None:
        raise ValueError(f"sampler 'optunahub' needs the package optunahub; install it with {INSTALL_COMMAND}")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # without git, OptunaHub downloads over HTTP
    os.environ.setdefault("GIT_TERMINAL_PROMPT", "0")  # git asks for a password if the repository does not exist
    import optunahub
    from optunahub._conf import cache_home

    lock = Path(cache_home()) / "hpsearch.lock"  # concurrent downloads disturb each other
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock):
            module: ModuleType = optunahub.load_module(package, ref=ref)
    except Exception as error:  # errors of git, GitHub, the network, or the module itself
        folder = Path(cache_home(), "github.com/optuna/optunahub-registry", ref)
        describe = _describe_load_error if (folder / "package" / package).exists() else _describe_fetch_error
        raise ValueError(f"sampler.package {package!r} at {ref} {describe(error, folder)}") from None
    return module


def _describe_load_error(error: Exception, _folder: Path) -> str:
    return f"cannot be loaded from OptunaHub: {_to_one_line(str(error)) or type(error).__name__}"


def _describe_fetch_error(error: Exception, folder: Path) -> str:
    """Return a text with the reason why a package could not be downloaded, and the remedy.

    Args:
        error: error of git, GitHub or the network.
        folder: cache folder of the commit.
    """
    text = _to_one_line(str(getattr(error, "stderr", None) or error))  # git's output, without its command line
    if isinstance(error, FileNotFoundError) or "not our ref" in text or getattr(error, "status", None) in (404, 422):
        return "is not in OptunaHub's registry; give an existing package, and a commit that contains this package"
    why = text.rpartition("fatal: ")[2].strip(" '") or type(error).__name__
    return (
        f"cannot be downloaded from OptunaHub ({why}); connect this machine to github.com, or copy {folder} "
        "from a machine that has it"
    )


def _to_one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _find_class(module: ModuleType, name: str | None) -> type[BaseSampler]:
    from optuna.samplers import BaseSampler

    own = {key: value for key, value in vars(module).items() if inspect.isclass(value)}
    own = {key: value for key, value in own.items() if value.__module__.startswith("optunahub_registry.")}
    found = {key: value for key, value in own.items() if issubclass(value, BaseSampler)}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is None or name not in found:
        given = "is not set" if name is None else f"is {name!r}"
        remedy = f"choose from {', '.join(sorted(found))}" if found else "use a package that has a sampler"
        raise ValueError(f"sampler.sampler_class {given}; {remedy}")
    return found[name]
