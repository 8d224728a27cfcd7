"""What stands behind a promoted model: where it comes from, what was asked of it, and what nobody has asked yet."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml
from optuna.trial import FrozenTrial

from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.refit import tabulate_refit
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy, parent_of
from hpsearch.storage.attributes import ATTEMPT, REASON, RUN_ID, RUN_URL
from hpsearch.storage.mlflow.artifacts import read_artifact
from hpsearch.storage.mlflow.health import one_line
from hpsearch.storage.mlflow.registry import Registry
from hpsearch.storage.mlflow.weights_model import why_weights_only
from hpsearch.storage.records.test_openings import Opening, read_opening

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """The lineage of a trial's model; plain values, kept with the promotion.

    Attributes:
        study: name of the study.
        study_id: its number in the database.
        trial: number of the trial.
        run_id: its MLflow run.
        run_url: the page of that run.
        attempts: how often the trial was started.
        metric: the validation metric that was optimised.
        value: what the trial scored by it, chosen as one of many: too good by that choice.
        reason: why the trial ended.
        params: what the sampler suggested.
        config: the resolved training configuration; None where the run has none.
        seed: of the training.
        git_sha: commit of the objective's source; None where there was none.
        git_dirty: whether the source differed from it.
        data_sha256: of the data as it was split.
        finalists: the finalists' table; None without any.
        test: the opening of the test set for this trial, with its scores; None while it is sealed.
        unconfirmed: why the choice of this trial is not confirmed; empty when it is.
        refit: of a refit the search and its trial, the epochs, the seeds and training losses of its runs, and the one
            that was taken; `value` is then of samples that it was trained on. None of a trial of a search.
        weights_only: why the model is but a checkpoint, which takes the objective's code; empty when it is exported.
    """

    study: str
    study_id: int
    trial: int
    run_id: str
    run_url: str
    attempts: int
    metric: str
    value: float | None
    reason: str
    params: dict[str, Any]
    config: dict[str, Any] | None
    seed: int | None
    git_sha: str | None
    git_dirty: bool | None
    data_sha256: str | None
    finalists: dict[str, Any] | None
    test: dict[str, Any] | None
    unconfirmed: str
    weights_only: str = ""
    refit: dict[str, Any] | None = None

    def as_record(self) -> dict[str, Any]:
        """Return it as plain values for the database."""
        return {**asdict(self), "confirmed": not self.unconfirmed}


def gather_evidence(study: StoredStudy, trial: FrozenTrial, client: MlflowClient) -> Evidence:
    """Return what is known of a trial and its model now; what MLflow does not give is left out."""
    refit = study.spec.refit is not None
    search = parent_of(study) if refit else study
    finalists = read_finalists(search)
    opening = read_opening(search.engine, search.study_id)
    run_id = str(trial.user_attrs[RUN_ID])
    ran = _resolved_config(client, run_id)
    environment = ran.get("environment") or {}
    for_it = opening is not None and _is_for(opening, study, trial.number)
    return Evidence(
        study=study.spec.name,
        study_id=study.study_id,
        trial=trial.number,
        run_id=run_id,
        run_url=str(trial.user_attrs.get(RUN_URL, "")),
        attempts=int(trial.user_attrs.get(ATTEMPT, 1)),
        metric=study.spec.metric,
        value=first_value(trial),
        reason=str(trial.user_attrs.get(REASON, "")),
        params=dict(trial.params),
        config=ran.get("config"),
        seed=ran.get("seed"),
        git_sha=environment.get("git_sha"),
        git_dirty=environment.get("git_dirty"),
        data_sha256=ran.get("split_hash"),
        finalists=None if finalists is None else asdict(finalists),
        test=_opening(opening) if for_it else None,
        unconfirmed=why_unconfirmed(study, trial.number),
        weights_only=why_weights_only(client, Registry(client).model_of(run_id)),
        refit={"search": search.spec.name, **tabulate_refit(study).as_record()} if refit else None,
    )


def why_unconfirmed(study: StoredStudy, trial: int) -> str:
    """Return what is missing before the choice of a trial counts as confirmed; nothing when it does.

    Finalists must have chosen it, on seeds that the search has not seen, and the test set must have been opened for
    it: the best of many trials over-states itself.
    """
    if study.spec.refit is not None:
        return _why_refit_unconfirmed(study, trial)
    if (of := study.spec.finalists_of) is not None:
        return f"it is a finalist of study {of.study}, trained again on another seed to confirm a choice"
    finalists = read_finalists(study)
    opening = read_opening(study.engine, study.study_id)
    if finalists is None:
        return "no finalists were trained"
    if not finalists.decided:
        waiting = f"{finalists.pending} of their trials have not ended" if finalists.pending else "none has all seeds"
        return f"the finalists have no winner: {waiting}"
    if not finalists.stands(trial):
        chose = finalists.winner if finalists.winner is not None else " or ".join(map(str, finalists.front))
        return f"the finalists chose trial {chose}"
    if opening is None:
        return "the test set was not opened for it"
    if not _is_for(opening, study, trial):
        return f"the test set was opened for {opening.subject}"
    if opening.finalists is None:
        return "the test set was opened for it without finalists"
    return "" if opening.scores is not None else "the test set was opened and has no scores"


def _why_refit_unconfirmed(study: StoredStudy, trial: int) -> str:
    """Return the same for a run of a refit: its configuration was chosen, and the test set is its only judge."""
    search, found = parent_of(study), tabulate_refit(study)
    finalists = read_finalists(search)
    if trial != found.taken:
        return "it is not the run of the median training loss"
    if finalists is None or (finalists.winner != found.of and found.of not in finalists.front):
        return f"it is a refit of trial {found.of}, which is not the winner among the finalists"
    opening = read_opening(search.engine, search.study_id)
    if opening is None:
        return "the test set was not opened for it yet"
    if not _is_for(opening, study, trial):
        return f"the test set was opened for the model of {opening.subject}; this refit was not scored on it"
    return "" if opening.scores is not None else "the test set was opened and has no scores"


def _is_for(opening: Opening, study: StoredStudy, trial: int) -> bool:
    """Whether a test set was opened for the model of this trial: of a search, or the run of a refit that is taken."""
    if study.spec.refit is not None:
        return opening.refit == study.spec.name and tabulate_refit(study).taken == trial
    return opening.refit is None and opening.trial_number == trial


def _opening(opening: Opening | None) -> dict[str, Any] | None:
    if opening is None:
        return None
    return {"scores": opening.scores, "opened_at": opening.opened_at.isoformat(), "opened_by": opening.opened_by}


def _resolved_config(client: MlflowClient, run_id: str) -> dict[str, Any]:
    """Return the run's `config.yaml`: configuration, seeds, data and environment of the training."""
    try:
        with read_artifact(client, run_id, "config.yaml") as file:
            found = yaml.safe_load(file)
    except Exception as error:  # no such file, the server is away: the study's own record is the better part
        log.warning("run %s gives no config.yaml: %s", run_id, one_line(error))
        return {}
    return found if isinstance(found, dict) else {}


def version_tags(evidence: Evidence) -> dict[str, str]:
    """Return the tags of a model version: what a program asks for."""
    tags: dict[str, object] = {
        "study": evidence.study,
        "study_id": evidence.study_id,
        "trial": evidence.trial,
        "run_id": evidence.run_id,
        "attempts": evidence.attempts,
        "metric": f"val_{evidence.metric}",
        "value": evidence.value,
        "seed": evidence.seed,
        "params": json.dumps(evidence.params),
        "config": evidence.config and json.dumps(evidence.config),
        "git_sha": evidence.git_sha and evidence.git_sha + (" (with changes)" if evidence.git_dirty else ""),
        "data_sha256": evidence.data_sha256,
        "refit": evidence.refit and json.dumps(evidence.refit),
        "finalists": evidence.finalists and json.dumps(evidence.finalists),
        "test": evidence.test and json.dumps(evidence.test),
        "confirmed": str(not evidence.unconfirmed).lower(),
        "unconfirmed": evidence.unconfirmed,
    }
    # An empty reason is written too: it replaces that of a version which was confirmed since.
    return {f"hpsearch.{key}": str(value) for key, value in tags.items() if value is not None}
