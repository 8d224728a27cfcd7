"""Settings as a user gives them: read from a file or from options, and named in errors as they were given."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hpsearch.search.errors import SearchError
from hpsearch.search.spec.spec import KEY_BY_FLAG

if TYPE_CHECKING:  # a wrong setting is rejected before torch is loaded
    pass


def read_spec_file(path: Path) -> dict[str, Any]:
    """Return the settings in a ``.toml``, ``.yaml`` or ``.yml`` file as JSON types.

    Raises:
        SearchError: the file is missing, has another extension, cannot be parsed, or does not contain a table.
    """
    suffix = path.suffix.lower()
    try:
        text = path.read_text(encoding="utf-8")
        if suffix == ".toml":
            values = tomllib.loads(text)
        elif suffix in {".yaml", ".yml"}:
            values = yaml.safe_load(text)
        else:
            raise SearchError(f"--spec {path}: unknown file type {suffix!r}; use .toml, .yaml or .yml")
    except OSError as error:
        raise SearchError(f"--spec {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SearchError(f"--spec {path}: is not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        raise SearchError(f"--spec {path}: {detail}") from None
    if not isinstance(values, dict):
        raise SearchError(f"--spec {path}: must contain settings such as 'n_trials', not {type(values).__name__}")
    return convert_names_to_tables(values)


def convert_names_to_tables(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, in which a sampler or pruner that is only a name is replaced by ``{"name": NAME}``."""
    short = {key: {"name": settings[key]} for key in ("sampler", "pruner") if isinstance(settings.get(key), str)}
    return {**settings, **short}


def parse_options(flag: str, pairs: list[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs as a dictionary. Values are parsed as YAML scalars (``5``, ``true``, ``0.1``)."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise SearchError(f"{flag} {pair!r} is invalid; write KEY=VALUE, such as n_startup_trials=5")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise SearchError(f"{flag} {pair!r}: the value is not valid YAML; quote it") from None
    return options


# Matches commands too, because their flags are not replaced.
_FLAG = re.compile(r"hpsearch [^:;,]*|OBJECTIVE|--[a-z]+(-(?!option)[a-z]+)*(?![a-z-])")


@contextmanager
def replace_flags_in_errors(keys: Container[str] | None = None) -> Iterator[None]:
    """In the messages of errors in this block, replace the flags of settings by their keys in programs and spec files.

    Args:
        keys: the settings that were given by key, not by flag; None selects all settings.
    """

    def replace_flag(match: re.Match[str]) -> str:
        key = KEY_BY_FLAG.get(match[0], match[0].removeprefix("--").replace("-", "_"))
        return match[0] if match[0].startswith("hpsearch ") or not (keys is None or key in keys) else key

    try:
        yield
    except SearchError as error:
        raise SearchError(_FLAG.sub(replace_flag, str(error))) from None
