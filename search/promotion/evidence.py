"""The evidence for a promoted model: its lineage, its results and their confirmation."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml
from optuna.trial import FrozenTrial

from hpsearch.search.console import pluralize
from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.finalists.refit import Refit, tabulate_refit
from hpsearch.search.finalists.table import to_record
from hpsearch.search.study.ranking import get_first_value, get_last_params, get_schedule
from hpsearch.search.study.study import StoredStudy, load_parent_study
from hpsearch.storage.attributes import ATTEMPT, REASON, RUN_ID, RUN_URL
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.artifacts import read_artifact
from hpsearch.storage.mlflow.health import describe_error
from hpsearch.storage.mlflow.model import read_export_failure, read_export_source
from hpsearch.storage.mlflow.registry import Registry
from hpsearch.storage.records.promotions import read_model_sha256
from hpsearch.storage.records.test_evaluations import TestEvaluation, read_test_evaluation

if TYPE_CHECKING:
    from mlflow import MlflowClient


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """Evidence for the score of a trial's model: lineage, results and confirmation. It is stored with the promotion.

    Attributes:
        study: name of the study.
        study_id: id of the study in the database.
        trial: number of the trial.
        run_id: id of its MLflow run.
        run_url: URL of the run's page.
        attempts: number of attempts of the trial.
        metric: the optimized validation metric.
        value: value of the trial in the search, which has selection bias.
        reason: why the trial ended.
        params: the suggested parameters.
        config: the resolved training configuration; None if MLflow does not return it.
        seed: training seed.
        git_sha: commit of the objective's source; None if unknown.
        git_dirty: whether the source had uncommitted changes.
        data_sha256: hash of the split data.
        finalists: table of the finalists; None if there are no finalists.
        test: test evaluation of this trial, with its scores; None if the trial was not evaluated on the test set.
        unconfirmed: why the choice of this trial is not confirmed; empty if the choice is confirmed.
        weights_only: why the model is a checkpoint, which needs the objective's code; empty if the model was exported.
        model_id: id of the logged model; None if MLflow has no model of the run.
        model_sha256: digest of the model's files, see `hpsearch.storage.files.compute_folder_sha256`; None if the model
            was made by an earlier version of hpsearch and promoted in the MLflow UI.
        refit: for the model of a refit: the search, the trial of the winner, the epochs, the seeds and training losses
            of the runs, and the selected run. In this case, `value` is measured on training samples. None for other
            models.
        export_source: method of the objective that returned the exported module; empty if it is the trained model.
        config_schedule: configurations of a trial whose configuration changed, with the trials that trained their
            epochs; None for other trials.
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
    model_id: str | None = None
    model_sha256: str | None = None
    refit: dict[str, Any] | None = None
    export_source: str = ""
    config_schedule: list[dict[str, Any]] | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the evidence as JSON values for the database."""
        return {**asdict(self), "confirmed": not self.unconfirmed}


@dataclass(frozen=True)
class Confirmation:
    """All stored results that can confirm the choice of a trial, at one point in time.

    Attributes:
        study: study that contains the trial: a search, finalist study or refit study.
        search: the search of a refit study; else `study`.
        finalists: finalists of the search; None if there are none.
        evaluation: test evaluation of the search; None if the test set was not evaluated.
        refit: state of the refit if `study` is a refit study; else None.
    """

    study: StoredStudy
    search: StoredStudy
    finalists: Finalists | None
    evaluation: TestEvaluation | None
    refit: Refit | None

    @classmethod
    def read(cls, study: StoredStudy) -> Confirmation:
        """Read the results from the database."""
        refit = None if study.spec.refit is None else tabulate_refit(study)
        search = study if refit is None else load_parent_study(study)
        return cls(study, search, read_finalists(search), read_test_evaluation(search.engine, search.study_id), refit)

    def is_evaluated(self, trial: int) -> bool:
        """Return whether the model of this trial was evaluated on the test set."""
        if self.evaluation is None:
            return False
        if self.refit is not None:
            return self.evaluation.refit == self.study.spec.name and self.refit.selected_trial == trial
        return self.evaluation.refit is None and self.evaluation.trial_number == trial

    def explain_unconfirmed(self, trial: int) -> str:
        """Return why the choice of a trial is not confirmed; an empty text if the choice is confirmed.

        A trial is confirmed if it won among finalists on new seeds and was evaluated on the test set. Both are
        necessary because the best of many trials has selection bias. The selected run of the winner's refit needs only
        the evaluation on the test set.
        """
        if why := self._why_not_winner(trial) if self.refit is None else self._why_not_selected(self.refit, trial):
            return why
        if self.evaluation is None:
            return "the model was not evaluated on the test set" + ("" if self.refit is None else " yet")
        if self.refit is None:
            if not self.is_evaluated(trial):
                return f"the test set was evaluated with {self.evaluation.model_description}"
            if self.evaluation.finalists is None:
                return "the model was evaluated on the test set before it won among finalists"
        elif not self.is_evaluated(trial):
            return f"the test set was evaluated with {self.evaluation.model_description}, not with this refit"
        return "" if self.evaluation.scores is not None else "the test evaluation has no scores"

    def _why_not_winner(self, trial: int) -> str:
        found = self.finalists
        if (of := self.study.spec.finalists_of) is not None:
            return f"the trial is a finalist of study {of.study}, retrained on another seed to confirm the winner"
        if found is None:
            return "no finalists were trained"
        if not found.is_decided:
            why = pluralize(found.pending, "unfinished run") if found.pending else "none has a value for each seed"
            return f"the finalists have no winner: {why}"
        winner = found.winner if found.winner is not None else " or ".join(map(str, found.front))
        return "" if found.is_confirmed(trial) else f"the winner among the finalists is trial {winner}"

    def _why_not_selected(self, refit: Refit, trial: int) -> str:
        if trial != refit.selected_trial:
            return "the trial is not the run of the refit with the median training loss"
        if self.finalists is None or (
            self.finalists.winner != refit.search_trial and refit.search_trial not in self.finalists.front
        ):
            return f"the trial is a refit of trial {refit.search_trial}, which did not win among the finalists"
        return ""


def gather_evidence(
    found: Confirmation, trial: FrozenTrial, client: MlflowClient, *, verified: tuple[str, str] | None = None
) -> Evidence:
    """Return the evidence for a trial and its model. Values that MLflow does not return are None.

    Args:
        found: the results that can confirm the choice of the trial.
        trial: the trial.
        client: a client of the MLflow server.
        verified: id of the model, and digest of its verified files; None uses the digest in the database.
    """
    study, refit = found.study, found.refit
    run_id = str(trial.user_attrs[RUN_ID])
    model_id, model_sha256 = verified or (Registry(client).find_registrable_model(run_id), None)
    if model_id is not None and model_sha256 is None:
        with study.engine.connect() as connection:
            model_sha256 = read_model_sha256(connection, model_id)
    resolved = _read_resolved_config(client, run_id)
    environment = resolved.get("environment") or {}
    return Evidence(
        study=study.spec.name,
        study_id=study.study_id,
        trial=trial.number,
        run_id=run_id,
        run_url=str(trial.user_attrs.get(RUN_URL, "")),
        attempts=int(trial.user_attrs.get(ATTEMPT, 1)),
        metric=study.spec.metric,
        value=get_first_value(trial),
        reason=str(trial.user_attrs.get(REASON, "")),
        params=get_last_params(trial),
        config_schedule=get_schedule(trial),
        config=resolved.get("config"),
        seed=resolved.get("seed"),
        git_sha=environment.get("git_sha"),
        git_dirty=environment.get("git_dirty"),
        data_sha256=resolved.get("split_hash"),
        finalists=None if found.finalists is None else to_record(found.finalists),
        test=_make_record(found.evaluation) if found.evaluation and found.is_evaluated(trial.number) else None,
        unconfirmed=found.explain_unconfirmed(trial.number),
        weights_only=read_export_failure(client, model_id),
        model_id=model_id,
        model_sha256=model_sha256,
        export_source=read_export_source(client, model_id),
        refit=None if refit is None else {"search": found.search.spec.name, **to_record(refit)},
    )


def _make_record(test: TestEvaluation) -> dict[str, Any]:
    return {"scores": test.scores, "opened_at": test.opened_at.isoformat(), "opened_by": test.opened_by}


class _LoaderWithoutAliases(yaml.SafeLoader):
    """Loader that rejects aliases: nested ones could fill the memory, and hpsearch writes none."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it contains aliases")
        return super().compose_node(parent, index)


def _read_resolved_config(client: MlflowClient, run_id: str) -> dict[str, Any]:
    """Return the run's `config.yaml`: configuration, seeds, data, environment; an empty dictionary if unavailable."""
    try:
        with read_artifact(client, run_id, "config.yaml") as file:
            found = yaml.load(file, Loader=_LoaderWithoutAliases)  # noqa: S506 it is a SafeLoader
    except Exception as error:  # a missing file or server must not prevent the promotion
        log.warning("MLflow run %s: config.yaml cannot be read: %s", run_id, describe_error(error))
        return {}
    return found if isinstance(found, dict) else {}


_UNTAGGED_FIELDS = (
    "run_url",
    "reason",
    "git_dirty",
    "weights_only",
    "model_id",
    "export_source",
    "config_schedule",
)  # of the evidence, without a tag


def version_tags(evidence: Evidence) -> dict[str, str]:
    """Return the tags with which a model version stores its evidence."""
    tags = {key: value for key, value in vars(evidence).items() if key not in _UNTAGGED_FIELDS}
    tags |= {"metric": f"val_{evidence.metric}", "confirmed": str(not evidence.unconfirmed).lower()}
    if evidence.git_sha and evidence.git_dirty:
        tags["git_sha"] += " (with changes)"
    # An empty reason replaces the reason of a version that is confirmed now.
    return {
        tag_names.PREFIX + key: json.dumps(value) if isinstance(value, dict) else str(value)
        for key, value in tags.items()
        if value is not None
    }
