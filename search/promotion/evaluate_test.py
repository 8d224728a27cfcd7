"""The test set of a study: evaluated once, with the winner's model.

All checks come first: the weights are downloaded, loaded, and must reproduce the validation value. Only then is the
evaluation recorded in the database, which rejects a second one, and only after that is the test data scored.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.custom_loop.loop_objective import RestoredLoop
from hpsearch.objectives.fit import restore_model
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.refit import find_selected_run, list_current_promotions, read_refit, tabulate_refit
from hpsearch.search.finalists.table import find_winner, read_finalists
from hpsearch.search.promotion.weights import BestWeights
from hpsearch.search.study.steering import find_trial, get_user_and_host
from hpsearch.search.study.study import StoredStudy, load_study
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
    """Model to evaluate on the test set.

    Attributes:
        trial: trial of the study.
        finalists: name of the study whose finalists chose it; None if unconfirmed.
        refit: study of the refit and its run, which is scored instead of the trial's own model.
    """

    trial: FrozenTrial
    finalists: str | None
    refit: tuple[StoredStudy, FrozenTrial] | None = None

    @property
    def subject(self) -> str:
        """Whose model is scored, for a person."""
        return f"{'' if self.refit is None else 'the refit of '}trial {self.trial.number}"


def choose_candidate(study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False) -> Candidate:
    """Return for whom the test set of a study is to be opened.

    An opening whose scores were never written is gone on with, whoever wins by now.

    Args:
        study: the study.
        trial: of that number, where finalists do not say which; by default the search's best.
        unconfirmed: whether a trial will do that did not win among finalists.
        refit: whether it is opened for the refit of the winner.

    Raises:
        SearchError: no finalists have decided, or for another trial, and it is not to be unconfirmed; or the trial
            is not complete, or the refit not trained.
        AlreadyEvaluatedError: it was opened, for another trial or with scores.
    """
    opening = read_test_evaluation(study.engine, study.study_id)
    if opening is not None:
        other = trial not in {None, opening.trial_number} or refit != (opening.refit is not None)
        if opening.scores is not None or other:
            raise AlreadyEvaluatedError(opening)
        run = None
        if opening.refit is not None:
            made = load_study(study.storage, opening.refit)
            run = made, find_selected_run(made, tabulate_refit(made))
        return Candidate(_complete(study, opening.trial_number), opening.finalists, run)
    if refit and unconfirmed:
        raise SearchError("--unconfirmed: a refit is of the finalists' winner: leave it out")
    found, number = read_finalists(study), trial
    if found is not None and number is None:
        promoted = [each.trial_number for each in list_current_promotions(study) if each.study_id == study.study_id]
        number = next((each for each in promoted if each in found.front), found.winner)
    run = None
    if refit:
        made, its = read_refit(study, number)
        number, run = its.of, (made, find_selected_run(made, its))
    elif not unconfirmed:
        try:
            _, number = find_winner(study, number)
        except SearchError as error:
            instead = f"--unconfirmed --trial {'N' if number is None else number}"
            raise SearchError(f"{error}, or open the test set for an unconfirmed trial with {instead}") from None
    if number is None:
        best = summarise(study).best
        if best is None:
            name = study.spec.name
            raise SearchError(f"study {name!r} has no complete trial: there is nothing to open the test set for")
        number = best.number
    confirmed = found is not None and number in (found.winner, *found.front)
    return Candidate(_complete(study, number), found.study if found is not None and confirmed else None, run)


def _complete(study: StoredStudy, number: int) -> FrozenTrial:
    trial = find_trial(study, number)
    if trial.state != TrialState.COMPLETE:
        raise SearchError(f"--trial {number}: it is {trial.state.name.lower()}; only a complete trial has a test score")
    return trial


def evaluate_on_test_set(study: StoredStudy, candidate: Candidate, tracking: Tracking) -> TestEvaluation:
    """Open the test set of a study for a trial, score its best weights, and return the opening with the scores.

    Raises:
        AlreadyEvaluatedError: somebody else has opened it.
        SearchError: the weights are not to be had, or are not the trial's.
        ObjectiveError: the data or the model are not those of the trial any more.
    """
    of, trial = candidate.refit or (study, candidate.trial)
    with tempfile.TemporaryDirectory() as folder:
        weights = BestWeights(of, trial, undone="nothing was opened")
        path = weights.fetch(tracking, Path(folder))
        restored = restore_model(of.objective(), weights.read(path))
        if not isinstance(restored, RestoredLoop):  # only its own loop can measure the value
            weights.verify_score(restored)
        opening = record_test_evaluation(
            study.engine,
            study.study_id,
            trial_number=candidate.trial.number,
            model_sha256=compute_sha256(path),
            opened_by=get_user_and_host(),
            finalists=candidate.finalists,
            refit=None if candidate.refit is None else of.spec.name,
        )
    return write_scores(study.engine, study.study_id, opening, restored.test())
