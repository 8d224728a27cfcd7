"""Check the settings from the user, and resolve them to the spec of a new or stored study."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError, as_search_error
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.spec.multi_objective import parse_constraints, resolve_metrics
from hpsearch.search.spec.spec import BUDGETS, KEY_BY_FLAG, MAX_TRIALS, StudySpec, get_option_name, parse_spec

if TYPE_CHECKING:  # a wrong setting is rejected before torch is loaded
    from hpsearch.objectives.base_objective import BaseObjective


_NAMED_KINDS = frozenset({"sampler", "pruner"})


def convert_names_to_tables(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, in which a sampler or pruner that is only a name is replaced by ``{"name": NAME}``."""
    short = {key: {"name": settings[key]} for key in _NAMED_KINDS if isinstance(settings.get(key), str)}
    return {**settings, **short}


def parse_options(flag: str, pairs: list[str], *, example: str = "n_startup_trials=5") -> dict[str, Any]:
    """Return ``KEY=VALUE`` pairs as a dictionary. Values are parsed as YAML scalars (``5``, ``true``, ``0.1``)."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise SearchError(f"{flag} {pair!r} is invalid; write KEY=VALUE, such as {example}")
        try:
            options[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError):  # the others: a tag such as !!int
            raise SearchError(f"{flag} {pair!r}: the value is not valid YAML; quote the value") from None
    return options


# Matches commands too, because their flags are not replaced.
_FLAG = re.compile(r"hpsearch [^:;,]*|OBJECTIVE|--[a-z]+(-(?!option)[a-z]+)*(?![a-z-])")


@contextmanager
def replace_flags_in_errors(keys: Container[str] | None = None, file: Path | None = None) -> Iterator[None]:
    """In the messages of errors in this block, replace the flags of settings by their keys in programs and spec files.

    Args:
        keys: the settings that were given by key, not by flag; None selects all settings.
        file: spec file with these settings, which the messages about them name.
    """

    def replace_flag(match: re.Match[str]) -> str:
        key = KEY_BY_FLAG.get(match[0], match[0].removeprefix("--").replace("-", "_"))
        return match[0] if match[0].startswith("hpsearch ") or not (keys is None or key in keys) else key

    try:
        yield
    except SearchError as error:
        text = _FLAG.sub(replace_flag, str(error))
        first = re.match(r"(?:unknown setting )?'?(\w+)", text)
        is_in_file = file is not None and keys is not None and first is not None and first[1] in keys
        raise SearchError(f"--spec {file}: {text}" if is_in_file else text) from None


def check_settings(settings: dict[str, Any]) -> None:
    """Reject invalid settings before the objective is loaded and services are started.

    Placeholders replace the values that the objective or the stored study will supply.

    Raises:
        SearchError: a setting is invalid.
    """
    if "finalists_of" in settings:
        raise SearchError("finalists_of cannot be set; remove it, and use hpsearch finalists STUDY after the search")
    placeholders: dict[str, Any] = {
        "name": "x",
        "epochs": 1_000_000,
        "n_trials": _count_configurations(settings) or 1_000_000,
    }
    if not settings.get("directions"):
        placeholders |= {"metric": settings.get("metric", "x"), "direction": "maximize"}
    known = dict(settings)
    for key in _NAMED_KINDS & settings.keys():
        if isinstance(given := settings[key], dict):
            if "name" not in given:  # the kind is that of the stored study, or depends on the objective's metrics
                del known[key]
            else:  # the metric depends on the objective too
                known[key] = {name: value for name, value in given.items() if name != "metric"}
    parse_spec({**placeholders, **_cap_n_trials(known)})


def resolve_spec(given: dict[str, Any], objective: BaseObjective, stored: StudySpec | None = None) -> StudySpec:
    """Return the spec of a new or stored study for the given settings.

    Args:
        given: checked settings. If a sampler or pruner has options but no name, the name is that of the stored study,
            or for a new study the default.
        objective: source of the defaults of a new study.
        stored: spec of the study to join; None for a new study.

    Raises:
        SearchError: a setting is invalid, or differs from the stored spec; the message lists all differences.
    """
    if stored is None:
        has_other_budget = bool({"budget_epochs", "budget_seconds"} & given.keys())
        trials = _count_configurations(given) or (MAX_TRIALS if has_other_budget else objective.n_trials)
        defaults = {"name": objective.name, "epochs": objective.epochs, "n_trials": trials}
        spec = parse_spec({**defaults, **_cap_n_trials(given), **resolve_metric_settings(given, objective)})
        _check_sampler_and_pruner(spec)  # only here, so that existing studies keep their settings
        return spec if has_other_budget or "n_trials" in given else _convert_to_epochs(spec)
    before = stored.model_dump()
    merged = {**before, **given}
    if given.get("directions") is not None:  # first, because the stored pruner may support one metric only
        directions = {"directions": resolve_metrics({"directions": given["directions"]})["directions"]}
        _require_same(stored, list_differences(before, directions))
        if "metric" not in given:
            del merged["metric"], merged["direction"]
    for key in _NAMED_KINDS & given.keys():
        options = given[key]
        if isinstance(options, dict) and options.get("name", before[key]["name"]) == before[key]["name"]:
            merged[key] = {**before[key], **options}
    spec = parse_spec(merged)
    _require_same(stored, list_differences(before, spec.model_dump()), spec)
    return spec


def _check_sampler_and_pruner(spec: StudySpec) -> None:
    """Reject a pruner that pauses trials if the sampler does not use paused trials.

    Raises:
        SearchError: the combination is not available.
    """
    if spec.sampler.can_use_paused_trials or spec.pruner.get_rung_schedule(spec.epochs) is None:
        return
    names = ", ".join(sorted(name for name, kind in SamplerSpec.registry.items() if kind.can_use_paused_trials))
    raise SearchError(
        f"--sampler {spec.sampler.name} is not available with --pruner {spec.pruner.name}, because it does not use "
        f"paused trials; use --pruner none, or one of the samplers {names}"
    )


def _convert_to_epochs(spec: StudySpec) -> StudySpec:
    """Return the spec with the default budget in the epochs of `n_trials` full trials, if its pruner pauses trials.

    With such a pruner most trials end after a few epochs, so `n_trials` trials would use a small part of the epochs. In
    population-based training, all trials train all epochs.
    """
    if spec.pruner.get_rung_schedule(spec.epochs) is None or spec.pruner.shares_checkpoints:
        return spec
    return parse_spec({**spec.model_dump(), "n_trials": MAX_TRIALS, "budget_epochs": spec.n_trials * spec.epochs})


def resolve_metric_settings(given: dict[str, Any], objective: BaseObjective) -> dict[str, Any]:
    """Return metric, direction, directions and constraints; the objective supplies those that the settings lack.

    Raises:
        SearchError: the settings contradict each other.
    """
    from hpsearch.objectives.training.evaluation.metrics import DIRECTIONS

    directions = given.get("directions", dict(objective.directions) if "metric" not in given else None)
    named = {key: value for key, value in given.items() if key in {"metric", "direction"}}
    with as_search_error():
        resolved = resolve_metrics({**named, "directions": directions})
        constraints = parse_constraints(given.get("constraints", dict(objective.constraints)))
    metric = resolved.setdefault("metric", objective.metric)
    default = objective.direction if metric == objective.metric else DIRECTIONS.get(metric, objective.direction)
    return {"direction": default, **resolved, "constraints": constraints}


def _require_same(stored: StudySpec, lines: list[str], spec: StudySpec | None = None) -> None:
    """Raise a SearchError if there are differences from a stored spec.

    Args:
        stored: spec of the study to join.
        lines: the differences.
        spec: the requested spec, from which the message suggests a command that changes the budget; None if unknown.
    """
    if not lines:
        return
    larger = [key for key in BUDGETS if spec and (getattr(spec, key) or 0) > (getattr(stored, key) or math.inf)]
    option = [f"{word}" for key in larger[:1] for word in (get_option_name(key), getattr(spec, key))]
    more = f"; to enlarge its budget, use {format_command('extend', stored.name, *option)}" if larger else ""
    raise SearchError(
        f"study {stored.name!r} exists with other settings ({'; '.join(lines)}); remove these settings to continue "
        f"the study, or choose another --name{more}"
    )


def list_differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return one line per setting of `wanted` that differs from `stored`: ``n_trials: 24 -> 50``."""
    lines = []
    for key in sorted(wanted):
        before, after = stored.get(key), wanted[key]
        # Options of the same sampler or pruner.
        if isinstance(before, dict) and isinstance(after, dict) and "name" in after and before["name"] == after["name"]:
            lines += [f"{key}.{line}" for line in list_differences(before, after)]
        elif before != after or (key == "directions" and before and list(before) != list(after)):  # the order matters
            lines.append(f"{key}: {_format_setting(before)} -> {_format_setting(after)}")
    return lines


def _format_setting(value: Any) -> str:
    if isinstance(value, dict) and "name" not in value:
        return ", ".join(f"{metric} {of_metric}" for metric, of_metric in value.items())
    return repr(value)


def _count_configurations(settings: dict[str, Any]) -> int | None:
    """Return the number of configurations that the sampler can suggest; None if it is unlimited or unknown."""
    try:
        return SamplerSpec.parse(settings["sampler"]).max_trials() if "sampler" in settings else None
    except ValueError:  # reported when the settings are parsed
        return None


def _cap_n_trials(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, in which `n_trials` is at most the number of configurations that the sampler can suggest.

    A too large `n_trials` is not an error here, so that errors in a grid, which is checked later, are reported first.
    """
    trials, limit = settings.get("n_trials"), _count_configurations(settings)
    return {**settings, "n_trials": limit} if limit and isinstance(trials, int) and trials > limit else settings
