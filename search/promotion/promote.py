"""Promote a trial: register its model and set the alias."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.finalists.refit import current, read_refit, taken_run
from hpsearch.search.promotion.evidence import Confirmation, Evidence, describe, gather_evidence, version_tags
from hpsearch.search.promotion.weights import late_model
from hpsearch.search.study.steering import find_trial, whoami
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import BROKEN, INFEASIBLE, REASON, RUN_ID
from hpsearch.storage.database.locks import registry_lock, still_held
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.registry import (
    CHAMPION,
    Registry,
    Version,
    check_alias,
    check_model_name,
    previous_alias,
)
from hpsearch.storage.records.promotions import Promotion, record_promotion


@dataclass(frozen=True)
class Promoted:
    """What a promotion came to.

    Attributes:
        trial: number of the trial.
        model: name of the registered model.
        version: its version.
        alias: that names the version now.
        replaced: the version that the alias named before; None if it named none, or this one.
        unconfirmed: why the choice is not confirmed; empty when it is.
        checkable: whether `serve-check` can judge it: the trial told of its data.
        made: whether its model was made now, from its best checkpoint.
    """

    trial: int
    model: str
    version: int
    alias: str
    replaced: int | None
    unconfirmed: str
    checkable: bool
    made: bool

    @property
    def previous(self) -> str:
        """The alias of the version that was replaced."""
        return previous_alias(self.alias)


def promote(
    study: StoredStudy,
    tracking: Tracking,
    *,
    trial: int | None = None,
    refit: bool = False,
    alias: str = CHAMPION,
    model: str | None = None,
    infeasible: bool = False,
) -> Promoted:
    """Register a trial's model, with its evidence, and let an alias name it.

    The model of a trial that left none is made from its best checkpoint. Safe to repeat: what is there already is
    used. The alias is set before the database is told, so that a death in between leaves a promotion that
    :mod:`hpsearch.search.promotion.registry_watch` records, with the name that the version's tag holds.

    Args:
        study: the study.
        tracking: the MLflow server that has its runs.
        trial: the trial's number; the winner of the finalists unless given, or else the best trial. Of several metrics
            it has to be given, unless one dominates all others.
        refit: whether the refit of the winner is promoted instead of the trial.
        alias: for the version; what had it gets `previous_alias` of it.
        model: name of the registered model; the study's name unless given.
        infeasible: whether a trial will do that breaks a constraint.

    Raises:
        SearchError: the trial has nothing to promote, or the refit is not trained.
        ObjectiveError: its model is to be made, and today's code does not fit its weights.
        StorageError: MLflow refuses, or is away.
    """
    if (of := study.spec.finalists_of) is not None:
        again = command("promote", of.study) if of.refit is None else study.go_on
        raise SearchError(f"study {study.spec.name!r} holds {of.what}: promote it with: {again}")
    name = model or study.spec.name
    check_alias(alias)
    check_model_name(name)
    if refit:
        made, its = read_refit(study, trial)
        return register(Confirmation.read(made), taken_run(made, its), tracking, alias=alias, name=name)
    found = Confirmation.read(study)
    number = _default_trial(study, found.finalists, infeasible=infeasible) if trial is None else trial
    chosen = find_trial(study, number)
    _check_promotable(study, chosen)
    if not infeasible and (lines := chosen.user_attrs.get(BROKEN)):
        raise SearchError(
            f"--trial {chosen.number}: it is out of bounds ({', '.join(lines)}): promote another, or this one all the "
            "same with --infeasible"
        )
    return register(found, chosen, tracking, alias=alias, name=name)


def register(found: Confirmation, chosen: FrozenTrial, tracking: Tracking, *, alias: str, name: str) -> Promoted:
    """Register the model of a COMPLETE trial under a name, with its evidence, and let an alias name it.

    Raises:
        SearchError: its model is not to be had.
        ObjectiveError: its model is to be made, and today's code does not fit its weights.
        StorageError: MLflow refuses, or is away.
    """
    study, registry = found.study, Registry(tracking.client)
    run_id = str(chosen.user_attrs[RUN_ID])
    model_id = registry.model_of(run_id)
    made = model_id is None
    model_id = model_id or late_model(study, chosen, tracking)
    evidence = gather_evidence(found, chosen, tracking.client)
    with registry_lock(study.engine) as connection:
        held = registry.version_by_alias(name, alias)
        tags = {**version_tags(evidence), tag_names.PROMOTED_BY: whoami()}
        version = registry.register(name, model_id, run_id, tags=tags)
        write_evidence(registry, version, evidence)
        still_held(connection)
        replaced = held if held is not None and held.number != version.number else None
        if replaced is not None:  # first, so that doing it again after a death still knows what was there before
            registry.set_alias(replaced, previous_alias(alias))
        registry.set_alias(version, alias)
        record_promotion(connection, evidence.as_record(), name, version.number, alias, by=whoami())
    return Promoted(
        trial=chosen.number,
        model=name,
        version=version.number,
        alias=alias,
        replaced=replaced.number if replaced else None,
        unconfirmed=evidence.unconfirmed,
        checkable=bool(evidence.data_sha256),
        made=made,
    )


def refresh_evidence(study: StoredStudy, tracking: Tracking) -> None:
    """Update the evidence of a study's promotions, where finalists or the test set have changed it.

    Raises:
        StorageError: MLflow refuses, or is away.
    """
    changed: list[tuple[Promotion, StoredStudy]] = []
    for each in current(study):
        of = study if each.study_id == study.study_id else load_study(study.storage, str(each.evidence["study"]))
        if Confirmation.read(of).why_unconfirmed(each.trial_number) != each.evidence.get("unconfirmed"):
            changed.append((each, of))
    if not changed:
        return
    registry = Registry(tracking.client)
    with registry_lock(study.engine) as connection:
        for each, of in changed:
            version = registry.version_by_alias(each.model_name, each.alias)
            if version is None or version.number != each.version:
                continue  # it has moved: `registry_watch` records that
            evidence = gather_evidence(Confirmation.read(of), find_trial(of, each.trial_number), tracking.client)
            write_evidence(registry, version, evidence)
            by = each.promoted_by
            record_promotion(connection, evidence.as_record(), version.model, version.number, each.alias, by=by)


def write_evidence(registry: Registry, version: Version, evidence: Evidence) -> None:
    """Write the evidence of a trial as the tags and the description of a version of its model."""
    text = describe(evidence, address=version.address, written=version.description)
    registry.describe(version, tags=version_tags(evidence), description=text)


def _default_trial(study: StoredStudy, finalists: Finalists | None, *, infeasible: bool) -> int:
    if finalists is not None and finalists.winner is not None:
        return finalists.winner
    front = list(_candidates(study, finalists, infeasible=infeasible))
    if not front:
        raise SearchError(f"study {study.spec.name!r} has no trial to promote: {why_none(study)}")
    if len(front) > 1:
        metric = list(study.spec.ways)[-1]
        raise SearchError(
            f"study {study.spec.name!r} has {len(front)} trials that no other dominates "
            f"({', '.join(map(str, front))}): choose one with --trial, or by what you prefer, such as --prefer {metric}"
        )
    return front[0]


def why_none(study: StoredStudy) -> str:
    """Return why no trial of a study can be promoted, and what to do."""
    if study.best_trials(infeasible=True):
        return "all that have run to their end break a constraint; promote one all the same with --infeasible"
    return "none has run to its end"


_NOT_PROMOTABLE = {
    TrialState.COMPLETE: "has no run in MLflow",
    TrialState.PRUNED: "was pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "is still running",
    TrialState.WAITING: "has not been run yet",
}


def _check_promotable(study: StoredStudy, trial: FrozenTrial) -> None:
    """Refuse a trial that has not run to its end, or that has no run in MLflow."""
    attrs = trial.user_attrs
    if trial.state == TrialState.COMPLETE and RUN_ID in attrs:
        return
    infeasible = trial.state == TrialState.PRUNED and attrs.get(INFEASIBLE)
    what = "is infeasible" if infeasible else _NOT_PROMOTABLE[trial.state]
    if trial.state in {TrialState.PRUNED, TrialState.FAIL} and (reason := attrs.get(REASON)):
        what += f" ({reason})"
    best = summarise(study).best
    instead = f"promote one that has run to its end, such as {best.number}" if best else "no trial has run to its end"
    raise SearchError(f"--trial {trial.number}: it {what}; {instead}")


_CONDITION = re.compile(r"(?P<metric>[^<>=]+?)\s*(?P<sign><=|>=|<|>)\s*(?P<limit>[^<>=\s]+)")
_SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
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


def parse_preference(text: str, ways: Sequence[str]) -> tuple[list[Condition], list[str]]:
    """Return the conditions of a preference, and the metrics that rank the trials that meet them, in their order.

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
    return conditions, then or [ways[0]]


def _limit(text: str, given: str) -> float:
    with suppress(ValueError):
        limit = float(given)
        if not math.isnan(limit):
            return limit
    raise SearchError(f"--prefer {text!r}: {given!r} is no number: write it as in 'accuracy >= 0.98'")


def chosen_trial(
    study: StoredStudy, trial: int | None, preference: str | None, *, infeasible: bool = False
) -> int | None:
    """Return the trial that is named, or the one that a preference selects; None if neither is given.

    Raises:
        SearchError: both are given, or no trial satisfies the preference.
    """
    if preference is None:
        return trial
    if trial is not None:
        raise SearchError(f"--trial {trial} and --prefer both name a trial: leave one out")
    return preferred(study, preference, infeasible=infeasible)


def preferred(study: StoredStudy, text: str, *, infeasible: bool = False) -> int:
    """Return the number of the trial of a study's front that a sentence prefers.

    If finalists were trained, the front is that of their means on fresh seeds.

    Raises:
        SearchError: the preference cannot be read, no trial meets it, or the study has one metric.
    """
    spec = study.spec
    if not spec.several:
        raise SearchError(f"--prefer: study {spec.name!r} has one metric, {spec.metric}: leave it out, or give --trial")
    conditions, then = parse_preference(text, list(spec.ways))
    found = _candidates(study, read_finalists(study), infeasible=infeasible)
    if not found:
        raise SearchError(f"study {spec.name!r} has no trial to prefer: {why_none(study)}")
    kept = {trial: values for trial, values in found.items() if all(each.holds(values) for each in conditions)}
    if not kept:
        raise SearchError(f"--prefer {text!r}: no trial of the front is so; {_closest(found, conditions)}")
    signs = {name: -1 if way == "maximize" else 1 for name, way in spec.ways.items()}
    return min(kept, key=lambda trial: ([signs[name] * kept[trial][name] for name in then], trial))


def _candidates(study: StoredStudy, finalists: Finalists | None, *, infeasible: bool) -> dict[int, dict[str, float]]:
    """Return the trials of the front with their values: means on fresh seeds where there are any."""
    names = list(study.spec.ways)
    if finalists is not None and finalists.front:
        return {trial: dict(zip(names, finalists.row(trial).means, strict=True)) for trial in finalists.front}
    return {trial.number: dict(zip(names, trial.values, strict=True)) for trial in study.front(infeasible=infeasible)}


def _closest(found: Mapping[int, Mapping[str, float]], conditions: Sequence[Condition]) -> str:
    """The trials that miss the conditions by least, each in units of what the front spans."""
    metrics = {each.metric for each in conditions}
    span = {name: max(v[name] for v in found.values()) - min(v[name] for v in found.values()) for name in metrics}

    def missed(trial: int) -> float:
        return sum(each.missed(found[trial]) / (span[each.metric] or 1.0) for each in conditions)

    near = sorted(found, key=lambda trial: (missed(trial), trial))[:_NEAREST]
    told = [f"trial {t} ({', '.join(f'{name} {value:.4g}' for name, value in found[t].items())})" for t in near]
    return f"the nearest: {', '.join(told)}"
