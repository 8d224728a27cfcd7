"""Promote a trial: register its model and set the alias."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import IntegrityError

from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import Finalists
from hpsearch.search.finalists.choose import check_generated
from hpsearch.search.finalists.refit import find_selected_run, read_refit
from hpsearch.search.promotion.evidence import Confirmation, gather_evidence, version_tags
from hpsearch.search.promotion.evidence_update import write_evidence
from hpsearch.search.promotion.model_files import download_verified
from hpsearch.search.promotion.preference import describe_no_candidate, read_front, select_preferred
from hpsearch.search.promotion.weights import make_model_from_checkpoint
from hpsearch.search.study.control import find_trial, get_user_and_host
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_ID, VIOLATIONS
from hpsearch.storage.database.locks import check_lock_held, registry_lock
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.registry import CHAMPION, Registry, check_alias, check_model_name, previous_alias
from hpsearch.storage.records.promotions import record_promotion


@dataclass(frozen=True)
class PromotionResult:
    """Result of a promotion.

    Attributes:
        trial: number of the trial.
        model: name of the registered model.
        version: number of the version.
        alias: alias of the version.
        old_version: version to which the alias pointed before; None if it pointed to no version or to this version.
        unconfirmed_reason: why the choice of the trial is not confirmed; empty if the choice is confirmed.
        not_exported: why the version has a checkpoint instead of an exported model; empty if the model was exported.
        can_serve_check: whether `serve-check` can evaluate the model, which requires the data hash of the trial.
        is_new_model: whether this call made the model from the best checkpoint.
    """

    trial: int
    model: str
    version: int
    alias: str
    old_version: int | None
    unconfirmed_reason: str
    not_exported: str
    can_serve_check: bool
    is_new_model: bool

    @property
    def old_alias(self) -> str:
        """The alias that the replaced version gets."""
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

    If the trial has no model, its model is made from the best checkpoint. The function is idempotent: an existing model
    and version are reused. The alias is set before the database is updated. If the process dies in between,
    :mod:`hpsearch.search.promotion.registry_watch` records the promotion and reads the user from a tag of the version.

    Args:
        study: the study.
        tracking: client of the MLflow server with the study's runs.
        trial: number of the trial; None selects the winner of the finalists, or the best trial if there are no
            finalists. A multi-objective study requires a number, unless one trial dominates all others.
        refit: whether to promote the refit of the winner.
        alias: alias of the new version; the version that had this alias gets the alias ``previous_alias(alias)``.
        model: name of the registered model; None uses the study's name.
        infeasible: whether to accept a trial that violates a constraint.

    Raises:
        SearchError: the trial has no model to promote, or the refit is not trained.
        ObjectiveError: the weights in the checkpoint do not fit the current code.
        StorageError: MLflow is unavailable or rejects a request.
    """
    if (of := study.spec.finalists_of) is not None:
        again = format_command("promote", of.study) if of.refit is None else study.resume_command
        raise SearchError(f"study {study.spec.name!r} holds {of.description}; promote the winner with {again}")
    name = model or study.spec.name
    check_alias(alias)
    check_model_name(name)
    if refit:
        made, state = read_refit(study, trial)
        check_generated(study, made)  # another study may be newer than the one that was checked before the training
        return register(Confirmation.read(made), find_selected_run(made, state), tracking, alias=alias, name=name)
    found = Confirmation.read(study)
    number = _default_trial(study, found.finalists, infeasible=infeasible) if trial is None else trial
    chosen = find_trial(study, number)
    _check_promotable(study, chosen)
    if not infeasible and (lines := chosen.user_attrs.get(VIOLATIONS)):
        raise SearchError(f"--trial {number} is infeasible ({', '.join(lines)}); add --infeasible to promote it")
    return register(found, chosen, tracking, alias=alias, name=name)


def register(found: Confirmation, chosen: FrozenTrial, tracking: Tracking, *, alias: str, name: str) -> PromotionResult:
    """Register the model of a COMPLETE trial with its evidence, and set an alias.

    Raises:
        SearchError: the model is unavailable, or its files in MLflow were changed.
        ObjectiveError: the weights in the checkpoint do not fit the current code.
        StorageError: MLflow is unavailable or rejects a request.
    """
    study, registry = found.study, Registry(tracking.client)
    run_id = str(chosen.user_attrs[RUN_ID])
    model_id = registry.find_registrable_model(run_id)
    made = model_id is None
    model_id = model_id or make_model_from_checkpoint(study, chosen, tracking)
    with open_temporary_folder() as folder:
        _, sha256 = download_verified(study.engine, tracking, model_id, folder, name=f"trial {chosen.number}")
    evidence = gather_evidence(found, chosen, tracking.client, verified=(model_id, sha256))
    with registry_lock(study.engine) as connection:
        current = registry.get_version_by_alias(name, alias)
        tags = {**version_tags(evidence), tag_names.PROMOTED_BY: get_user_and_host()}
        version = registry.register(name, model_id, run_id, tags=tags)
        write_evidence(registry, version, evidence)
        check_lock_held(connection)
        try:  # before the alias points to the version; the study cannot be deleted until the end of the transaction
            record_promotion(connection, evidence.to_record(), name, version.number, alias, by=get_user_and_host())
        except IntegrityError:
            raise SearchError(
                f"study {study.spec.name!r} was deleted during the promotion; {name}@{alias} stays as it was"
            ) from None
        replaced = current if current is not None and current.number != version.number else None
        if replaced is not None:  # first, so that a repetition after a crash still finds the former version
            registry.set_alias(replaced, previous_alias(alias))
        registry.set_alias(version, alias)
    return PromotionResult(
        trial=chosen.number,
        model=name,
        version=version.number,
        alias=alias,
        old_version=replaced.number if replaced else None,
        unconfirmed_reason=evidence.unconfirmed,
        not_exported=evidence.weights_only,
        can_serve_check=bool(evidence.data_sha256),
        is_new_model=made,
    )


def resolve_trial(study: StoredStudy, trial: int | None, prefer: str | None, *, infeasible: bool = False) -> int | None:
    """Return `trial`, or the number of the trial that `prefer` selects; None if both are None.

    Raises:
        SearchError: both `trial` and `prefer` are given, or no trial satisfies the preference.
    """
    if prefer is None:
        return trial
    if trial is not None:
        raise SearchError(f"--trial {trial} and --prefer both select a trial; remove one of them")
    return select_preferred(study, prefer, infeasible=infeasible)


def _default_trial(study: StoredStudy, finalists: Finalists | None, *, infeasible: bool) -> int:
    if finalists is not None and finalists.winner is not None:
        return finalists.winner
    front = list(read_front(study, finalists, infeasible=infeasible))
    if not front:
        raise SearchError(f"study {study.spec.name!r} has no trial to promote: {describe_no_candidate(study)}")
    if len(front) > 1:
        metric = list(study.spec.direction_by_metric)[-1]
        raise SearchError(
            f"the Pareto front of study {study.spec.name!r} has {len(front)} trials ({', '.join(map(str, front))}); "
            f"choose one with --trial, or with a preference such as --prefer {shlex.quote(metric)}"
        )
    return front[0]


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
    if trial.state == TrialState.COMPLETE:
        raise SearchError(
            f"--trial {trial.number}: the trial {state} yet; send it first: {format_command('sync', study.spec.name)}"
        )
    best = summarise(study).best
    instead = (
        f"give the number of a complete trial, such as {best.number}" if best else "the study has no complete trial yet"
    )
    raise SearchError(f"--trial {trial.number}: the trial {state}; {instead}")
