"""The refit of a winner: its configuration is trained on training and validation data, with several new seeds.

The number of epochs is the median of the best epochs of the winner's runs on new seeds. No validation data is left to
compare the runs of a refit, so the run with the median training loss is promoted.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import format_command, pluralize
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.table import describe_missing_value, find_winner
from hpsearch.search.study.control import find_trial
from hpsearch.search.study.study import StoredStudy, load_companion
from hpsearch.storage.attributes import REFIT, RESPLIT_SCORE
from hpsearch.storage.trials.history import read_refit_studies


@dataclass(frozen=True)
class Refit:
    """State of a refit.

    Attributes:
        study: name of the refit study.
        search_trial: trial number of the winner in the search.
        epochs: number of epochs of each run.
        seeds: seeds of the runs.
        losses: training loss of each run's last epoch; None if the run has not ended, failed or diverged.
        missing_reasons: per run, why its loss is missing; None if the run has a loss.
        selected_trial: number of the run to promote; None if some runs have not ended, or no run has a loss.
        pending: number of unfinished runs.
    """

    study: str
    search_trial: int
    epochs: int
    seeds: tuple[int, ...]
    losses: tuple[float | None, ...]
    missing_reasons: tuple[str | None, ...]
    selected_trial: int | None
    pending: int


def find_refit_winner(study: StoredStudy, trial: int | None) -> tuple[StoredStudy, int]:
    """Call `find_winner`; its error messages are prefixed with the name of the option."""
    try:
        return find_winner(study, trial)
    except SearchError as error:
        raise SearchError(f"--refit: {error}") from None


def choose_refit_epochs(study: StoredStudy, chosen: StoredStudy, winner: int) -> int:
    """Return the number of epochs of a refit: the median of the best epochs of the winner's runs on new seeds.

    For an even number of values, the upper median is returned, because a run selects the first of several equal epochs.

    Args:
        study: the search.
        chosen: the finalist study of the search.
        winner: number of the winner's trial in the search. The winner has a value for each seed.
    """
    of = chosen.finalists_of
    runs = [trial for trial in chosen.trials(TrialState.COMPLETE) if of.get_trial_and_seed(trial.number)[0] == winner]
    return statistics.median_high([epoch + 1 for run in runs for epoch in get_chosen_epochs(run, study.spec.maximize)])


def get_chosen_epochs(run: FrozenTrial, maximize: bool) -> list[int]:
    """Return the best epoch of a run, counted from 0.

    For a run whose validation samples were halved, return the best epoch according to each half.
    """
    record = run.user_attrs.get(RESPLIT_SCORE)
    stored = record.get("epochs") if isinstance(record, dict) else None
    if (
        stored and isinstance(stored, list) and all(isinstance(epoch, int) and epoch >= 0 for epoch in stored)
    ):  # otherwise damaged
        return stored
    sign = -1 if maximize else 1
    return [min(run.intermediate_values, key=lambda epoch: (sign * run.intermediate_values[epoch], epoch))]


def find_refit(study: StoredStudy, winner: int, epochs: int) -> StoredStudy | None:
    """Return the refit study of a winner with a number of epochs; None if there is none."""
    for name in reversed(read_refit_studies(study.engine, study.study_id)):
        made = load_companion(study, name)
        of = made.finalists_of
        if (of.trials, of.refit) == ([winner], epochs):
            return made
    return None


def read_refit(study: StoredStudy, trial: int | None = None) -> tuple[StoredStudy, Refit]:
    """Return the refit study of the winner, and the state of the refit.

    Raises:
        SearchError: there is no refit, the finalists have no result, or the winner is not `trial`.
    """
    chosen, winner = find_refit_winner(study, trial)
    made = find_refit(study, winner, choose_refit_epochs(study, chosen, winner))
    if made is None:
        again = format_command("promote", study.spec.name, "--refit")
        raise SearchError(f"--refit: the winner of study {study.spec.name!r} has no refit yet; train it with {again}")
    return made, tabulate_refit(made)


def find_selected_run(made: StoredStudy, refit: Refit) -> FrozenTrial:
    """Return the run of a refit to promote.

    Raises:
        SearchError: some runs have not ended, or no run has a training loss.
    """
    if refit.pending:
        raise SearchError(
            f"--refit: study {made.spec.name!r} has {pluralize(refit.pending, 'unfinished run')}; continue with "
            f"{made.resume_command}"
        )
    if refit.selected_trial is None:
        reasons = ", ".join(f"trial {number} {reason}" for number, reason in enumerate(refit.missing_reasons))
        again = format_command("show", made.spec.name)
        raise SearchError(f"--refit: no run of {made.spec.name!r} is complete ({reasons}); see errors with {again}")
    return find_trial(made, refit.selected_trial)


def tabulate_refit(made: StoredStudy) -> Refit:
    """Return the state of a refit."""
    of = made.finalists_of
    assert of.refit is not None
    trials = [trial for trial in made.trials() if trial.number < made.spec.n_trials]
    ended = {t.number: float(t.user_attrs[REFIT]["train_loss"]) for t in trials if t.state == TrialState.COMPLETE}
    pending = sum(not trial.state.is_finished() for trial in trials)
    ranked = sorted(ended, key=lambda number: (ended[number], number))
    return Refit(
        study=made.spec.name,
        search_trial=of.trials[0],
        epochs=of.refit,
        seeds=tuple(of.seeds),
        losses=tuple(ended.get(trial.number) for trial in trials),
        missing_reasons=tuple(describe_missing_value(trial) for trial in trials),
        selected_trial=ranked[(len(ranked) - 1) // 2] if ranked and not pending else None,
        pending=pending,
    )


def format_refit(made: StoredStudy, found: Refit) -> list[str]:
    """Return one line per run with its training loss; the line of the selected run is marked."""
    lines = []
    for number, (seed, loss, reason) in enumerate(zip(found.seeds, found.losses, found.missing_reasons, strict=True)):
        outcome = reason if loss is None else f"train loss {loss:.6g}"
        mark = ", selected as the median" if number == found.selected_trial else ""
        lines.append(f"trial {number} of {found.study}, seed {seed}: {outcome}{mark}")
    if not found.pending and found.selected_trial is None:
        lines.append(f"no run is complete; see the reasons with {format_command('show', made.spec.name)}")
    return lines
