"""The HTML report of a study."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from hpsearch.search.console import format_change, format_difference, format_number, format_score, pluralize
from hpsearch.search.finalists.table import Finalists, read_finalists
from hpsearch.search.finalists.text import (
    compute_search_bias,
    describe_resampling,
    format_finalists,
    format_interval,
    format_run_values,
    format_test_result,
    format_verdict,
    list_data_warnings,
    rank_finalists,
)
from hpsearch.search.finalists.winner import COVERAGE
from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY, format_suggestion_reason
from hpsearch.search.pruners.study_pruner import make_rungs
from hpsearch.search.report.figures import (
    compute_hypervolume_history,
    format_front_headline,
    format_metric_label,
    make_figure_data,
    make_front_cards,
    make_front_figure,
    make_front_section,
)
from hpsearch.search.report.headline import Headline, make_headline
from hpsearch.search.report.importances import compute_importances
from hpsearch.search.report.lineage import make_lineage
from hpsearch.search.report.show import (
    describe_model,
    forecast_trials,
    format_last_failure,
    format_settings,
    format_utc,
)
from hpsearch.search.report.trials import (
    compute_epoch_usage,
    get_pruning_record,
    list_parameter_names,
    make_trial_rows,
    select_shown_trials,
)
from hpsearch.search.services import Services
from hpsearch.search.study.device_summary import format_devices, summarize_devices
from hpsearch.search.study.folders import get_report_path
from hpsearch.search.study.promotions import list_promotions
from hpsearch.search.study.ranking import get_first_value, get_last_params
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, format_value, get_study_page, summarise
from hpsearch.storage.attributes import CONFIG_SCHEDULE, RUN_URL, SMOKE_TEST
from hpsearch.storage.display import escape_controls, find_link
from hpsearch.storage.records.promotions import Promotion
from hpsearch.storage.records.test_evaluations import TestEvaluation, read_test_evaluation
from hpsearch.storage.replacement import replacement
from hpsearch.storage.rungs.rungs import read_rung_counts


def make_pruning_rows(study: StoredStudy) -> list[dict[str, str]]:
    """Return a table row for each epoch, counted from 1, at which trials were pruned: counts, cutoffs and peers."""
    records: dict[tuple[int, int | None], list[dict[str, Any]]] = defaultdict(list)
    for trial in study.trials():
        record = get_pruning_record(trial)
        if record and trial.state.is_finished():
            records[record["epoch"], record.get("rung")].append(record)
    return [
        {
            "epoch": str(epoch + 1),
            "rung": "" if rung is None else str(rung),
            "trials": str(len(found)),
            "values": _format_range([r.get("value") for r in found], format_score),
            "cutoffs": _format_range([r.get("cutoff") for r in found], format_score),
            "peers": _format_range([r.get("peers") for r in found], str),
        }
        for (epoch, rung), found in sorted(records.items(), key=lambda item: (item[0][0], item[0][1] or 0))
    ]


def _format_range(values: Sequence[object], form: Callable[[Any], str]) -> str:
    """Return the range of the finite values as text: ``0.91 to 0.95``. Non-finite values are stored as texts."""
    numbers = sorted(v for v in values if isinstance(v, int | float))
    if not numbers:
        return ""
    low, high = (form(number) for number in (numbers[0], numbers[-1]))
    return low if low == high else f"{low} to {high}"


_RUNG_OUTCOMES = {"promoted": "promoted", "waiting": "paused", "pruned": "pruned"}  # label by field of a rung
_MAX_FAILURES = 20  # maximum in the section of failures; the table of trials has all failures


def write_report(study: StoredStudy, path: Path, *, dashboard_url: str | None) -> Path:
    """Write the report of `study` to `path` and return the path.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
    """
    summary, finalists = summarise(study), read_finalists(study)
    opening = read_test_evaluation(study.engine, study.study_id)
    shown = select_shown_trials(study)
    names = list_parameter_names(shown)
    several, usage = study.spec.is_multi_objective, compute_epoch_usage(study)
    metrics = enumerate(study.spec.direction_by_metric)
    importances = {name: compute_importances(study, place) for place, name in metrics}
    forecasts = forecast_trials(study, study.trials())
    rows = make_trial_rows(study, shown, names, forecasts)
    by_number = sorted(rows, key=lambda row: row["number"])
    without_result = [row for row in by_number if row["state"] in {"failed", "infeasible"}]
    figures = make_figure_data(
        study,
        shown,
        names,
        importances=importances[study.spec.metric],
        finalists=finalists,
        usage=usage,
        forecasts=forecasts,
    )
    hypervolume = compute_hypervolume_history(study, usage.epoch_order) if several else None
    figures["front"] = make_front_figure(study, summary) if several else None
    figures["volume"] = hypervolume.figure if hypervolume else None
    loader = PackageLoader("hpsearch.search.report")
    headline = make_headline(study, summary, finalists)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_escape)
    page = environment.get_template("report.html.j2").render(
        spec=study.spec,
        settings=format_settings(study.spec),
        summary=summary,
        budget=study.budget,
        headline=_format_headline(study, summary, finalists) + _format_early_stop(study),
        results=[f"{line[0].upper()}{line[1:]}." for line in headline.results],
        cost=headline.cost,
        next_steps=[(f"{step.finding[0].upper()}{step.finding[1:]}:", step.command) for step in headline.next_steps],
        cards=_make_cards(study, summary, finalists, opening, headline),
        states=[(state, count) for state, count in summary.by_state.items() if count],
        rungs=[] if study.spec.pruner.shares_checkpoints else _make_rung_rows(study),
        lineage=make_lineage(study, summary.best),
        became=_RUNG_OUTCOMES,
        paused=any(trial["pauses"] for trial in figures["trials"]),
        n_forecasts=len(forecasts),
        devices=format_devices(devices) if (devices := summarize_devices(study)) else None,
        best=_describe_best(study, summary, finalists),
        figures=figures,
        importances=importances,
        front=make_front_section(study, summary, rows, hypervolume) if several else None,
        named=format_metric_label(study.spec),
        broken=Counter(trial["state"] for trial in figures["trials"] if trial["broken"]),
        finalists=_make_finalists_section(study, finalists) if finalists else None,
        test_set=format_test_result(study, opening, finalists) if opening else None,
        test_scores=opening.scores if opening else None,
        pruned=make_pruning_rows(study),
        promotions=[_make_promotion_row(p) for p in list_promotions(study)],
        names=names,
        trials=rows,
        n_trials=len(study.trials()),
        unfinished=without_result[-_MAX_FAILURES:],
        n_unfinished=summary.failed + summary.infeasible,
        mlflow_url=find_link(study.attrs.get(RUN_URL)),
        dashboard_url=get_study_page(dashboard_url, study.study_id) if dashboard_url else None,
        smoke=study.attrs.get(SMOKE_TEST),
        data_warnings=list_data_warnings(study),
        made_at=format_utc(datetime.datetime.now(datetime.UTC)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(path) as file:  # several workers may end at the same time
        file.write(page.encode())
    return path


def update_report(services: Services, study: StoredStudy) -> Path:
    """Write the report of a study again at its default path, and return the path."""
    study.refresh()
    path = get_report_path(services, study)
    # The user has chosen the home, which may be behind links of an administrator.
    return write_report(study, path.parent.resolve() / path.name, dashboard_url=services.dashboard_url)


def _escape(value: object) -> object:
    """Return a value of the template with visible escapes for control characters; markup is unchanged."""
    return escape_controls(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _format_headline(study: StoredStudy, summary: Summary, finalists: Finalists | None) -> str:
    """Return one sentence with the result of the study."""
    metric, trials = study.spec.metric, pluralize(summary.finished, "trial")
    if finalists is not None and finalists.winner is not None:
        row = finalists.get_row(finalists.winner)
        tie = f", in a tie with {pluralize(len(finalists.tie), 'other')}" if finalists.tie else ""
        expected = finalists.expected_score
        expect = f"; expect {format_score(expected.mean)} on new data, {format_interval(expected)}" if expected else ""
        return (
            f"Trial {row.trial} wins{tie}: validation {metric} {format_score(row.mean)} on "
            f"{describe_resampling(finalists)}, out of {trials}{expect}."
        )
    if study.spec.is_multi_objective and summary.front:
        return format_front_headline(study, summary)
    if summary.best is not None:
        of = ", the only trial so far" if summary.finished == 1 else f" is the best of {trials}"
        value = format_score(get_first_value(summary.best))
        return f"Trial {summary.best.number}{of}: validation {metric} {value}."
    if summary.out_of_bounds:
        return f"No complete trial satisfies the constraints {_join_bounds(study)}."
    last = [f"{line[0].upper()}{line[1:]}" for line in format_last_failure(study)]
    return " ".join(["No trial is complete yet.", *last])


def _join_bounds(study: StoredStudy) -> str:
    return " and ".join(map(str, study.spec.constraint_bounds))


def _format_early_stop(study: StoredStudy) -> str:
    """Return a sentence with the reason for an early termination; an empty text if there was none."""
    stop = study.early_stop
    return "" if stop is None else f" Stopped after {stop.started} of {stop.budget} trials: {stop.reason}."


def _make_cards(
    study: StoredStudy,
    summary: Summary,
    finalists: Finalists | None,
    opening: TestEvaluation | None,
    headline: Headline,
) -> list[tuple[str, str]]:
    """Return the cards at the top of the page as (number, label), most reliable number first."""
    metric, cards = study.spec.metric, []
    if opening is not None and opening.scores is not None and metric in opening.scores:
        cards.append((format_score(opening.scores[metric]), f"test {metric}, {opening.model_description}"))
    if finalists is not None and finalists.winner is not None:
        mean = finalists.get_row(finalists.winner).mean
        cards.append((format_score(mean), f"{metric} on {describe_resampling(finalists)}"))
        if (expected := finalists.expected_score) is not None:
            cards.append(
                (f"{expected.low:.3f} - {expected.high:.3f}", f"expected {metric} on new data ({COVERAGE:.0%})")
            )
    if study.spec.is_multi_objective:
        cards += make_front_cards(study, summary)
    elif (best := summary.best) is not None:
        cards.append((format_score(get_first_value(best)), f"best {metric} of the search, trial {best.number}"))
    if headline.gain:
        cards.append((format_change(headline.gain), "gain over the default configuration"))
    if (spending := study.spending) is None:
        cards.append((f"{summary.finished} / {study.budget}", "trials of the budget"))
    else:
        spent, _, unit = spending.summary.rpartition(" ")
        trials = pluralize(summary.finished, "trial")
        cards.append((spent.replace("/", " / "), f"{unit} of the budget, {trials}"))
    if summary.out_of_bounds:
        cards.append((str(summary.out_of_bounds), f"complete trials that violate {_join_bounds(study)}"))
    if headline.cost:
        elapsed, _, others = headline.cost.partition(" elapsed, ")
        cards.append((elapsed, f"elapsed, {others}"))
    if summary.epochs_saved:
        planned = summary.epochs_saved + summary.epochs_run
        cards.append((f"{summary.epochs_saved / planned:.0%}", f"of {pluralize(planned, 'epoch')} saved by pruning"))
    return cards


def _make_rung_rows(study: StoredStudy) -> list[dict[str, Any]]:
    """Return a table row for each rung that a trial has reached: epoch of the rung, and number of trials by outcome."""
    rungs = make_rungs(study.spec)
    if rungs is None:
        return []
    return [
        {
            "epoch": rungs.epochs[at.rung],
            "reached": at.reached,
            "parts": [(part, getattr(at, part)) for part in _RUNG_OUTCOMES],
        }
        for at in read_rung_counts(study.engine, study.study_id)
    ]


def _describe_best(study: StoredStudy, summary: Summary, finalists: Finalists | None) -> dict[str, Any] | None:
    """Return the parameters of the finalists' winner, or else of the best trial; None if neither exists."""
    best, title = None if study.spec.is_multi_objective else summary.best, "Parameters of the best"
    if finalists is not None and finalists.winner is not None:
        best, title = study.trials()[finalists.winner], "Parameters of the winner"
    if best is None:
        return None
    when = " in the last epochs" if CONFIG_SCHEDULE in best.user_attrs else ""
    return {
        "number": best.number,
        "title": f"{title}{when}, trial {best.number}",
        "params": {k: format_value(v) for k, v in get_last_params(best).items()},
        "why": format_suggestion_reason(note) if (note := best.system_attrs.get(SUGGESTION_REASON_KEY)) else None,
    }


def _make_promotion_row(promotion: Promotion) -> dict[str, str]:
    return {
        "trial": describe_model(promotion).removeprefix("trial "),
        "version": f"{promotion.model_name} {promotion.version}",
        "alias": promotion.alias,
        "by": promotion.promoted_by,
        "at": format_utc(promotion.promoted_at),
        "until": "" if promotion.ended_at is None else format_utc(promotion.ended_at),
        "note": "" if promotion.is_confirmed else str(promotion.evidence.get("unconfirmed", "unconfirmed")),
    }


def _make_finalists_section(study: StoredStudy, found: Finalists) -> dict[str, Any]:
    """Return the template values for the section on finalists: rows, best first, and the result as sentences."""
    rows = []
    for row in rank_finalists(study, found):
        over = compute_search_bias(study, row)
        rows.append(
            {
                "trial": row.trial,
                "search": format_score(row.search_value),
                "mean": format_score(row.mean, ""),
                "spread": format_difference(row.spread, ""),
                "bias": format_change(over, ""),
                "values": format_run_values(row),
                "others": [format_number(mean) for mean in row.means[1:]],
                "verdict": format_verdict(study, found, row),
            }
        )
    return {
        "seeds": found.seeds,
        "others": list(study.spec.direction_by_metric)[1:],
        "rows": rows,
        "lines": format_finalists(study, found),
        "varied": "split" if found.is_resplit else "seed",
    }
