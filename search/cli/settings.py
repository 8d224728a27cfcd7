"""From a spec file and flags to the settings of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search.errors import SearchError
from search.spec.spec import StudySpec
from search.spec.spec_file import parse_options, read_spec_file


def gather_settings(
    spec_file: Path | None,
    *,
    sampler: str | None,
    sampler_option: list[str] | None,
    pruner: str | None,
    pruner_option: list[str] | None,
    **flags: Any,
) -> dict[str, Any]:
    """Return the settings that were given: the file's, with the flags laid over them."""
    settings = read_spec_file(spec_file) if spec_file else {}
    settings |= {key: value for key, value in flags.items() if value is not None}
    for key, name, pairs in (("sampler", sampler, sampler_option), ("pruner", pruner, pruner_option)):
        options = parse_options(f"--{key}-option", pairs or [])
        if name is None and not options:
            continue
        kept = settings.get(key, {})
        if not isinstance(kept, dict):
            raise SearchError(f"{key} is {kept!r}: give its name, or a table with its name and options")
        if name is not None and name != kept.get("name"):
            kept = {"name": name}
        default = StudySpec.model_fields[key].default.name
        settings[key] = {"name": default, **kept, **options}
    if "objective" not in settings:
        raise SearchError("OBJECTIVE is missing: name one, such as digits, or give --spec FILE with 'objective'")
    return settings
