"""Promote a trial: register its model and set the alias."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.finalists.refit import find_selected_run, list_current_promotions, read_refit
from hpsearch.search.promotion.evidence import Confirmation, Evidence, describe, gather_evidence, version_tags
from hpsearch.search.promotion.weights import make_model_from_checkpoint
from hpsearch.search.study.steering import find_trial, get_user_and_host
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_ID, VIOLATIONS
from hpsearch.storage.database.locks import check_lock_held, registry_lock
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
class PromotionResult:
    """Result of a promotion.

    Attributes:
        trial: number of the trial.
        model: name of the registered model.
        version: number of the version.
        alias: alias of the version.
        replaced: version that the alias named before; None if it named none or this one.
        unconfirmed: why the choice is not confirmed; empty if it is.
        checkable: whether `serve-check` can evaluate the model, which requires the data hash of the trial.
        made: whether this call made the model from the best checkpoint.
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
        """The alias of the replaced version."""
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
) -> PromotionResult:
    """Register a trial's model with its evidence, and set an alias.

    A trial without a model gets one from its best checkpoint. Idempotent: existing parts are reused. The alias is set
    before the database is updated; if the process dies in between, :mod:`hpsearch.search.promotion.registry_watch`
    records the promotion, with the user in the version's tag.

    Args:
        study: the study.
        tracking: the MLflow server with its runs.
        trial: number of the trial; None takes the winner of the finalists, or without finalists the best trial. A
            multi-objective study requires a number, unless one trial dominates all others.
        refit: whether to promote the refit of the winner.
        alias: alias of the version; its former version gets `previous_alias` of it.
        model: name of the registered model; None takes the study's name.
        infeasible: whether to accept a trial that violates a constraint.

    Raises:
        SearchError: the trial has no model to promote, or the refit is not trained.
        ObjectiveError: the weights in the checkpoint do not fit the current code.
        StorageError: MLflow is unavailable or rejects a request.
    """
    if (of := study.spec.finalists_of) is not None:
        again = format_command("promote", of.study) if of.refit is None else study.resume_command
        raise SearchError(f"study {study.spec.name!r} holds {of.description}; promote it with {again}")
    name = model or study.spec.name
    check_alias(alias)
    check_model_name(name)
    if refit:
        made, state = read_refit(study, trial)
        return register(Confirmation.read(made), find_selected_run(made, state), tracking, alias=alias, name=name)
    found = Confirmation.read(study)
    number = _default_trial(study, found.finalists, infeasible=infeasible) if trial is None else trial
    chosen = find_trial(study, number)
    _check_promotable(study, chosen)
    if not infeasible and (lines := chosen.user_attrs.get(VIOLATIONS)):
        raise SearchError(
            f"--trial {chosen.number} is infeasible ({', '.join(lines)}); promote another, or add --infeasible"
        )
    return register(found, chosen, tracking, alias=alias, name=name)


def register(found: Confirmation, chosen: FrozenTrial, tracking: Tracking, *, alias: str, name: str) -> PromotionResult:
    """Register the model of a COMPLETE trial with its evidence, and set an alias.

    Raises:
        SearchError: the model is unavailable.
        ObjectiveError: the weights in the checkpoint do not fit the current code.
        StorageError: MLflow is unavailable or rejects a request.
    """
    study, registry = found.study, Registry(tracking.client)
    run_id = str(chosen.user_attrs[RUN_ID])
    model_id = registry.find_registrable_model(run_id)
    made = model_id is None
    model_id = model_id or make_model_from_checkpoint(study, chosen, tracking)
    evidence = gather_evidence(found, chosen, tracking.client)
    with registry_lock(study.engine) as connection:
        current = registry.get_version_by_alias(name, alias)
        tags = {**version_tags(evidence), tag_names.PROMOTED_BY: get_user_and_host()}
        version = registry.register(name, model_id, run_id, tags=tags)
        write_evidence(registry, version, evidence)
        check_lock_held(connection)
        replaced = current if current is not None and current.number != version.number else None
        if replaced is not None:  # first, so that a repetition after a crash still finds the former version
            registry.set_alias(replaced, previous_alias(alias))
        registry.set_alias(version, alias)
        record_promotion(connection, evidence.as_record(), name, version.number, alias, by=get_user_and_host())
    return PromotionResult(
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
    """Update the evidence of a study's promotions after finalists or the test evaluation have changed it.

    Raises:
        StorageError: MLflow is unavailable or rejects a request.
    """
    changed: list[tuple[Promotion, StoredStudy]] = []
    for each in list_current_promotions(study):
        of = study if each.study_id == study.study_id else load_study(study.storage, str(each.evidence["study"]))
        if Confirmation.read(of).why_unconfirmed(each.trial_number) != each.evidence.get("unconfirmed"):
            changed.append((each, of))
    if not changed:
        return
    registry = Registry(tracking.client)
    with registry_lock(study.engine) as connection:
        for each, of in changed:
            version = registry.get_version_by_alias(each.model_name, each.alias)
            if version is None or version.number != each.version:
                continue  # the alias has moved, which `registry_watch` records
            evidence = gather_evidence(Confirmation.read(of), find_trial(of, each.trial_number), tracking.client)
            write_evidence(registry, version, evidence)
            by = each.promoted_by
            record_promotion(connection, evidence.as_record(), version.model, version.number, each.alias, by=by)


def write_evidence(registry: Registry, version: Version, evidence: Evidence) -> None:
    """Write the evidence of a trial to the tags and the description of a model version."""
    text = describe(evidence, address=version.uri, written=version.description)
    registry.update_version(version, tags=version_tags(evidence), description=text)


def _default_trial(study: StoredStudy, finalists: Finalists | None, *, infeasible: bool) -> int:
    if finalists is not None and finalists.winner is not None:
        return finalists.winner
    front = list(_read_front(study, finalists, infeasible=infeasible))
    if not front:
        raise SearchError(f"study {study.spec.name!r} has no trial to promote: {describe_no_candidate(study)}")
    if len(front) > 1:
        metric = list(study.spec.direction_by_metric)[-1]
        raise SearchError(
            f"the Pareto front of study {study.spec.name!r} has {len(front)} trials ({', '.join(map(str, front))}); "
            f"choose one with --trial, or with a preference such as --prefer {metric}"
        )
    return front[0]


def describe_no_candidate(study: StoredStudy) -> str:
    """Return why no trial of a study can be promoted, and the remedy."""
    if study.best_trials(infeasible=True):
        return "all complete trials violate a constraint; promote one with --infeasible"
    return "none is complete"


_NOT_PROMOTABLE = {
    TrialState.COMPLETE: "has no run in MLflow",
    TrialState.PRUNED: "was pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "is still running",
    TrialState.WAITING: "has not been run yet",
}


def _check_promotable(study: StoredStudy, trial: FrozenTrial) -> None:
    """Reject a trial that is not complete or has no MLflow run."""
    attrs = trial.user_attrs
    if trial.state == TrialState.COMPLETE and RUN_ID in attrs:
        return
    is_infeasible = trial.state == TrialState.PRUNED and attrs.get(INFEASIBLE)
    state = "is infeasible" if is_infeasible else _NOT_PROMOTABLE[trial.state]
    if trial.state in {TrialState.PRUNED, TrialState.FAIL} and (reason := attrs.get(REASON)):
        state += f" ({reason})"
    best = summarise(study).best
    instead = f"promote a complete trial, such as {best.number}" if best else "the study has no complete trial yet"
    raise SearchError(f"--trial {trial.number}: it {state}; {instead}")


_CONDITION = re.compile(r"(?P<metric>[^<>=]+?)\s*(?P<sign><=|>=|<|>)\s*(?P<limit>[^<>=\s]+)")
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_MAX_NEAREST = 3  # trials in the message if no trial satisfies the preference


@dataclass(frozen=True)
class Condition:
    """Bound on a metric: ``accuracy >= 0.98``."""

    metric: str
    sign: str
    limit: float

    def holds(self, values: Mapping[str, float]) -> bool:
        """Return whether the values satisfy the condition."""
        return bool(_OPERATORS[self.sign](values[self.metric], self.limit))

    def violation(self, values: Mapping[str, float]) -> float:
        """Return by how much the values violate the condition; 0 if they satisfy it."""
        return 0.0 if self.holds(values) else abs(values[self.metric] - self.limit)


def parse_preference(text: str, metrics: Sequence[str]) -> tuple[list[Condition], list[str]]:
    """Return the conditions of a preference, and the metrics that rank the trials that satisfy them.

    Args:
        text: such as ``accuracy >= 0.98 and model_mb <= 10 then latency_ms``.
        metrics: the metrics of the study.

    Raises:
        SearchError: the text has a syntax error or another metric.
    """
    conditions: list[Condition] = []
    then: list[str] = []
    for part in re.split(r"\s+then\s+|\s+and\s+|\s*,\s*", text.strip()):
        match = _CONDITION.fullmatch(part.strip())
        metric = match["metric"].strip() if match else part.strip()
        if metric not in metrics:
            raise SearchError(
                f"--prefer {text!r}: {part.strip()!r} is not valid; write conditions, then metrics, such as "
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
    raise SearchError(f"--prefer {text!r}: {given!r} is not a number; write it as in 'accuracy >= 0.98'")


def resolve_trial(
    study: StoredStudy, trial: int | None, preference: str | None, *, infeasible: bool = False
) -> int | None:
    """Return the given trial, or the one that a preference selects; None if neither is given.

    Raises:
        SearchError: both are given, or no trial satisfies the preference.
    """
    if preference is None:
        return trial
    if trial is not None:
        raise SearchError(f"--trial {trial} and --prefer both select a trial; remove one")
    return select_preferred(study, preference, infeasible=infeasible)


def select_preferred(study: StoredStudy, text: str, *, infeasible: bool = False) -> int:
    """Return the number of the trial of the Pareto front that a preference selects.

    With finalists, the front is that of their means on new seeds.

    Raises:
        SearchError: the preference cannot be parsed, no trial satisfies it, or the study has one metric.
    """
    spec = study.spec
    if not spec.is_multi_objective:
        raise SearchError(f"--prefer: study {spec.name!r} has one metric, {spec.metric}; remove it, or give --trial")
    conditions, then = parse_preference(text, list(spec.direction_by_metric))
    found = _read_front(study, read_finalists(study), infeasible=infeasible)
    if not found:
        raise SearchError(f"study {spec.name!r} has no trial to select: {describe_no_candidate(study)}")
    kept = {trial: values for trial, values in found.items() if all(each.holds(values) for each in conditions)}
    if not kept:
        raise SearchError(f"--prefer {text!r}: no trial of the front matches; {_describe_nearest(found, conditions)}")
    signs = {name: -1 if direction == "maximize" else 1 for name, direction in spec.direction_by_metric.items()}
    return min(kept, key=lambda trial: ([signs[name] * kept[trial][name] for name in then], trial))


def _read_front(study: StoredStudy, finalists: Finalists | None, *, infeasible: bool) -> dict[int, dict[str, float]]:
    """Return the trials of the Pareto front with their values, with finalists the means on new seeds."""
    names = list(study.spec.direction_by_metric)
    if finalists is not None and finalists.front:
        return {trial: dict(zip(names, finalists.row(trial).means, strict=True)) for trial in finalists.front}
    return {trial.number: dict(zip(names, trial.values, strict=True)) for trial in study.front(infeasible=infeasible)}


def _describe_nearest(found: Mapping[int, Mapping[str, float]], conditions: Sequence[Condition]) -> str:
    """Return the trials with the smallest violations, relative to the range of each metric on the front."""
    metrics = {each.metric for each in conditions}
    span = {name: max(v[name] for v in found.values()) - min(v[name] for v in found.values()) for name in metrics}

    def sum_violations(trial: int) -> float:
        return sum(each.violation(found[trial]) / (span[each.metric] or 1.0) for each in conditions)

    nearest = sorted(found, key=lambda trial: (sum_violations(trial), trial))[:_MAX_NEAREST]
    lines = (f"trial {t} ({', '.join(f'{name} {value:.4g}' for name, value in found[t].items())})" for t in nearest)
    return f"the nearest are {', '.join(lines)}"
