"""Preferences that select a trial of the Pareto front, such as ``accuracy >= 0.98 then latency_ms``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.study.study import StoredStudy

_CONDITION = re.compile(r"(?P<metric>[^<>=]+?)\s*(?P<sign><=|>=|<|>)\s*(?P<limit>[^<>=\s]+)")


_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


_MAX_NEAREST = 3  # trials in the message if no trial satisfies the preference


@dataclass(frozen=True)
class Condition:
    """Bound on a metric in a preference: ``accuracy >= 0.98``."""

    metric: str
    operator: str
    limit: float

    def is_satisfied(self, values: Mapping[str, float]) -> bool:
        """Return whether `values`, by metric, satisfy the condition."""
        return bool(_OPERATORS[self.operator](values[self.metric], self.limit))

    def violation(self, values: Mapping[str, float]) -> float:
        """Return the amount by which `values` violate the condition; 0 if the values satisfy the condition."""
        return 0.0 if self.is_satisfied(values) else abs(values[self.metric] - self.limit)


def parse_preference(text: str, metrics: Sequence[str]) -> tuple[list[Condition], list[str]]:
    """Return the conditions of a preference, and the metrics by which it ranks the trials that satisfy all conditions.

    Args:
        text: a preference such as ``accuracy >= 0.98 and model_mb <= 10 then latency_ms``.
        metrics: the metrics of the study.

    Raises:
        SearchError: the text has a syntax error, or names a metric that the study does not have.
    """
    conditions: list[Condition] = []
    then: list[str] = []
    for part in re.split(r"\s+then\s+|\s+and\s+|\s*,\s*", text.strip()):
        match = _CONDITION.fullmatch(part.strip())
        metric = match["metric"].strip() if match else part.strip()
        if metric not in metrics:
            raise SearchError(
                f"--prefer {text!r}: {part.strip()!r} is not a condition; write conditions, then metrics, such as "
                f"'accuracy >= 0.98 and model_mb <= 10 then latency_ms', with the metrics {', '.join(metrics)}"
            )
        if match is None:
            then.append(metric)
            continue
        conditions.append(Condition(metric, match["sign"], _parse_limit(text, match["limit"])))
    return conditions, then or [metrics[0]]


def _parse_limit(text: str, given: str) -> float:
    with suppress(ValueError):
        limit = float(given)
        if not math.isnan(limit):
            return limit
    raise SearchError(f"--prefer {text!r}: {given!r} is not a number; write a condition such as 'accuracy >= 0.98'")


def select_preferred(study: StoredStudy, text: str, *, infeasible: bool = False) -> int:
    """Return the number of the trial on the Pareto front that the preference `text` selects.

    If the study has finalists with results, the preference applies to the Pareto front of their means on new seeds.

    Raises:
        SearchError: the preference cannot be parsed, no trial satisfies it, or the study has one metric.
    """
    spec = study.spec
    if not spec.is_multi_objective:
        raise SearchError(f"--prefer: study {spec.name!r} has one metric, {spec.metric}; replace --prefer with --trial")
    conditions, then = parse_preference(text, list(spec.direction_by_metric))
    found = read_front(study, read_finalists(study), infeasible=infeasible)
    if not found:
        raise SearchError(f"study {spec.name!r} has no trial to select: {describe_no_candidate(study)}")
    kept = {trial: values for trial, values in found.items() if all(each.is_satisfied(values) for each in conditions)}
    if not kept:
        raise SearchError(f"--prefer {text!r}: no Pareto-optimal trial matches; {_describe_nearest(found, conditions)}")
    signs = {name: -1 if direction == "maximize" else 1 for name, direction in spec.direction_by_metric.items()}
    return min(kept, key=lambda trial: ([signs[name] * kept[trial][name] for name in then], trial))


def read_front(study: StoredStudy, finalists: Finalists | None, *, infeasible: bool) -> dict[int, dict[str, float]]:
    """Return the values of each trial on the Pareto front; with finalists, the front and the values of their means."""
    names = list(study.spec.direction_by_metric)
    if finalists is not None and finalists.front:
        return {trial: dict(zip(names, finalists.get_row(trial).means, strict=True)) for trial in finalists.front}
    return {trial.number: dict(zip(names, trial.values, strict=True)) for trial in study.front(infeasible=infeasible)}


def _describe_nearest(found: Mapping[int, Mapping[str, float]], conditions: Sequence[Condition]) -> str:
    """Return a text with the trials whose violations, relative to the metric's range on the front, are the smallest."""
    metrics = {each.metric for each in conditions}
    span = {name: max(v[name] for v in found.values()) - min(v[name] for v in found.values()) for name in metrics}

    def sum_violations(trial: int) -> float:
        return sum(each.violation(found[trial]) / (span[each.metric] or 1.0) for each in conditions)

    nearest = sorted(found, key=lambda trial: (sum_violations(trial), trial))[:_MAX_NEAREST]
    lines = (f"trial {t} ({', '.join(f'{name} {value:.4g}' for name, value in found[t].items())})" for t in nearest)
    return f"the nearest are {', '.join(lines)}"


def describe_no_candidate(study: StoredStudy) -> str:
    """Return why no trial of a study can be promoted, and the remedy."""
    if study.best_trials(infeasible=True):
        return "all complete trials violate a constraint; promote one with --infeasible"
    return "no trial is complete"
