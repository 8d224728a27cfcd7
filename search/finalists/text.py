"""The finalists as a person reads them: a table, and what it says in sentences."""

from __future__ import annotations

import statistics

from rich.table import Table

from hpsearch.search.console import counted, plain_table
from hpsearch.search.finalists.table import FinalistRow, Finalists, newest_set, read_finalists, tabulate
from hpsearch.search.finalists.winner import LEVEL, Expected
from hpsearch.search.study.ranking import best_first
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.records.test_openings import Opening, read_opening

_TOLD = 5e-5  # less is nothing, in four digits
_SHOWN = {"confirmed": "", "incomplete": "cannot win"}  # verdicts that are shown by other words


def confirmation_lines(study: StoredStudy) -> list[str]:
    """Return what finalists and the test set say of a study's best trial, in lines of plain text; none without any."""
    counting, newest = read_finalists(study), newest_set(study)
    lines = [] if counting is None else finalist_lines(study, counting)
    if counting is not None and newest is not None and newest.spec.name != counting.study:
        lines.append(f"chosen anew, in {newest.spec.name}: {finalist_lines(study, tabulate(study, newest))[0]}")
    opening = read_opening(study.engine, study.study_id)
    return lines if opening is None else [*lines, opening_line(study, opening, counting)]


def optimism(study: StoredStudy, row: FinalistRow) -> float | None:
    """Return by how much the search's value of a finalist is better than its mean on fresh seeds."""
    if row.mean is None:
        return None
    return row.search_value - row.mean if study.spec.maximize else row.mean - row.search_value


def ranked(study: StoredStudy, found: Finalists) -> list[FinalistRow]:
    """Return the rows by their means, the best one first; those that lack a value come last, in the search's order.

    Of several metrics by the first, those of the front before all others.
    """
    means = {row.trial: row.mean for row in found.rows if row.whole and row.mean is not None}
    whole = [found.row(trial) for trial in best_first(means, maximize=study.spec.maximize)]
    whole.sort(key=lambda row: bool(found.front) and row.trial not in found.front)
    return whole + [row for row in found.rows if not row.whole]


def finalist_table(study: StoredStudy, found: Finalists) -> Table:
    """Return the table: rank, trial, the search's value, mean, spread, optimism, each seed's value, and the verdict."""
    if study.spec.several:
        return _front_table(study, found)
    numbers = ("rank", "trial", "search", "fresh mean", "spread", "optimism")
    by_seed = f"val {study.spec.metric} by {'division' if found.divided else 'seed'}"
    table = plain_table(*numbers, by_seed, "", right=numbers)
    for rank, row in enumerate(ranked(study, found), 1):
        values = [
            f"{value:.4f}" if value is not None else str(reason)
            for value, reason in zip(row.values, row.reasons, strict=True)
        ]
        over = optimism(study, row)
        table.add_row(
            str(rank) if row.whole else "-",
            str(row.trial),
            f"{row.search_value:.4f}",
            "-" if row.mean is None else f"{row.mean:.4f}",
            "unknown" if row.spread is None else f"{row.spread:.4f}",
            "-" if over is None else f"{over:+.4f}",
            "  ".join(values),
            told_verdict(study, found, row),
        )
    return table


def told_verdict(study: StoredStudy, found: Finalists, row: FinalistRow) -> str:
    """Return what became of a finalist in words; nothing until all have ended."""
    if found.pending:
        return ""
    verdict = found.verdict(row)
    by = found.dominating(row, study.spec.maximized) if verdict == "dominated" else []
    return f"{verdict} by {', '.join(map(str, by))}" if by else shown(verdict)


def shown(verdict: str) -> str:
    """Return the word for a verdict in tables and figures."""
    return _SHOWN.get(verdict, verdict)


def _front_table(study: StoredStudy, found: Finalists) -> Table:
    """The table of several metrics: of each what the search said, and the mean on fresh seeds."""
    numbers = ("trial", *(word for name in study.spec.ways for word in (name, "fresh mean")))
    table = plain_table(*numbers, "", right=numbers)
    for row in ranked(study, found):
        means = [f"{mean:.4g}" for mean in row.means] or ["-"] * len(row.searched)
        pairs = zip((f"{value:.4g}" for value in row.searched), means, strict=True)
        table.add_row(str(row.trial), *(cell for pair in pairs for cell in pair), told_verdict(study, found, row))
    return table


def finalist_lines(study: StoredStudy, found: Finalists) -> list[str]:
    """Return what the table says: who wins, whether that is a tie, and by how much the search over-stated."""
    n_seeds = len(found.seeds)
    seeds = drawn(found)
    if found.pending:
        n_trials = len(found.rows) * n_seeds
        failed = sum(reason in {"failed", "diverged"} for row in found.rows for reason in row.reasons)
        without = f", {failed} without a value" if failed else ""
        return [f"finalists: {n_trials - found.pending} of {n_trials} trained{without}, on {seeds}"]
    if not found.decided:
        return [f"finalists: no winner, none has a value for each of {seeds}"]
    if study.spec.several:
        return _front_lines(found)
    assert found.winner is not None
    row = found.row(found.winner)
    spread = "unknown" if row.spread is None else f"{row.spread:.4f}"
    lines = [
        f"winner: trial {row.trial}, val {study.spec.metric} {row.mean:.4f} on {seeds}, spread {spread} "
        f"(the search said {row.search_value:.4f})"
    ]
    if found.tie:
        who = f"trial{'s' if len(found.tie) > 1 else ''} {', '.join(map(str, found.tie))}"
        within = "their values are equal" if not found.error else f"within one standard error, {found.error:.4f}"
        lines.append(f"a tie with {who}: {within}; the better mean is taken")
    if (expected := found.expected) is not None:
        lines.append(f"expect {expected.mean:.4f} on new data, {expected_words(expected)}: {basis(found)}")
    elif found.scored:
        lines.append("no interval: how far the validation samples leave it to chance is unknown")
    if n_seeds == 1:
        lines.append("with one seed the spread is unknown: a difference may be chance")
    over = statistics.fmean(o for r in found.rows if r.whole and (o := optimism(study, r)) is not None)
    said, by = "under" if over <= -_TOLD else "over", "nothing" if abs(over) < _TOLD else f"{abs(over):.4f}"
    return [*lines, f"the search {said}-stated its finalists by {by} on average"]


def _front_lines(found: Finalists) -> list[str]:
    """What the table of several metrics says: who is still on the front."""
    on = drawn(found)
    if len(found.front) == 1:
        lines = [f"winner: trial {found.front[0]}, which dominates all other finalists on {on}"]
    else:
        *most, last = map(str, found.front)
        lines = [f"front on {on}: trials {', '.join(most)} and {last}, which no other finalist dominates"]
    fallen = [str(row.trial) for row in found.rows if row.whole and row.trial not in found.front]
    if fallen:
        lines.append(f"dominated on fresh seeds: trial{'s' if len(fallen) > 1 else ''} {', '.join(fallen)}")
    return lines


def drawn(found: Finalists) -> str:
    """Return what the finalists were trained on, in words."""
    return counted(len(found.seeds), "fresh division" if found.divided else "fresh seed")


def expected_words(expected: Expected) -> str:
    """Return the interval in words."""
    return f"{expected.low:.4f} to {expected.high:.4f} ({LEVEL:.0%})"


def basis(found: Finalists) -> str:
    """Return what the numbers of the finalists rest on, in a sentence."""
    if found.divided:
        return "train and validation were divided anew for each seed"
    return "data() gives fixed parts, or a test split that depends on them, so that seeds alone are fresh"


def opening_line(study: StoredStudy, opening: Opening, found: Finalists | None = None) -> str:
    """Return a line on the opened test set, and whether it is as the finalists that chose its trial let expect."""
    sure = "" if opening.finalists else ", unconfirmed by finalists"
    if opening.scores is None:
        return f"test set: opened {opening.told}{sure}; its scores are not written yet"
    metric = study.spec.metric
    shown = f"{metric} {opening.scores[metric]:.4f}" if metric in opening.scores else f"{opening.scores}"
    return f"test set: {shown}{_as_expected(study, opening, found)}, opened {opening.told}{sure}"


def _as_expected(study: StoredStudy, opening: Opening, found: Finalists | None) -> str:
    """Return in words where the test score lies; nothing where nothing was expected of it."""
    if (
        found is None
        or found.expected is None
        or opening.refit is not None  # expected is the score of the search's model
        or (found.study, found.winner) != (opening.finalists, opening.trial_number)
    ):
        return ""
    score, expected = (opening.scores or {}).get(study.spec.metric), found.expected
    if score is None:
        return ""
    if expected.low <= score <= expected.high:
        return f", within {expected_words(expected)}"
    return f", {'below' if score < expected.low else 'above'} the expected {expected_words(expected)}"
