"""The refit of a study's winner: its configuration, trained on train and validation, on some fresh seeds.

How many epochs it takes was chosen by the winner's fresh runs, on samples that they were not trained on; the refit has
none of these left. So it cannot choose among its seeds by a score either, and takes the run of the median training
loss: neither a lucky one nor an unlucky one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import create_finalist_study, derive_new_seeds
from hpsearch.search.finalists.table import describe_missing_value, find_winner
from hpsearch.search.spec.spec import FinalistsOf
from hpsearch.search.study.steering import find_trial
from hpsearch.search.study.study import StoredStudy, find_study, load_study
from hpsearch.storage.attributes import FRESH, REFIT
from hpsearch.storage.database.locks import name_lock
from hpsearch.storage.records.promotions import Promotion, read_promotions
from hpsearch.storage.trials.history import read_refit_studies

SEEDS = 3


@dataclass(frozen=True)
class Refit:
    """A refit, as it stands.

    Attributes:
        study: name of the study that it is trained in.
        of: number of the winner, in the search.
        epochs: that each run takes.
        seeds: of the runs.
        losses: the training loss of each run's last epoch; None where it has not ended, failed or diverged.
        reasons: why a loss is missing, for each run; None where it is there.
        taken: number of the run that is promoted; None until all have ended, and where none has a loss.
        pending: how many runs have not ended.
    """

    study: str
    of: int
    epochs: int
    seeds: tuple[int, ...]
    losses: tuple[float | None, ...]
    reasons: tuple[str | None, ...]
    taken: int | None
    pending: int


def create_or_join_refit(
    study: StoredStudy, *, seeds: int | None, trial: int | None = None
) -> tuple[StoredStudy, bool]:
    """Make the refit of a study's winner with all its trials, or join the one that was made before.

    Args:
        study: the search.
        seeds: how many; `SEEDS`, or as it was made, unless given.
        trial: the winner, where somebody names it.

    Returns:
        The study of the refit, and whether it was made now.

    Raises:
        SearchError: no finalists have decided, or for another trial; or it was made with other seeds.
    """
    if seeds is not None and seeds % 2 == 0:
        raise SearchError(f"--refit-seeds {seeds}: give an odd number, so that one run is the median of all")
    with name_lock(study.engine, study.spec.name):
        chosen, winner = _find_winner(study, trial)
        epochs = choose_refit_epochs(study, chosen, winner)
        made = _find_refit(study, winner, epochs)
        if made is None:
            of = FinalistsOf(
                study=study.spec.name,
                study_id=study.study_id,
                top=1,
                trials=[winner],
                seeds=derive_new_seeds(study, seeds or SEEDS, "refit"),
                refit=epochs,
            )
            return create_finalist_study(study, of, {winner: find_trial(study, winner)}), True
    of = _get_finalists_of(made)
    if seeds not in {None, len(of.seeds)}:
        raise SearchError(
            f"--refit-seeds {seeds}: {made.spec.name!r} was made with {len(of.seeds)}: leave it out to go on with them"
        )
    return made, False


def _find_winner(study: StoredStudy, trial: int | None) -> tuple[StoredStudy, int]:
    """Return the set of finalists that counts, and its winner; see `find_winner`."""
    try:
        return find_winner(study, trial)
    except SearchError as error:
        raise SearchError(f"--refit: {error}") from None


def choose_refit_epochs(study: StoredStudy, chosen: StoredStudy, winner: int) -> int:
    """Return how many epochs the winner's fresh runs chose: the median.

    Of an even number it is the higher of the middle two, for of epochs with equal scores a run chooses the first.

    Args:
        study: the search.
        chosen: the study that holds its finalists.
        winner: number of one, in the search, that has a value for each seed.
    """
    of = _get_finalists_of(chosen)
    runs = [trial for trial in chosen.trials(TrialState.COMPLETE) if of.assignment(trial.number)[0] == winner]
    return statistics.median_high([epoch + 1 for run in runs for epoch in _get_chosen_epochs(run, study.spec.maximize)])


def _get_chosen_epochs(run: FrozenTrial, maximize: bool) -> list[int]:
    """Return the epochs, from 0, that the halves of a run's validation samples chose; else its best one."""
    if epochs := run.user_attrs.get(FRESH, {}).get("epochs"):
        return list(epochs)
    sign = -1 if maximize else 1
    return [min(run.intermediate_values, key=lambda epoch: (sign * run.intermediate_values[epoch], epoch))]


def _find_refit(study: StoredStudy, winner: int, epochs: int) -> StoredStudy | None:
    for name in reversed(read_refit_studies(study.engine, study.study_id)):
        made = load_study(study.storage, name)
        of = _get_finalists_of(made)
        if (of.trials, of.refit) == ([winner], epochs):
            return made
    return None


def _get_finalists_of(study: StoredStudy) -> FinalistsOf:
    of = study.spec.finalists_of
    assert of is not None
    return of


def read_refit(study: StoredStudy, trial: int | None = None) -> tuple[StoredStudy, Refit]:
    """Return the study that holds the refit of the winner, and the refit.

    Raises:
        SearchError: there is no refit; or no finalists have decided, or for another trial than `trial`.
    """
    chosen, winner = _find_winner(study, trial)
    made = _find_refit(study, winner, choose_refit_epochs(study, chosen, winner))
    if made is None:
        again = format_command("promote", study.spec.name, "--refit")
        raise SearchError(f"--refit: the winner of study {study.spec.name!r} is not trained on all data yet: {again}")
    return made, tabulate_refit(made)


def find_selected_run(made: StoredStudy, refit: Refit) -> FrozenTrial:
    """Return the run of a refit that is promoted.

    Raises:
        SearchError: some runs have not ended, or none has a training loss.
    """
    if refit.pending:
        raise SearchError(
            f"--refit: {made.spec.name!r} is not done, {refit.pending} are left: go on with {made.resume_command}"
        )
    if refit.taken is None:
        why = "; ".join(f"trial {number} {why}" for number, why in enumerate(refit.reasons))
        raise SearchError(f"--refit: no run of {made.spec.name!r} has come to its end: {why}")
    return find_trial(made, refit.taken)


def tabulate_refit(made: StoredStudy) -> Refit:
    """Return what the runs of a refit came to."""
    of = _get_finalists_of(made)
    assert of.refit is not None
    trials = [trial for trial in made.trials() if trial.number < made.spec.n_trials]
    ended = {t.number: float(t.user_attrs[REFIT]["train_loss"]) for t in trials if t.state == TrialState.COMPLETE}
    pending = sum(not trial.state.is_finished() for trial in trials)
    ranked = sorted(ended, key=lambda number: (ended[number], number))
    return Refit(
        study=made.spec.name,
        of=of.trials[0],
        epochs=of.refit,
        seeds=tuple(of.seeds),
        losses=tuple(ended.get(trial.number) for trial in trials),
        reasons=tuple(describe_missing_value(trial) for trial in trials),
        taken=ranked[(len(ranked) - 1) // 2] if ranked and not pending else None,
        pending=pending,
    )


def format_refit(made: StoredStudy, found: Refit) -> list[str]:
    """Return what a refit came to, in lines of plain text: the training loss of each run, and which one is taken."""
    lines = []
    for number, (seed, loss, why) in enumerate(zip(found.seeds, found.losses, found.reasons, strict=True)):
        said = why if loss is None else f"train loss {loss:.6g}"
        mark = ", the median: it is taken" if number == found.taken else ""
        lines.append(f"trial {number} of {found.study}, seed {seed}: {said}{mark}")
    if not found.pending and found.taken is None:
        lines.append(f"no run has come to its end: see why with {format_command('show', made.spec.name)}")
    return lines


def list_promotions(study: StoredStudy) -> list[Promotion]:
    """Return the promotions of a study's trials and of refits of its winners, the first one first."""
    refits = [find_study(study.storage, name) for name in read_refit_studies(study.engine, study.study_id)]
    of = [study.study_id, *(each for each in refits if each is not None)]
    found = [promotion for study_id in of for promotion in read_promotions(study.engine, study_id)]
    return sorted(found, key=lambda promotion: promotion.promoted_at)


def list_current_promotions(study: StoredStudy, *, trial: int | None = None) -> list[Promotion]:
    """Return the promotions of a study and its refits, or of one trial, whose aliases still name the version."""
    found = list_promotions(study) if trial is None else read_promotions(study.engine, study.study_id)
    return [p for p in found if p.ended_at is None and trial in (None, p.trial_number)]
