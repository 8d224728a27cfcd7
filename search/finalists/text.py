"""Text output about finalists: a table, and sentences that summarize the table."""

from __future__ import annotations

import statistics

from rich.table import Table

from hpsearch.search.console import (
    format_change,
    format_difference,
    format_number,
    format_score,
    plain_table,
    pluralize,
)
from hpsearch.search.finalists.table import FinalistRow, Finalists, find_newest_set, read_finalists, tabulate_finalists
from hpsearch.search.finalists.winner import COVERAGE, ExpectedScore
from hpsearch.search.study.ranking import sort_best_first
from hpsearch.search.study.study import StoredStudy
from hpsearch.short_lists import list_trials
from hpsearch.storage.attributes import DATA_SHA256, LEAKS
from hpsearch.storage.records.test_evaluations import TestEvaluation, read_test_evaluation

_MIN_SHOWN_BIAS = 1e-7  # relative to the largest value: metrics of counts may be float32
_MAX_LISTED = 5  # trials
_VERDICT_WORDS = {"confirmed": "", "incomplete": "cannot win"}  # words that differ from the verdict


def format_confirmation(study: StoredStudy) -> list[str]:
    """Return warnings of the data, and lines about the finalists and the test evaluation; empty if there are none."""
    effective, newest = read_finalists(study), find_newest_set(study)
    lines = format_data_warnings(study)
    lines += [] if effective is None else format_finalists(study, effective)
    if effective is not None and newest is not None and newest.spec.name != effective.study:
        lines.append(f"new set, {newest.spec.name}: {format_finalists(study, tabulate_finalists(study, newest))[0]}")
    evaluation = read_test_evaluation(study.engine, study.study_id)
    return lines if evaluation is None else [*lines, format_test_result(study, evaluation, effective)]


def format_data_warnings(study: StoredStudy) -> list[str]:
    """Return the lines of `list_data_warnings` for a terminal."""
    return [f"warning: {warning}" for warning in list_data_warnings(study)]


def list_data_warnings(study: StoredStudy) -> list[str]:
    """Return the signs of leakage when the study was created, and a warning of trials that had other data."""
    warnings = [str(leak) for leak in study.attrs.get(LEAKS, {}).values()]
    changed = [trial.number for trial in study.trials() if DATA_SHA256 in trial.user_attrs]
    if changed:
        warnings.append(
            f"the data of {list_trials(changed, _MAX_LISTED)} differed from those of the study's creation, so the "
            "values are not comparable: files have changed or differ between machines, or data() returns other "
            "samples, or a dataset with another fingerprint, in each process"
        )
    return warnings


def compute_search_bias(study: StoredStudy, row: FinalistRow) -> float | None:
    """Return the difference by which a finalist's search value is better than its mean; None if it has no mean."""
    if row.mean is None:
        return None
    return row.search_value - row.mean if study.spec.maximize else row.mean - row.search_value


def rank_finalists(study: StoredStudy, found: Finalists) -> list[FinalistRow]:
    """Return the rows, best mean first. Incomplete finalists come last, in the order of the search ranking.

    In a multi-objective study, the Pareto front comes first, and rows are sorted by the mean of the first metric.
    """
    means = {row.trial: row.mean for row in found.rows if row.is_complete and row.mean is not None}
    ranked = [found.get_row(trial) for trial in sort_best_first(means, maximize=study.spec.maximize)]
    ranked.sort(key=lambda row: bool(found.front) and row.trial not in found.front)
    return ranked + [row for row in found.rows if not row.is_complete]


def finalist_table(study: StoredStudy, found: Finalists) -> Table:
    """Return the table of finalists: rank, trial, search value, mean, deviation, bias, value per seed, verdict."""
    if study.spec.is_multi_objective:
        return _make_front_table(study, found)
    numbers = ("rank", "trial", "search", "retrained", "std", "bias")
    by_seed = f"val {study.spec.metric} per {'split' if found.is_resplit else 'seed'}"
    table = plain_table(*numbers, by_seed, "", right=numbers)
    for rank, row in enumerate(rank_finalists(study, found), 1):
        over = compute_search_bias(study, row)
        table.add_row(
            str(rank) if row.is_complete else "-",
            str(row.trial),
            format_score(row.search_value),
            format_score(row.mean),
            format_difference(row.spread, "unknown"),
            format_change(over),
            "  ".join(format_run_values(row)),
            format_verdict(study, found, row),
        )
    return table


def format_run_values(row: FinalistRow) -> list[str]:
    """Return the value of each run of a finalist, or the reason why it has none."""
    return [
        format_score(v) if v is not None else str(why) for v, why in zip(row.values, row.missing_reasons, strict=True)
    ]


def format_verdict(study: StoredStudy, found: Finalists, row: FinalistRow) -> str:
    """Return the verdict on a finalist as text; an empty text until all runs have ended."""
    if found.pending:
        return ""
    verdict = found.verdict(row)
    by = found.find_dominating(row, study.spec.maximize_each) if verdict == "dominated" else []
    return f"{verdict} by {', '.join(map(str, by))}" if by else format_verdict_word(verdict)


def format_verdict_word(verdict: str) -> str:
    """Return the word that tables and figures show for a verdict."""
    return _VERDICT_WORDS.get(verdict, verdict)


def _make_front_table(study: StoredStudy, found: Finalists) -> Table:
    """Return the table of finalists of a multi-objective study: search value and mean on new seeds, per metric."""
    numbers = ("trial", *(word for name in study.spec.direction_by_metric for word in (name, "retrained")))
    table = plain_table(*numbers, "", right=numbers)
    for row in rank_finalists(study, found):
        means = [format_number(mean) for mean in row.means] or ["-"] * len(row.search_values)
        pairs = zip((format_number(value) for value in row.search_values), means, strict=True)
        table.add_row(str(row.trial), *(cell for pair in pairs for cell in pair), format_verdict(study, found, row))
    return table


def format_finalists(study: StoredStudy, found: Finalists) -> list[str]:
    """Return lines with the winner, the tied trials, the expected test score, and the selection bias of the search."""
    n_seeds = len(found.seeds)
    seeds = describe_resampling(found)
    if found.pending:
        reasons = [reason for row in found.rows for reason in row.missing_reasons]
        ended = sum(reason not in {"waiting", "running"} for reason in reasons)
        failed = sum(reason in {"failed", "diverged"} for reason in reasons)
        without = f", {failed} without a value" if failed else ""
        return [f"finalists: {ended} of {ended + found.pending} runs ended{without}, on {seeds}"]
    if not found.is_decided:
        return [f"finalists: no winner, because no finalist has a value for each of {seeds}"]
    if study.spec.is_multi_objective:
        return _format_front(found)
    assert found.winner is not None
    row = found.get_row(found.winner)
    spread = format_difference(row.spread, "unknown")
    lines = [
        f"winner: trial {row.trial}, val {study.spec.metric} {format_score(row.mean)} on {seeds}, standard deviation "
        f"{spread} ({format_score(row.search_value)} in the search)"
    ]
    if found.tie:
        tied = f"trial{'s' if len(found.tie) > 1 else ''} {', '.join(map(str, found.tie))}"
        margin = (
            "with one seed, any difference"
            if found.tie_margin is None
            else f"differences up to {format_difference(found.tie_margin)}"
        )
        rule = "lower trial number" if any(found.get_row(t).mean == row.mean for t in found.tie) else "better mean"
        lines.append(f"tied with {tied} ({margin} may be chance); the {rule} wins")
    if (expected := found.expected_score) is not None:
        lines.append(
            f"expected score on new data: {format_score(expected.mean)}, {format_interval(expected)}; "
            f"{describe_method(found)}"
        )
    elif n_seeds == 1:
        lines.append("no prediction interval: with one seed, the standard deviation is unknown")
    elif found.run_scores:
        lines.append("no prediction interval: the sampling error of the validation data is unknown")
    complete = [row for row in found.rows if row.is_complete and row.mean is not None]
    bias = statistics.fmean(compute_search_bias(study, row) or 0.0 for row in complete)
    if abs(bias) <= _MIN_SHOWN_BIAS * max(abs(row.search_value) for row in complete):
        return [*lines, "the search values of the finalists show no bias on average"]
    sign = "optimistic" if bias > 0 else "pessimistic"
    return [*lines, f"the search values of the finalists are too {sign} by {format_difference(abs(bias))} on average"]


def _format_front(found: Finalists) -> list[str]:
    """Return lines with the Pareto front of the finalists."""
    resampling = describe_resampling(found)
    if len(found.front) == 1:
        lines = [f"winner: trial {found.front[0]}, which dominates all other finalists on {resampling}"]
    else:
        *others, last = map(str, found.front)
        lines = [f"Pareto front on {resampling}: trials {', '.join(others)} and {last}"]
    dominated = [str(row.trial) for row in found.rows if row.is_complete and row.trial not in found.front]
    if dominated:
        lines.append(f"dominated on new seeds: trial{'s' if len(dominated) > 1 else ''} {', '.join(dominated)}")
    return lines


def describe_resampling(found: Finalists) -> str:
    """Return the number of new seeds, or of new splits, as text."""
    return pluralize(len(found.seeds), "new split" if found.is_resplit else "new seed")


def format_interval(expected: ExpectedScore) -> str:
    """Return the prediction interval of the test score as text."""
    return f"{format_score(expected.low)} to {format_score(expected.high)} ({COVERAGE:.0%} prediction interval)"


def describe_method(found: Finalists) -> str:
    """Return a text that states whether each seed had a new split."""
    if found.is_resplit:
        return "each seed has a new train/validation split"
    return "only the seeds are new, because data() returns fixed splits, or a test split that depends on the others"


def format_test_result(study: StoredStudy, evaluation: TestEvaluation, found: Finalists | None = None) -> str:
    """Return a line with the test score, and whether the score is within the prediction interval of the finalists."""
    origin = f"evaluated {evaluation.description}{'' if evaluation.finalists else ', not confirmed by finalists'}"
    if evaluation.scores is None:
        return f"test set: {origin}; its scores are not stored yet"
    metric = study.spec.metric
    shown = (
        f"{metric} {format_score(evaluation.scores[metric])}" if metric in evaluation.scores else f"{evaluation.scores}"
    )
    return f"test set: {shown}{_compare_with_interval(study, evaluation, found)}, {origin}"


def _compare_with_interval(study: StoredStudy, evaluation: TestEvaluation, found: Finalists | None) -> str:
    """Return a text with the position of the test score relative to the prediction interval; empty if there is none."""
    if (
        found is None
        or found.expected_score is None
        or evaluation.refit is not None  # the expected score is that of the model of the search
        or (found.study, found.winner) != (evaluation.finalists, evaluation.trial_number)
    ):
        return ""
    score, expected = (evaluation.scores or {}).get(study.spec.metric), found.expected_score
    if score is None:
        return ""
    if expected.low <= score <= expected.high:
        return f", within the expected {format_interval(expected)}"
    return f", {'below' if score < expected.low else 'above'} the expected {format_interval(expected)}"
