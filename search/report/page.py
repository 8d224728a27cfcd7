"""The report of a study: one HTML page that needs nothing beside itself."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from optuna.trial import FrozenTrial, TrialState

from search.finalists.table import Finalists, read_finalists
from search.finalists.text import SHOWN, finalist_lines, opening_line, optimism, ranked
from search.report.figures import draw
from search.report.pruned import pruned_by_epoch
from search.study.study import StoredStudy
from search.study.summary import Summary, format_seconds, format_value, study_page, summarise
from storage.attributes import INFEASIBLE, REASON, RUN_URL, SMOKE
from storage.records.promotions import Promotion, promotions_of
from storage.records.test_openings import read_opening

_TOP = 10


def write_report(study: StoredStudy, path: Path, *, dashboard_url: str | None) -> Path:
    """Write the report of `study` to `path` and return it."""
    summary, finalists = summarise(study), read_finalists(study)
    opening = read_opening(study.engine, study.study_id)
    environment = Environment(loader=PackageLoader("search.report"), autoescape=True)
    page = environment.get_template("report.html.j2").render(
        spec=study.spec,
        summary=summary,
        saved=format_seconds(summary.seconds_saved),
        best=_best(study, summary, finalists),
        figures=draw(study, summary, finalists),
        finalists=_finalists(study, finalists) if finalists else None,
        test_set=opening_line(study, opening) if opening else None,
        test_scores=opening.scores if opening else None,
        pruned=pruned_by_epoch(study),
        promotions=[_promotion(p) for p in promotions_of(study.engine, study.study_id)],
        top=[_row(study, t) for t in study.best_trials()[:_TOP]],
        unfinished=[_row(study, t) for t in study.trials() if _without_result(t)],
        mlflow_url=study.attrs.get(RUN_URL),
        dashboard_url=study_page(dashboard_url, study.study_id) if dashboard_url else None,
        smoke=study.attrs.get(SMOKE),
        made_at=_time(datetime.datetime.now(datetime.UTC)),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _without_result(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.FAIL or bool(trial.user_attrs.get(INFEASIBLE))


def _row(study: StoredStudy, trial: FrozenTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "value": "" if trial.value is None else f"{trial.value:.4f}",
        "epochs": f"{len(trial.intermediate_values)}/{study.spec.epochs}",
        "duration": format_seconds(trial.duration.total_seconds()) if trial.duration else "",
        "params": ", ".join(f"{k} = {format_value(v)}" for k, v in trial.params.items()),
        "reason": trial.user_attrs.get(REASON, ""),
        "url": trial.user_attrs.get(RUN_URL),
    }


def _best(study: StoredStudy, summary: Summary, finalists: Finalists | None) -> dict[str, Any] | None:
    """Return whose parameters the page shows, and which: the finalists' winner's, else the search's best trial's."""
    best, title = summary.best, "Parameters of the best"
    if finalists is not None and finalists.winner is not None:
        best, title = study.trials()[finalists.winner], "Parameters of the winner"
    if best is None:
        return None
    return {"title": f"{title}, trial {best.number}", "params": {k: format_value(v) for k, v in best.params.items()}}


def _promotion(promotion: Promotion) -> dict[str, str]:
    return {
        "trial": str(promotion.trial_number),
        "version": f"{promotion.model_name} {promotion.version}",
        "alias": promotion.alias,
        "by": promotion.promoted_by,
        "at": _time(promotion.promoted_at),
        "until": "" if promotion.ended_at is None else _time(promotion.ended_at),
        "note": "" if promotion.confirmed else str(promotion.evidence.get("unconfirmed", "unconfirmed")),
    }


def _time(moment: datetime.datetime) -> str:
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M UTC}"


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
                "verdict": "" if found.pending else SHOWN[found.verdict(row)],
            }
        )
    return {"seeds": found.seeds, "rows": rows, "lines": finalist_lines(study, found)}
