"""The settings, as tables: of a study, of its sampler and pruner, of a training run, of the environment."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

from pydantic.fields import FieldInfo

from docs.tools.command_line import command_of, commands
from docs.tools.markdown import code, table, words_of
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.reports import report
from hpsearch.search.spec.defaults import EXCEPTIONS
from hpsearch.search.spec.spec import StudySpec, get_option_name
from hpsearch.search.worker.options import WorkerOptions

FROM_THE_OBJECTIVE = {"name", "metric", "direction", "n_trials", "epochs"}


def study_settings() -> str:
    """The settings of a study: how a spec file and `run` name them, and what they may be."""
    schema = StudySpec.model_json_schema()
    options = {option.name: option for option in command_of("run").params}
    rows = []
    for key, field in StudySpec.model_fields.items():
        option = options.get(key)
        if not (words := describe(key)):
            continue  # the version, and what `finalists` sets
        flag = get_option_name(key) if option else ""
        default = "the objective's" if key in FROM_THE_OBJECTIVE else _default(field)
        if key in EXCEPTIONS:
            default += f"; {EXCEPTIONS[key]}"
        rows.append((code(flag), f"`{key}`", _allowed(schema, schema["properties"][key]), default, words))
    return table(("flag", "key", "type", "default", "what it does"), rows)


def describe(key: str) -> str:
    """Return the description of a setting of a study or of a worker; "" for a stored field without a flag."""
    fields = StudySpec.model_fields | WorkerOptions.model_fields
    if (description := fields[key].description) is None:
        description = {option.name: option.help for option in command_of("run").params}.get(key)
    return re.sub(r"  \[(default: .*)\]$", "" if key in StudySpec.model_fields else r" (\1)", description or "")


def choices(kind: str) -> str:
    """The samplers or the pruners: each by its name, with its options and their defaults."""
    field = StudySpec.model_fields[kind]
    registered = getattr(type(field.default), "registry", {})
    rows = []
    for model in registered.values() or get_args(field.annotation):
        options = []
        for name, field in model.model_fields.items():
            if name != "name":
                options.append(f"`{name}` {_default(field)}")
        rows.append((f"`{model.model_fields['name'].default}`", words_of(model), ", ".join(options) or "none"))
    return table((kind, "what it does", "options and defaults"), rows)


def training_settings() -> str:
    """Every field of a `TrainConfig`, with the class's own words."""
    rows = []
    for item in report.list_settings(TrainConfig()):
        rows.append((f"`{item.name}`", item.type.replace("|", "or"), _value(item.value), item.help))
    return table(("setting", "type", "default", "what it does"), rows)


def environment() -> str:
    """Environment variables that stand for a flag."""
    found: dict[str, tuple[str, str, set[str]]] = {}
    for verb, command in commands():
        for option in command.params:
            if isinstance(name := getattr(option, "envvar", None), str):
                words = re.sub(r"  \[(default: .*)\]$", r" (\1)", option.help)
                found.setdefault(name, (option.opts[0], words, set()))[2].add(verb)
    return table(
        ("variable", "flag", "what it is"),
        [(f"`{name}`", f"`{flag}`", words) for name, (flag, words, _) in sorted(found.items())],
    )


def _default(field: FieldInfo) -> str:
    """A default as JSON has it; of a model its name."""
    if field.is_required():
        return "required"
    return _value(getattr(field.get_default(call_default_factory=True), "name", field.default))


def _value(value: Any) -> str:
    return "none" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _allowed(schema: dict[str, Any], of: dict[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in of:
        return ", or ".join(_allowed(schema, part) for part in of["anyOf"])
    if not {"enum", "type"} & of.keys():
        return "a name, or a table with `name` and options"
    if "enum" in of:
        return ", ".join(f"`{value}`" for value in of["enum"])
    if of.get("type") == "array":
        return f"list of {_allowed(schema, of['items'])}"
    words = {"null": "none", "string": "text"}.get(of["type"], of["type"])
    bounds = {"minimum": "from", "maximum": "to", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
    said = [f"{word} {of[key]:,}" for key, word in bounds.items() if key in of]
    if "maxLength" in of:
        said.append(f"up to {of['maxLength']} characters")
    return " ".join([words, *said])
