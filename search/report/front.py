"""The front of a study of several metrics in its report: the figure, the table, and what the head says."""

from __future__ import annotations

from typing import Any

from hpsearch.search.console import counted
from hpsearch.search.report.volume import Volume
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, format_value
from hpsearch.storage.attributes import RUN_URL

_ROWS = 200  # of the table


def front_figure(study: StoredStudy, summary: Summary) -> dict[str, Any]:
    """Return what the page's script draws beside the trials, fit for JSON."""
    names = list(study.spec.ways)
    return {
        "metrics": [{"name": name, "maximize": way == "maximize"} for name, way in study.spec.ways.items()],
        "trials": [trial.number for trial in summary.front],
        "bounds": [
            {"metric": names.index(bound.metric), "limit": bound.limit, "text": str(bound)}
            for bound in study.spec.bounds
            if bound.metric in names
        ],
    }


def front_section(study: StoredStudy, summary: Summary, names: list[str], found: Volume | None) -> dict[str, Any]:
    """Return what the page says of the front.

    Args:
        study: of several metrics.
        summary: of it.
        names: of the parameters that have a column.
        found: the hypervolume over epochs, if there is one.
    """
    spec = study.spec
    undrawn = [str(bound) for bound in spec.bounds if bound.metric not in spec.ways]
    return {
        "metrics": list(spec.ways),
        "numbers": {trial.number for trial in summary.front},
        "rows": [
            {
                "number": trial.number,
                "url": trial.user_attrs.get(RUN_URL),
                "values": [(format_value(value), value) for value in trial.values],
                "params": [_parameter(trial.params.get(name, "")) for name in names],
            }
            for trial in summary.front[:_ROWS]
        ],
        "left": max(len(summary.front) - _ROWS, 0),
        "undrawn": " and ".join(undrawn),
        "reference": None if found is None else ", ".join(map(_at, spec.ways, found.reference)),
    }


def _at(name: str, value: float) -> str:
    return f"{name} {format_value(value)}"


def _parameter(value: Any) -> tuple[str, Any]:
    return format_value(value), value if isinstance(value, float) else None


def headline(study: StoredStudy, summary: Summary) -> str:
    """Return what came of a study of several metrics, in a sentence; of one that has a front."""
    metrics = list(study.spec.ways)
    named = f"{', '.join(metrics[:-1])} and {metrics[-1]}"
    trials, many = counted(summary.finished, "trial"), len(summary.front)
    if many == 1:
        return f"The front in {named} is trial {summary.front[0].number} alone, out of {trials}."
    return f"The front in {named} has {many} of {trials}: none of them is dominated by another trial."


def cards(study: StoredStudy, summary: Summary) -> list[tuple[str, str]]:
    """Return the numbers at the head of the page: how many are on the front, and the best of each metric."""
    if not summary.front:
        return []
    found = [(str(len(summary.front)), f"on the front, of {counted(summary.complete, 'complete trial')}")]
    for place, (name, way) in enumerate(study.spec.ways.items()):
        sign = -1 if way == "maximize" else 1
        best = min(summary.front, key=lambda trial: (sign * trial.values[place], trial.number))
        found.append((format_value(best.values[place]), f"best {name} on the front, trial {best.number}"))
    return found
