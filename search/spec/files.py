"""Read a spec from TOML, YAML or JSON."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

from hpsearch.search.errors import SearchError


def read_spec_file(path: Path) -> dict[str, Any]:
    """Return the settings in `path` (``.toml``, ``.yaml`` or ``.yml``) as plain types.

    Raises:
        SearchError: the file is missing, cannot be parsed, is of another type, or is not a table of settings.
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
        raise SearchError(f"--spec {path}: must hold settings such as 'n_trials', not {type(values).__name__}")
    return named(values)


def named(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a table for a sampler and a pruner that were given by their name alone."""
    short = {key: {"name": settings[key]} for key in ("sampler", "pruner") if isinstance(settings.get(key), str)}
    return {**settings, **short}


def parse_options(flag: str, pairs: list[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs as a dictionary; values are read as YAML scalars (``5``, ``true``, ``0.1``)."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise SearchError(f"{flag} {pair!r}: write it as KEY=VALUE, such as n_startup_trials=5")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise SearchError(f"{flag} {pair!r}: the value cannot be read") from None
    return options
