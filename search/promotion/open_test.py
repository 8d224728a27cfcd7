"""The sealed test set of a study: opened once, for the winner, after the choice.

Everything that can go wrong is tried before: the weights are fetched, put into their model, and must score on the
validation data what they scored when they were trained. Only then is the opening written to the database, which
refuses a second one, and only after that is the test data scored.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.fit import restore
from hpsearch.objectives.own_loop.loop_objective import RestoredLoop
from hpsearch.objectives.training.checks.held_out import Restored
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import Finalists, read_finalists
from hpsearch.search.finalists.refit import current, read_refit, tabulate_refit
from hpsearch.search.finalists.table import newest_set
from hpsearch.search.promotion.weights import BestWeights
from hpsearch.search.study.steering import find_trial, whoami
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.search.study.summary import summarise
from hpsearch.storage.files import sha256
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.records.test_openings import AlreadyOpenError, Opening, open_test_set, read_opening, write_scores


@dataclass(frozen=True)
class Candidate:
    """For whom a test set is to be opened.

    Attributes:
        trial: of the study.
        finalists: name of the study whose finalists chose it; None: nobody confirmed it.
        refit: the study that holds the refit which is scored in place of the trial's own model, and its run.
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
        AlreadyOpenError: it was opened, for another trial or with scores.
    """
    opening = read_opening(study.engine, study.study_id)
    if opening is not None:
        other = trial not in {None, opening.trial_number} or refit != (opening.refit is not None)
        if opening.scores is not None or other:
            raise AlreadyOpenError(opening)
        of = None if opening.refit is None else _taken(load_study(study.storage, opening.refit))
        return Candidate(_complete(study, opening.trial_number), opening.finalists, of)
    if refit and unconfirmed:
        raise SearchError("--unconfirmed: a refit is of the finalists' winner: leave it out")
    found = read_finalists(study)
    winner = None if found is None else _winner(study, found, trial)
    name, again = study.spec.name, command("finalists", study.spec.name)
    newest = newest_set(study)
    if not unconfirmed:
        if newest is not None and found is not None and newest.spec.name != found.study:
            raise SearchError(
                f"finalists of {name!r} were chosen anew, in {newest.spec.name}, and are not done: go on with {again}, "
                f"or open the test set for the winner of {found.study} with --unconfirmed --trial {winner}"
            )
        if found is None:
            raise SearchError(
                f"study {name!r} has no finalists: the best of a search over-states itself; choose a winner with "
                f"{again}, or open the test set for an unconfirmed trial with --unconfirmed"
            )
        if found.pending:
            raise SearchError(f"the finalists of {name!r} are not done, {found.pending} are left: go on with {again}")
        if winner is None and found.front:
            raise SearchError(
                f"no other finalist of {name!r} dominates trials {', '.join(map(str, found.front))}: promote one of "
                "them, or choose one with --trial or --prefer"
            )
        if winner is None:
            raise SearchError(
                f"the finalists of {name!r} have no winner: see {again}, or open the test set for an unconfirmed trial "
                "with --unconfirmed --trial N"
            )
        if trial not in {None, winner}:
            raise SearchError(
                f"--trial {trial}: the winner among the finalists of {name!r} is trial {winner}: leave it out, or add "
                "--unconfirmed"
            )
    number = trial if trial is not None else winner
    if number is None:
        best = summarise(study).best
        if best is None:
            raise SearchError(f"study {name!r} has no complete trial: there is nothing to open the test set for")
        number = best.number
    confirmed = found is not None and number == winner
    finalists = found.study if found is not None and confirmed else None
    return Candidate(_complete(study, number), finalists, _refit(study, trial) if refit else None)


def _winner(study: StoredStudy, found: Finalists, trial: int | None) -> int | None:
    """Return the winner; of several that no other dominates the chosen one: that is named, or was promoted last."""
    if found.winner is not None or not found.front:
        return found.winner
    promoted = [each.trial_number for each in current(study) if each.study_id == study.study_id]
    return next((number for number in [trial, *promoted] if number is not None and number in found.front), None)


def _refit(study: StoredStudy, trial: int | None) -> tuple[StoredStudy, FrozenTrial]:
    """Return the refit of the winner and the run of it that is taken."""
    found = read_refit(study, trial)
    if found is None or found[1].taken is None:
        again = command("promote", study.spec.name, "--refit")
        raise SearchError(f"--refit: the winner of study {study.spec.name!r} is not trained on all data yet: {again}")
    return _taken(found[0])


def _taken(made: StoredStudy) -> tuple[StoredStudy, FrozenTrial]:
    taken = tabulate_refit(made).taken
    assert taken is not None
    return made, find_trial(made, taken)


def _complete(study: StoredStudy, number: int) -> FrozenTrial:
    trial = find_trial(study, number)
    if trial.state != TrialState.COMPLETE:
        raise SearchError(f"--trial {number}: it is {trial.state.name.lower()}; only a complete trial has a test score")
    return trial


def open_for(study: StoredStudy, candidate: Candidate, tracking: Tracking) -> Opening:
    """Open the test set of a study for a trial, score its best weights, and return the opening with the scores.

    Raises:
        AlreadyOpenError: somebody else has opened it.
        SearchError: the weights are not to be had, or are not the trial's.
        ObjectiveError: the data or the model are not those of the trial any more.
    """
    of, trial = candidate.refit or (study, candidate.trial)
    with tempfile.TemporaryDirectory() as folder:
        weights = BestWeights(of, trial, undone="nothing was opened")
        path = weights.fetch(tracking, Path(folder))
        restored = _restore(of, weights, path)
        opening = open_test_set(
            study.engine,
            study.study_id,
            trial_number=candidate.trial.number,
            model_sha256=sha256(path),
            opened_by=whoami(),
            finalists=candidate.finalists,
            refit=None if candidate.refit is None else of.spec.name,
        )
    return write_scores(study.engine, study.study_id, opening, restored.test())


def _restore(study: StoredStudy, weights: BestWeights, path: Path) -> Restored | RestoredLoop:
    """Put the weights back into their model, when they are what the trial says they are."""
    best = weights.read(path)
    restored = restore(study.objective(), best)
    if not isinstance(restored, RestoredLoop):  # nobody but its own loop knows what the value was measured on
        weights.require_value(restored)
    return restored
