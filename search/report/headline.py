"""The headline of a study: its lead, whether new runs confirm it, its cost, and the next steps."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.references import BUILTIN
from hpsearch.search.console import format_command, format_difference, format_score, pluralize, shorten_line
from hpsearch.search.finalists.table import Finalists
from hpsearch.search.report.importances import compute_importances
from hpsearch.search.study.promotions import list_current_promotions
from hpsearch.search.study.ranking import get_first_value, sort_best_first
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, format_seconds, format_value
from hpsearch.short_lists import join_first, list_trials
from hpsearch.storage.attributes import INFEASIBLE, ORIGIN, REASON, VAL_SAMPLES
from hpsearch.storage.records.test_evaluations import read_test_evaluation
from hpsearch.storage.trials.history import read_run_intervals

_SAME = 1e-6  # relative difference up to which values are equal: metrics of counts may be float32
_MAX_SAMPLES = 2**53  # the attribute may be any number
_NOISE_ERRORS = 2.0  # a lead below this number of standard errors may be chance
_EDGE = 0.02  # share of a range at either end that is its edge
_MIN_FLAT_TRIALS = 20  # with fewer trials without a better value, more trials may help
_MIN_FAILURES = 3
_IMPORTANT, _MAX_IMPORTANT = 0.1, 3  # smallest share of an important parameter, and their maximum number
_FAILURE_SHARE = 0.05
_TRIALS_PER_PARAMETER = 5  # below this number of trials, most of the space is unexplored


@dataclass(frozen=True)
class NextStep:
    """A finding of a study, and the command that follows from it."""

    finding: str
    command: str


@dataclass(frozen=True)
class Headline:
    """The answers of a study in a few lines, without a period.

    Attributes:
        results: the lead of the best trial over the second, and over the default configuration, or the best trials
            by each metric; whether new runs confirm the result; the most important parameters.
        gain: gain of the best trial over the default configuration; None if unknown.
        cost: time and epochs; empty if no trial has run.
        next_steps: findings with their commands, most important first.
    """

    results: list[str]
    gain: float | None
    cost: str
    next_steps: list[NextStep]

    def format_lines(self) -> list[str]:
        """Return the lines for a terminal, without the next steps."""
        return [*self.results, *([f"cost: {self.cost}"] if self.cost else [])]

    def format_next_steps(self) -> list[str]:
        """Return the next steps as lines for a terminal."""
        return [f"next: {step.finding}:\n    {step.command}" for step in self.next_steps]


def make_headline(study: StoredStudy, summary: Summary, finalists: Finalists | None) -> Headline:
    """Return the headline of a search.

    Args:
        study: the search.
        summary: summary of the study.
        finalists: finalists of the study; None if there are none.
    """
    results, gain, is_tie = list[str](), None, False
    has_winner = finalists is not None and finalists.winner is not None
    if study.spec.is_multi_objective:
        results = [*_format_best_of_each_metric(study), *_find_default_on_front(study, summary)]
    elif (finalists_of := study.spec.finalists_of) is not None:
        if summary.front and finalists_of.refit is None:  # one run ahead of another has no meaning
            again = format_command("show", finalists_of.study)
            results = [f"the means of the finalists decide, not their best run: {again}"]
    elif summary.best is not None:
        lead, is_tie = _format_lead(study)
        default, gain = _compare_with_default(study, summary.best)
        results = [line for line in (lead, default) if line]
        if has_winner:  # new runs decide, not the values of the search
            ranks = ("tied", "ahead", "better", "no better")
            subject = f"in the search, trial {summary.best.number} was"
            results = [f"{subject} {line}" if line.startswith(ranks) else line for line in results]
    if summary.front and study.spec.finalists_of is None:
        results += [] if has_winner or summary.finished < 2 else [_format_unconfirmed(study, summary)]
        results += _format_importances(study, summary)
    next_steps = _find_next_steps(study, summary, finalists, is_tie=is_tie)
    return Headline(results, gain, _format_cost(study, summary), next_steps)


def _is_same(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_SAME)


def _format_lead(study: StoredStudy) -> tuple[str, bool]:
    """Return the lead of the best trial over the second as text, and whether the lead may be chance."""
    ranked = [(trial.number, value) for trial in study.best_trials() if (value := get_first_value(trial)) is not None]
    if len(ranked) < 2 or not math.isfinite(ranked[0][1]):
        return "", False
    (_, best), (second, value) = ranked[:2]
    if tied := [number for number, other in ranked[1:] if _is_same(other, best)]:
        return f"tied with {list_trials(tied)}: the same value", True
    if not math.isfinite(value):
        return "", False
    lead = f"ahead of trial {second} by {format_difference(abs(best - value))}"
    samples = study.attrs.get(VAL_SAMPLES)
    if study.spec.metric != "accuracy" or not samples or not 0 < samples < _MAX_SAMPLES:
        return lead, False
    counts = [each * samples for each in (best, value)]
    if any(abs(count - round(count)) > 0.01 for count in counts):  # accuracy of tokens or pixels
        return lead, False
    # Independent errors, so that the standard error is an upper bound: both trials classify the same samples.
    error = math.sqrt(sum(each * (1 - each) / samples for each in (best, value)))
    correct = f"{pluralize(round(abs(counts[0] - counts[1])), 'sample')} of {samples}"
    if error == 0:  # one trial classifies all samples correctly, the other none
        return f"{lead} ({correct})", False
    errors = abs(best - value) / error
    return f"{lead} ({correct}, {errors:.1f} standard errors)", errors < _NOISE_ERRORS


def _compare_with_default(study: StoredStudy, best: FrozenTrial) -> tuple[str, float | None]:
    """Return the gain of the best trial over the default configuration, as text and number."""
    default = next((trial for trial in study.trials() if trial.user_attrs.get(ORIGIN) == "default"), None)
    if default is None:
        return "", None
    if default.number == best.number:
        return f"no trial is better than the default configuration, trial {default.number}", 0.0
    value, top = get_first_value(default), get_first_value(best)
    if default.state != TrialState.COMPLETE or value is None or top is None or not math.isfinite(value):
        state = {TrialState.PRUNED: "was pruned", TrialState.FAIL: "failed"}.get(default.state, "has not finished")
        return f"the default configuration, trial {default.number}, {state}", None
    gain = top - value if study.spec.maximize else value - top
    if _is_same(top, value):
        return f"no better than the default configuration, trial {default.number}", 0.0
    return f"better than the default configuration, trial {default.number}, by {format_difference(gain)}", gain


def _format_best_of_each_metric(study: StoredStudy) -> list[str]:
    """Return a line per metric with its best value, the trials that have it, and their lead over the next trial."""
    lines, trials = [], study.best_trials()
    for place, name in enumerate(study.spec.direction_by_metric):
        values = {trial.number: trial.values[place] for trial in trials}
        ranked = sort_best_first(values, maximize=study.spec.maximize_each[place])
        if not ranked:
            continue
        best = values[ranked[0]]
        equal = [number for number in ranked if _is_same(values[number], best)]
        line = f"best {name}: {format_value(best)}, {list_trials(equal)}"
        if others := [number for number in ranked if number not in equal]:
            line += f", ahead of trial {others[0]} by {format_difference(abs(best - values[others[0]]))}"
        lines.append(line)
    return lines


def _find_default_on_front(study: StoredStudy, summary: Summary) -> list[str]:
    """Return a line about the trial of the default configuration; an empty list without such a trial."""
    front = {trial.number for trial in summary.front}
    default = [trial.number for trial in study.trials() if trial.user_attrs.get(ORIGIN) == "default"]
    where = "on" if front.intersection(default) else "not on"
    return [f"the default configuration, trial {default[0]}, is {where} the Pareto front"] if default and front else []


def _format_unconfirmed(study: StoredStudy, summary: Summary) -> str:
    """Return the line for a result that no new runs confirm."""
    trials = pluralize(summary.finished, "trial")
    if study.spec.is_multi_objective:
        return f"not confirmed by new runs: the front is the best of {trials}, so its values are too optimistic"
    value = get_first_value(summary.front[0])
    return f"not confirmed by new runs: {format_score(value)} is the best of {trials}, so it is too optimistic"


def _format_importances(study: StoredStudy, summary: Summary) -> list[str]:
    """Return a line per metric: ``most important: lr (72%)``, or why the importances are unknown.

    There is no line with a single parameter. With one metric, parameters that the best trial lacks are marked.
    """
    lines = list[str]()
    if len(parameters := {name for trial in study.trials() for name in trial.params}) < 2:
        return lines
    for place, name in enumerate(study.spec.direction_by_metric):
        found = compute_importances(study, place)
        if isinstance(found, str):
            return [f"importances: {found[0].lower()}{found[1:].rstrip('.')}"]
        best = parameters if study.spec.is_multi_objective else summary.front[0].params
        important = [
            f"{key} ({share:.0%}{'' if key in best else ', not in the best trial'})"
            for key, share in found.shares[:_MAX_IMPORTANT]
            if share >= _IMPORTANT
        ]
        subject = f"most important for {name}" if study.spec.is_multi_objective else "most important"
        lines += [f"{subject}: {', '.join(important)}"] if important else []
    return lines


def _format_cost(study: StoredStudy, summary: Summary) -> str:
    """Return the cost of a study as text: ``41 s elapsed, 78 s of worker time, 87 epochs``."""
    intervals = sorted((each.started_at, each.ended_at) for each in read_run_intervals(study.engine, study.study_id))
    if not intervals:
        return ""
    elapsed, end = 0.0, intervals[0][0]
    for start, stop in intervals:  # the time in which no trial ran does not count
        elapsed += max((stop - max(start, end)).total_seconds(), 0.0)
        end = max(end, stop)
    worked = sum((stop - start).total_seconds() for start, stop in intervals)
    epochs = pluralize(summary.epochs_run, "epoch")
    return f"{format_seconds(elapsed)} elapsed, {format_seconds(worked)} of worker time, {epochs}"


def _find_next_steps(
    study: StoredStudy, summary: Summary, finalists: Finalists | None, *, is_tie: bool
) -> list[NextStep]:
    spec = study.spec
    steps = _find_failures(study, summary)
    if spec.finalists_of is not None or not summary.front:
        return steps
    single = None if spec.is_multi_objective else summary.best
    is_population = spec.pruner.shares_checkpoints
    steps += _find_edges(study, single) if single is not None and not is_population else []
    if not study.is_spent(summary.finished):
        return steps
    flat = count_flat_trials(study, single) if single is not None else 0
    is_decided = finalists is not None and finalists.winner is not None
    n_parameters = max(len(trial.params) for trial in study.trials())
    why = "the best trials may differ by chance only" if is_tie else "the best value is partly luck"
    if flat >= max(_MIN_FLAT_TRIALS, summary.finished / 2):
        why = f"the last {flat} of {pluralize(summary.finished, 'trial')} found no better value"
    elif is_population:
        pass  # it cannot be extended
    elif summary.finished < _TRIALS_PER_PARAMETER * n_parameters and study.early_stop is None and not is_decided:
        few = "is not enough" if summary.finished == 1 else "are few"
        found = f"{pluralize(summary.finished, 'trial')} {few} for {pluralize(n_parameters, 'parameter')}"
        options = make_extend_options(study, summary)
        steps.append(NextStep(f"{found}, so a larger budget may help", format_command("extend", spec.name, *options)))
    return [*steps, *_suggest_confirmation(study, summary, finalists, why)]


def _suggest_confirmation(
    study: StoredStudy, summary: Summary, finalists: Finalists | None, why: str
) -> list[NextStep]:
    """Return the step that confirms the winner: finalists (with the reason), then the test set, then the promotion."""
    name = study.spec.name
    if finalists is None or finalists.pending:
        if summary.complete < 2:
            return []
        return [NextStep(f"{why}; retrain the best ones on new seeds", format_command("finalists", name))]
    if finalists.winner is None:
        return []
    if read_test_evaluation(study.engine, study.study_id) is None:
        return [NextStep("evaluate the winner on the test set, once", format_command("evaluate-test", name))]
    if not list_current_promotions(study):
        return [NextStep("register the winner as a model", format_command("promote", name))]
    return []


def make_extend_options(study: StoredStudy, summary: Summary) -> tuple[str, str]:
    """Return the flag of `extend`, and its value, that double the budget that is spent."""
    spec, spending = study.spec, study.spending
    if summary.finished >= study.budget or spending is None:
        return "--trials", f"+{spec.n_trials}"
    if spending.budget_epochs is not None and spending.epochs >= spending.budget_epochs:
        return "--budget-epochs", f"+{spending.budget_epochs}"
    return "--budget-seconds", f"+{max(round(spending.budget_seconds or 0), 1)}"


def count_flat_trials(study: StoredStudy, best: FrozenTrial) -> int:
    """Return how many finished trials have larger numbers than the best one.

    Numbers are compared instead of end times, because a pruner that pauses trials ends most of them at the end of the
    search.
    """
    return sum(trial.state.is_finished() and trial.number > best.number for trial in study.trials())


def _find_edges(study: StoredStudy, best: FrozenTrial) -> list[NextStep]:
    """Return a step for the parameters of the best trial at an edge of their ranges.

    An edge does not count if a trial with the same value is not at this edge. The range of a built-in objective cannot
    be widened.
    """
    spec = study.spec
    if spec.objective in BUILTIN:
        return []
    top = get_first_value(best)
    equal = [each for each in study.best_trials() if top is not None and _is_same(get_first_value(each) or 0.0, top)]
    found = []
    for name, value in best.params.items():
        side = find_edge(best.distributions[name], value)
        if side is None or any(_find_edge_of(each, name) != side for each in equal):
            continue
        distribution = best.distributions[name]
        low, high = (format_value(getattr(distribution, end)) for end in ("low", "high"))
        found.append(f"{name} {format_value(value)} ({side} edge of {low} to {high})")
    if not found:
        return []
    finding = f"the best trial is at the edge of a range: {join_first(found)}; widen it in suggest, and search"
    options = ("--warm-start", spec.name) if spec.sampler.can_warm_start and not spec.constraints else ()
    command = format_command("run", spec.objective, "--name", f"{spec.name}-wider", *options)
    return [NextStep(f"{finding} again", command)]


def _find_edge_of(trial: FrozenTrial, name: str) -> str | None:
    return find_edge(trial.distributions[name], trial.params[name]) if name in trial.params else None


def find_edge(distribution: object, value: float) -> str | None:
    """Return the edge of the range at which a value is: "lower", "upper", or None.

    Lower edges that are natural bounds do not count: 0, and 1 for integers.
    """
    if not isinstance(distribution, FloatDistribution | IntDistribution) or distribution.low >= distribution.high:
        return None
    low, high, at = float(distribution.low), float(distribution.high), float(value)
    is_natural = low == 0 or (low == 1 and isinstance(distribution, IntDistribution))
    if distribution.log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    if low >= high:  # integers that differ by less than the precision of floats
        return None
    share = (at - low) / (high - low)
    if share >= 1 - _EDGE:
        return "upper"
    return "lower" if share <= _EDGE and not is_natural else None


def _find_failures(study: StoredStudy, summary: Summary) -> list[NextStep]:
    """Return a step if many trials failed or were infeasible for the same reason, or if any trial failed."""
    reasons, failed = dict[int, str](), list[int]()
    for trial in study.trials(TrialState.FAIL, TrialState.PRUNED):
        if trial.state == TrialState.FAIL or trial.user_attrs.get(INFEASIBLE):
            reasons[trial.number] = str(trial.user_attrs.get(REASON, "")).split("\n", 1)[0]
        if trial.state == TrialState.FAIL:
            failed.append(trial.number)
    if not reasons:
        return []
    kinds = {number: re.sub(r"[\d.]+", "N", reason)[:60] for number, reason in reasons.items()}
    kind, count = Counter(kinds.values()).most_common(1)[0]
    of_all = f"of {pluralize(summary.finished, 'trial')} failed"
    if count >= max(_MIN_FAILURES, _FAILURE_SHARE * summary.finished):
        chosen = [number for number, each in kinds.items() if each == kind]
        found = f"{count} {of_all} or diverged for the same reason"
    elif failed:
        chosen, found = failed, f"{len(failed)} {of_all}"
    else:
        return []
    last = max(chosen)
    such = "trial" if len(chosen) == 1 else "such as trial"
    why = f", {such} {last}: {shorten_line(reasons[last], 120).removesuffix('.')}" if reasons[last] else ""
    return [NextStep(f"{found}{why}", format_command("show", study.spec.name, "--trial", str(last)))]
