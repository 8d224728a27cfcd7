"""The settings of a study as somebody gives them, before anything is loaded or started."""

from __future__ import annotations

from typing import Any

from hpsearch.search.errors import SearchError
from hpsearch.search.spec.several import USUAL
from hpsearch.search.spec.spec import parse_spec, usual_trials, with_room


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse wrong settings before anything is loaded or started; what the objective fills in stands in here."""
    if "finalists_of" in settings:
        raise SearchError("finalists_of cannot be set: leave it out; hpsearch finalists STUDY, after a search, sets it")
    stand_in: dict[str, Any] = {"name": "x", "epochs": 1_000_000}
    if not settings.get("directions"):
        stand_in |= {"metric": settings.get("metric", "x"), "direction": "maximize"}
    known = {key: value for key, value in settings.items() if key not in USUAL}
    for key in USUAL.keys() & settings.keys():
        given = settings[key]
        if isinstance(given, dict) and "name" not in given:
            continue  # whose options they are is known with the objective, or the study that is joined
        # So is which metrics there are.
        known[key] = {name: given[name] for name in given if name != "metric"} if isinstance(given, dict) else given
    parse_spec({**stand_in, "n_trials": usual_trials(settings, 1_000_000), **with_room(known)})
