"""Which trial of a front: by a sentence such as ``accuracy >= 0.98 then latency_ms``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import read_finalists
from hpsearch.search.promotion.promote import why_none
from hpsearch.search.study.study import StoredStudy

_CONDITION = re.compile(r"(?P<metric>[^<>=]+?)\s*(?P<sign><=|>=|<|>)\s*(?P<limit>[^<>=\s]+)")
_SIGNS = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    ">": lambda value, limit: value > limit,
}
_NEAREST = 3  # trials that are named where none will do


@dataclass(frozen=True)
class Condition:
    """What a metric has to be: ``accuracy >= 0.98``."""

    metric: str
    sign: str
    limit: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether a trial's values keep to it."""
        return bool(_SIGNS[self.sign](values[self.metric], self.limit))

    def missed(self, values: Mapping[str, float]) -> float:
        """By how much they do not."""
        return 0.0 if self.holds(values) else abs(values[self.metric] - self.limit)


@dataclass(frozen=True)
class Preference:
    """Conditions, and the metrics by which the best of those is taken that keep to them, one after the other."""

    conditions: tuple[Condition, ...]
    then: tuple[str, ...]


def parse_preference(text: str, ways: Sequence[str]) -> Preference:
    """Return what a sentence says: conditions with `and` between, and metrics, with `then` between.

    Args:
        text: such as ``accuracy >= 0.98 and model_mb <= 10 then latency_ms``.
        ways: the metrics of the study.

    Raises:
        SearchError: it cannot be read, or names another metric.
    """
    conditions: list[Condition] = []
    then: list[str] = []
    for part in re.split(r"\s+then\s+|\s+and\s+|\s*,\s*", text.strip()):
        match = _CONDITION.fullmatch(part.strip())
        metric = match["metric"].strip() if match else part.strip()
        if metric not in ways:
            raise SearchError(
                f"--prefer {text!r}: {part.strip()!r} cannot be read: write conditions with 'and' between, then "
                f"metrics, such as 'accuracy >= 0.98 then latency_ms'; the metrics to prefer by are {', '.join(ways)}"
            )
        if match is None:
            then.append(metric)
            continue
        conditions.append(Condition(metric, match["sign"], _limit(text, match["limit"])))
    return Preference(tuple(conditions), tuple(then) or (ways[0],))


def _limit(text: str, given: str) -> float:
    with suppress(ValueError):
        limit = float(given)
        if not math.isnan(limit):
            return limit
    raise SearchError(f"--prefer {text!r}: {given!r} is no number: write it as in 'accuracy >= 0.98'")


def preferred(study: StoredStudy, text: str, *, infeasible: bool = False) -> int:
    """Return the number of the trial of a study's front that a sentence prefers.

    Where finalists have been trained they are those that are still on the front, by their means on fresh seeds.

    Raises:
        SearchError: the sentence cannot be read, no trial keeps to it, or there is one metric alone.
    """
    spec = study.spec
    if not spec.several:
        raise SearchError(f"--prefer: study {spec.name!r} has one metric, {spec.metric}: leave it out, or give --trial")
    preference = parse_preference(text, list(spec.ways))
    found = _candidates(study, infeasible=infeasible)
    if not found:
        raise SearchError(f"study {spec.name!r} has no trial to prefer: {why_none(study)}")
    kept = {
        trial: values for trial, values in found.items() if all(each.holds(values) for each in preference.conditions)
    }
    if not kept:
        raise SearchError(f"--prefer {text!r}: no trial of the front is so; {_closest(found, preference)}")
    signs = {name: -1 if way == "maximize" else 1 for name, way in spec.ways.items()}
    return min(kept, key=lambda trial: ([signs[name] * kept[trial][name] for name in preference.then], trial))


def _candidates(study: StoredStudy, *, infeasible: bool) -> dict[int, dict[str, float]]:
    """The trials of the front with their values, by fresh seeds where there are any."""
    names, finalists = list(study.spec.ways), read_finalists(study)
    if finalists is not None and finalists.front:
        return {trial: dict(zip(names, finalists.row(trial).means, strict=True)) for trial in finalists.front}
    return {trial.number: dict(zip(names, trial.values, strict=True)) for trial in study.front(infeasible=infeasible)}


def _closest(found: Mapping[int, Mapping[str, float]], preference: Preference) -> str:
    """The trials that miss the conditions by least, each in units of what the front spans."""
    metrics = {each.metric for each in preference.conditions}
    span = {name: max(v[name] for v in found.values()) - min(v[name] for v in found.values()) for name in metrics}

    def missed(trial: int) -> float:
        return sum(each.missed(found[trial]) / (span[each.metric] or 1.0) for each in preference.conditions)

    near = sorted(found, key=lambda trial: (missed(trial), trial))[:_NEAREST]
    told = [f"trial {t} ({', '.join(f'{name} {value:.4g}' for name, value in found[t].items())})" for t in near]
    return f"the nearest: {', '.join(told)}"
