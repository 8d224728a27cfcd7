"""The HTML report of a study."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from hpsearch.search.console import counted
from hpsearch.search.curves.forecast import CHOSEN, chosen_line
from hpsearch.search.finalists.refit import with_refits
from hpsearch.search.finalists.table import Finalists, read_finalists
from hpsearch.search.finalists.text import (
    drawn,
    expected_words,
    finalist_lines,
    opening_line,
    optimism,
    ranked,
    told_verdict,
)
from hpsearch.search.finalists.winner import LEVEL
from hpsearch.search.pruners.study_pruner import study_rungs
from hpsearch.search.report.figures import cards as front_cards
from hpsearch.search.report.figures import (
    figure_data,
    front_figure,
    front_section,
    headline,
    importances,
    named,
    volume,
)
from hpsearch.search.report.show import foreseen, format_utc, last_failure, subject
from hpsearch.search.report.trials import parameter_names, shown_trials, spent, trial_rows
from hpsearch.search.study.devices import devices_line, devices_of
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, format_seconds, format_value, study_page, summarise
from hpsearch.storage.attributes import PRUNING, RUN_URL, SMOKE
from hpsearch.storage.records.promotions import Promotion
from hpsearch.storage.records.test_openings import Opening, read_opening
from hpsearch.storage.rungs.rungs import read_rungs


def pruned_by_epoch(study: StoredStudy) -> list[dict[str, str]]:
    """Return a row for each epoch, from 1, at which trials were pruned: how many, the cut-offs, the peers."""
    records: dict[tuple[int, int | None], list[dict[str, Any]]] = defaultdict(list)
    for trial in study.trials():
        record = trial.user_attrs.get(PRUNING)
        if record is not None and "epoch" in record and trial.state.is_finished():
            records[record["epoch"], record.get("rung")].append(record)
    return [
        {
            "epoch": str(epoch + 1),
            "rung": "" if rung is None else str(rung),
            "trials": str(len(found)),
            "values": _span([r.get("value") for r in found], ".4f"),
            "cutoffs": _span([r.get("cutoff") for r in found], ".4f"),
            "peers": _span([r.get("peers") for r in found], "d"),
        }
        for (epoch, rung), found in sorted(records.items(), key=lambda item: (item[0][0], item[0][1] or 0))
    ]


def _span(values: Sequence[object], form: str) -> str:
    """Return ``0.91 to 0.95``; what is no finite number (those are written as text) is left out."""
    numbers = sorted(v for v in values if isinstance(v, int | float))
    if not numbers:
        return ""
    low, high = (format(number, form) for number in (numbers[0], numbers[-1]))
    return low if low == high else f"{low} to {high}"


_BECAME = {"promoted": "went on", "waiting": "waiting", "pruned": "pruned there"}  # of trials at a rung
_FAILURES = 20  # listed with their reasons; the table of trials has them all


def write_report(study: StoredStudy, path: Path, *, dashboard_url: str | None) -> Path:
    """Write the report of `study` to `path` and return it."""
    summary, finalists = summarise(study), read_finalists(study)
    opening = read_opening(study.engine, study.study_id)
    shown = shown_trials(study)
    names = parameter_names(shown)
    several, at = study.spec.several, spent(study)
    shares = {name: importances(study, place) for place, name in enumerate(study.spec.ways)}
    first, forecasts = shares[study.spec.metric], foreseen(study, study.trials())
    rows = trial_rows(study, shown, names, forecasts)
    by_number = sorted(rows, key=lambda row: row["number"])
    without_result = [row for row in by_number if row["state"] in {"failed", "infeasible"}]
    figures = figure_data(study, shown, names, shares=first, finalists=finalists, spent=at, forecasts=forecasts)
    hypervolume = volume(study, at.order) if several else None
    figures["front"] = front_figure(study, summary) if several else None
    figures["volume"] = hypervolume.figure if hypervolume else None
    loader = PackageLoader("hpsearch.search.report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html.j2").render(
        spec=study.spec,
        summary=summary,
        budget=study.budget,
        headline=_headline(study, summary, finalists) + _early(study),
        cards=_cards(study, summary, finalists, opening),
        states=[(state, count) for state, count in summary.by_state.items() if count],
        rungs=_rungs(study),
        became=_BECAME,
        paused=any(trial["pauses"] for trial in figures["trials"]),
        n_foreseen=len(forecasts),
        devices=devices_line(devices) if (devices := devices_of(study)) else None,
        saved=format_seconds(summary.seconds_saved),
        best=_best(study, summary, finalists),
        figures=figures,
        importances=shares,
        front=front_section(study, summary, rows, hypervolume) if several else None,
        named=named(study.spec),
        broken=Counter(trial["state"] for trial in figures["trials"] if trial["broken"]),
        finalists=_finalists(study, finalists) if finalists else None,
        test_set=opening_line(study, opening, finalists) if opening else None,
        test_scores=opening.scores if opening else None,
        pruned=pruned_by_epoch(study),
        promotions=[_promotion(p) for p in with_refits(study)],
        names=names,
        trials=rows,
        n_trials=len(study.trials()),
        unfinished=without_result[-_FAILURES:],
        n_unfinished=summary.failed + summary.infeasible,
        mlflow_url=study.attrs.get(RUN_URL),
        dashboard_url=study_page(dashboard_url, study.study_id) if dashboard_url else None,
        smoke=study.attrs.get(SMOKE),
        made_at=format_utc(datetime.datetime.now(datetime.UTC)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _headline(study: StoredStudy, summary: Summary, finalists: Finalists | None) -> str:
    """Return what came of the study, in a sentence."""
    metric, trials = study.spec.metric, counted(summary.finished, "trial")
    if finalists is not None and finalists.winner is not None:
        row = finalists.row(finalists.winner)
        tie = f", in a tie with {counted(len(finalists.tie), 'other')}" if finalists.tie else ""
        expected = finalists.expected
        expect = f"; expect {expected.mean:.4f} on new data, {expected_words(expected)}" if expected else ""
        return (
            f"Trial {row.trial} wins{tie}: validation {metric} {row.mean:.4f} on {drawn(finalists)}, "
            f"out of {trials}{expect}."
        )
    if study.spec.several and summary.front:
        return headline(study, summary)
    if summary.best is not None and summary.finished == 1:
        return f"Trial {summary.best.number}, the only one so far: validation {metric} {first_value(summary.best):.4f}."
    if summary.best is not None:
        return (
            f"Trial {summary.best.number} is the best of {trials}: validation {metric} {first_value(summary.best):.4f}."
        )
    if summary.out_of_bounds:
        return f"No trial has run to its end within bounds: {_bounds(study)}."
    last = [f"{line[0].upper()}{line[1:]}" for line in last_failure(study)]
    return " ".join(["No trial has run to its end yet.", *last])


def _bounds(study: StoredStudy) -> str:
    return " and ".join(map(str, study.spec.bounds))


def _early(study: StoredStudy) -> str:
    """Return why the study stopped before its budget, as a sentence that follows; nothing where it did not."""
    given_up = study.given_up
    return "" if given_up is None else f" Stopped after {given_up.started} of {given_up.budget} trials: {given_up.why}."


def _cards(
    study: StoredStudy, summary: Summary, finalists: Finalists | None, opening: Opening | None
) -> list[tuple[str, str]]:
    """Return the numbers at the head of the page, each with what it is; the most trustworthy one first."""
    metric, cards = study.spec.metric, []
    if opening is not None and opening.scores is not None and metric in opening.scores:
        cards.append((f"{opening.scores[metric]:.4f}", f"test {metric}, {opening.subject}"))
    if finalists is not None and finalists.winner is not None:
        mean = finalists.row(finalists.winner).mean
        cards.append((f"{mean:.4f}", f"{metric} on {drawn(finalists)}"))
        if (expected := finalists.expected) is not None:
            cards.append((f"{expected.low:.3f} - {expected.high:.3f}", f"{metric} to expect on new data ({LEVEL:.0%})"))
    if study.spec.several:
        cards += front_cards(study, summary)
    elif summary.best is not None:
        cards.append((f"{first_value(summary.best):.4f}", f"best {metric} of the search, trial {summary.best.number}"))
    if (spending := study.spending) is None:
        cards.append((f"{summary.finished} / {study.budget}", "trials of the budget"))
    else:
        cards.append((spending.spent.replace("/", " / "), f"of the budget, {counted(summary.finished, 'trial')}"))
    if summary.out_of_bounds:
        cards.append((str(summary.out_of_bounds), f"complete, but not within {_bounds(study)}"))
    if summary.epochs_saved:
        saved = format_seconds(summary.seconds_saved)
        cards.append((saved, f"saved by pruning, {counted(summary.epochs_saved, 'epoch')}"))
    return cards


def _rungs(study: StoredStudy) -> list[dict[str, Any]]:
    """Return a row for each rung that a trial has reached: its epoch, and what became of those that reached it."""
    rungs = study_rungs(study.spec)
    if rungs is None:
        return []
    return [
        {
            "epoch": rungs.epochs[at.rung],
            "reached": at.reached,
            "parts": [(part, getattr(at, part)) for part in _BECAME],
        }
        for at in read_rungs(study.engine, study.study_id)
    ]


def _best(study: StoredStudy, summary: Summary, finalists: Finalists | None) -> dict[str, Any] | None:
    """Return whose parameters the page shows, and which: the finalists' winner's, else the search's best trial's."""
    best, title = None if study.spec.several else summary.best, "Parameters of the best"
    if finalists is not None and finalists.winner is not None:
        best, title = study.trials()[finalists.winner], "Parameters of the winner"
    if best is None:
        return None
    return {
        "number": best.number,
        "title": f"{title}, trial {best.number}",
        "params": {k: format_value(v) for k, v in best.params.items()},
        "why": chosen_line(note) if (note := best.system_attrs.get(CHOSEN)) else None,
    }


def _promotion(promotion: Promotion) -> dict[str, str]:
    return {
        "trial": subject(promotion).removeprefix("trial "),
        "version": f"{promotion.model_name} {promotion.version}",
        "alias": promotion.alias,
        "by": promotion.promoted_by,
        "at": format_utc(promotion.promoted_at),
        "until": "" if promotion.ended_at is None else format_utc(promotion.ended_at),
        "note": "" if promotion.confirmed else str(promotion.evidence.get("unconfirmed", "unconfirmed")),
    }


def _finalists(study: StoredStudy, found: Finalists) -> dict[str, Any]:
    """Return what the page says of the finalists: a row each, best first, and the verdict in sentences."""
    rows = []
    for row in ranked(study, found):
        over = optimism(study, row)
        rows.append(
            {
                "trial": row.trial,
                "search": f"{row.search_value:.4f}",
                "mean": "" if row.mean is None else f"{row.mean:.4f}",
                "spread": "" if row.spread is None else f"{row.spread:.4f}",
                "optimism": "" if over is None else f"{over:+.4f}",
                "values": [
                    f"{v:.4f}" if v is not None else why for v, why in zip(row.values, row.reasons, strict=True)
                ],
                "others": [f"{mean:.4g}" for mean in row.means[1:]],
                "verdict": told_verdict(study, found, row),
            }
        )
    return {
        "seeds": found.seeds,
        "others": list(study.spec.ways)[1:],
        "rows": rows,
        "lines": finalist_lines(study, found),
        "anew": "division" if found.divided else "seed",
    }
