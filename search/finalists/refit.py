"""The refit of a study's winner: its configuration, trained on train and validation, on some fresh seeds.

How many epochs it takes was chosen by the winner's fresh runs, on samples that they were not trained on; the refit has
none of these left. So it cannot choose among its seeds by a score either, and takes the run of the median training
loss: neither a lucky one nor an unlucky one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import create, fresh_seeds
from hpsearch.search.finalists.table import decided_winner, why_missing
from hpsearch.search.spec.spec import FinalistsOf
from hpsearch.search.study.steering import find_trial
from hpsearch.search.study.study import StoredStudy, find_study, load_study
from hpsearch.storage.attributes import FRESH, REFIT
from hpsearch.storage.database.locks import name_lock
from hpsearch.storage.records.promotions import Promotion, promotions_of
from hpsearch.storage.trials.history import refit_studies

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
        chosen, winner = _decided(study, trial)
        epochs = confirmed_epochs(study, chosen, winner)
        made = _made_before(study, winner, epochs)
        if made is None:
            of = FinalistsOf(
                study=study.spec.name,
                study_id=study.study_id,
                top=1,
                trials=[winner],
                seeds=fresh_seeds(study, seeds or SEEDS, "refit"),
                refit=epochs,
            )
            return create(study, of, {winner: find_trial(study, winner)}), True
    of = _of(made)
    if seeds not in {None, len(of.seeds)}:
        raise SearchError(
            f"--refit-seeds {seeds}: {made.spec.name!r} was made with {len(of.seeds)}: leave it out to go on with them"
        )
    return made, False


def _decided(study: StoredStudy, trial: int | None) -> tuple[StoredStudy, int]:
    """Return the set of finalists that counts, and its winner; see `decided_winner`."""
    try:
        return decided_winner(study, trial)
    except SearchError as error:
        raise SearchError(f"--refit: {error}") from None


def confirmed_epochs(study: StoredStudy, chosen: StoredStudy, winner: int) -> int:
    """Return how many epochs the winner's fresh runs chose: the median.

    Of an even number it is the higher of the middle two, for of epochs with equal scores a run chooses the first.

    Args:
        study: the search.
        chosen: the study that holds its finalists.
        winner: number of one, in the search, that has a value for each seed.
    """
    of = _of(chosen)
    runs = [trial for trial in chosen.trials(TrialState.COMPLETE) if of.assignment(trial.number)[0] == winner]
    return statistics.median_high([epoch + 1 for run in runs for epoch in _epochs_of(run, study.spec.maximize)])


def _epochs_of(run: FrozenTrial, maximize: bool) -> list[int]:
    """Return the epochs, from 0, that the halves of a run's validation samples chose; else its best one."""
    if epochs := run.user_attrs.get(FRESH, {}).get("epochs"):
        return list(epochs)
    sign = -1 if maximize else 1
    return [min(run.intermediate_values, key=lambda epoch: (sign * run.intermediate_values[epoch], epoch))]


def _made_before(study: StoredStudy, winner: int, epochs: int) -> StoredStudy | None:
    for name in reversed(refit_studies(study.engine, study.study_id)):
        made = load_study(study.storage, name)
        of = _of(made)
        if (of.trials, of.refit) == ([winner], epochs):
            return made
    return None


def _of(study: StoredStudy) -> FinalistsOf:
    of = study.spec.finalists_of
    assert of is not None
    return of


def read_refit(study: StoredStudy, trial: int | None = None) -> tuple[StoredStudy, Refit]:
    """Return the study that holds the refit of the winner, and the refit.

    Raises:
        SearchError: there is no refit; or no finalists have decided, or for another trial than `trial`.
    """
    chosen, winner = _decided(study, trial)
    made = _made_before(study, winner, confirmed_epochs(study, chosen, winner))
    if made is None:
        again = command("promote", study.spec.name, "--refit")
        raise SearchError(f"--refit: the winner of study {study.spec.name!r} is not trained on all data yet: {again}")
    return made, tabulate_refit(made)


def taken_run(made: StoredStudy, refit: Refit) -> FrozenTrial:
    """Return the run of a refit that is promoted.

    Raises:
        SearchError: some runs have not ended, or none has a training loss.
    """
    if refit.pending:
        raise SearchError(f"--refit: {made.spec.name!r} is not done, {refit.pending} are left: go on with {made.go_on}")
    if refit.taken is None:
        why = "; ".join(f"trial {number} {why}" for number, why in enumerate(refit.reasons))
        raise SearchError(f"--refit: no run of {made.spec.name!r} has come to its end: {why}")
    return find_trial(made, refit.taken)


def tabulate_refit(made: StoredStudy) -> Refit:
    """Return what the runs of a refit came to."""
    of = _of(made)
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
        reasons=tuple(why_missing(trial) for trial in trials),
        taken=ranked[(len(ranked) - 1) // 2] if ranked and not pending else None,
        pending=pending,
    )


def refit_lines(made: StoredStudy, found: Refit) -> list[str]:
    """Return what a refit came to, in lines of plain text: the training loss of each run, and which one is taken."""
    lines = []
    for number, (seed, loss, why) in enumerate(zip(found.seeds, found.losses, found.reasons, strict=True)):
        said = why if loss is None else f"train loss {loss:.6g}"
        mark = ", the median: it is taken" if number == found.taken else ""
        lines.append(f"trial {number} of {found.study}, seed {seed}: {said}{mark}")
    if not found.pending and found.taken is None:
        lines.append(f"no run has come to its end: see why with {command('show', made.spec.name)}")
    return lines


def with_refits(study: StoredStudy) -> list[Promotion]:
    """Return the promotions of a study's trials and of refits of its winners, the first one first."""
    refits = [find_study(study.storage, name) for name in refit_studies(study.engine, study.study_id)]
    of = [study.study_id, *(each for each in refits if each is not None)]
    found = [promotion for study_id in of for promotion in promotions_of(study.engine, study_id)]
    return sorted(found, key=lambda promotion: promotion.promoted_at)


def current(study: StoredStudy, *, trial: int | None = None) -> list[Promotion]:
    """Return the promotions of a study and its refits, or of one trial, whose aliases still name the version."""
    found = with_refits(study) if trial is None else promotions_of(study.engine, study.study_id)
    return [p for p in found if p.ended_at is None and trial in (None, p.trial_number)]
