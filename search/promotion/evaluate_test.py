"""Evaluate the winner's model on the test set, once per study.

First, the weights are downloaded and loaded, and must reproduce the validation value. Then the database records the
evaluation, and rejects a second evaluation. The test samples are scored last.
"""

from __future__ import annotations

from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.custom_loop.loop_objective import RestoredLoop
from hpsearch.objectives.fit import restore_model
from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import check_generated
from hpsearch.search.finalists.refit import find_selected_run, read_refit, tabulate_refit
from hpsearch.search.finalists.table import find_winner, read_finalists
from hpsearch.search.promotion.weights import BestWeights
from hpsearch.search.study.control import find_trial, get_user_and_host
from hpsearch.search.study.promotions import list_current_promotions
from hpsearch.search.study.study import StoredStudy, load_companion
from hpsearch.search.study.summary import summarise
from hpsearch.storage.files import compute_sha256
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.records.test_evaluations import (
    AlreadyEvaluatedError,
    TestEvaluation,
    read_test_evaluation,
    record_test_evaluation,
    write_scores,
)


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate on the test set.

    Attributes:
        trial: trial of the search.
        finalists: name of the finalist study in which the trial won; None if the trial is unconfirmed.
        refit: refit study and its selected run, whose model is evaluated instead of the trial's own model; None to
            evaluate the trial's own model.
    """

    trial: FrozenTrial
    finalists: str | None
    refit: tuple[StoredStudy, FrozenTrial] | None = None

    @property
    def summary(self) -> str:
        """The evaluated model as text: ``trial 7``, or ``the refit of trial 7``."""
        return f"{'' if self.refit is None else 'the refit of '}trial {self.trial.number}"


def choose_candidate(study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False) -> Candidate:
    """Return the model to evaluate on the test set of a study.

    If an earlier evaluation was recorded but has no scores, its model is returned, even if another trial is now the
    winner.

    Args:
        study: the study.
        trial: number of the trial; None selects the winner of the finalists, or the best trial if `unconfirmed`.
        unconfirmed: whether to accept a trial that did not win among finalists.
        refit: whether to evaluate the refit of the winner.

    Raises:
        SearchError: the trial did not win among finalists and `unconfirmed` is False, the trial is not COMPLETE, or the
            refit is not trained.
        AlreadyEvaluatedError: the test set was evaluated with another model, or the recorded evaluation has scores.
    """
    evaluation = read_test_evaluation(study.engine, study.study_id)
    if evaluation is not None:
        is_other = trial not in {None, evaluation.trial_number} or refit != (evaluation.refit is not None)
        if evaluation.scores is not None or is_other:
            raise AlreadyEvaluatedError(evaluation)
        run = None
        if evaluation.refit is not None:
            made = load_companion(study, evaluation.refit)
            check_generated(study, made)
            run = made, find_selected_run(made, tabulate_refit(made))
        return Candidate(_find_complete_trial(study, evaluation.trial_number), evaluation.finalists, run)
    if refit and unconfirmed:
        raise SearchError("--unconfirmed and --refit exclude each other; remove one of them")
    found, number = read_finalists(study), trial
    if found is not None and number is None:
        promoted = [each.trial_number for each in list_current_promotions(study) if each.study_id == study.study_id]
        number = next((each for each in promoted if each in found.front), found.winner)
    run = None
    if refit:
        made, state = read_refit(study, number)
        check_generated(study, made)
        number, run = state.search_trial, (made, find_selected_run(made, state))
    elif not unconfirmed:
        try:
            _, number = find_winner(study, number)
        except SearchError as error:
            instead = f"--unconfirmed --trial {'N' if number is None else number}"
            raise SearchError(f"{error}, or evaluate an unconfirmed trial with {instead}") from None
    if number is None:
        best = summarise(study).best
        if best is None:
            raise SearchError(f"study {study.spec.name!r} has no complete trial to evaluate; continue the study first")
        number = best.number
    is_confirmed = found is not None and number in (found.winner, *found.front)
    finalists = found.study if found is not None and is_confirmed else None
    return Candidate(_find_complete_trial(study, number), finalists, run)


def _find_complete_trial(study: StoredStudy, number: int) -> FrozenTrial:
    trial = find_trial(study, number)
    if trial.state != TrialState.COMPLETE:
        raise SearchError(f"--trial {number}: the trial is {trial.state.name.lower()}; choose a complete trial")
    return trial


def evaluate_on_test_set(study: StoredStudy, candidate: Candidate, tracking: Tracking) -> TestEvaluation:
    """Record the test evaluation, score the candidate's best weights, and return the evaluation with the scores.

    Raises:
        AlreadyEvaluatedError: another process has recorded an evaluation.
        SearchError: the weights are unavailable, or do not match the trial.
        ObjectiveError: the data or the model have changed since the trial ran.
    """
    trained_by, trial = candidate.refit or (study, candidate.trial)
    with open_temporary_folder() as folder:
        weights = BestWeights(trained_by, trial, error_end="the test set was not evaluated")
        path = weights.fetch(tracking, folder)
        objective = trained_by.objective()
        restored = restore_model(objective, weights.read(path, objective))
        if not isinstance(restored, RestoredLoop):  # only the custom loop can measure its validation value
            weights.verify_score(restored)
        evaluation = record_test_evaluation(
            study.engine,
            study.study_id,
            trial_number=candidate.trial.number,
            model_sha256=compute_sha256(path),
            opened_by=get_user_and_host(),
            finalists=candidate.finalists,
            refit=None if candidate.refit is None else trained_by.spec.name,
        )
    return write_scores(study.engine, study.study_id, evaluation, restored.test())
