"""The study's note in the Optuna dashboard: attributes are plain text there, links work only in notes."""

from __future__ import annotations

import optuna

from search.console import command
from search.finalists.text import confirmation_lines
from search.report.foreseen import foreseen_line
from search.report.promotions import promotion_lines
from search.study.rungs import rung_lines
from search.study.study import StoredStudy
from search.study.summary import Summary, format_value
from storage.attributes import RUN_URL


def write_note(study: StoredStudy, summary: Summary) -> None:
    """Write the study's note in the dashboard."""
    from optuna_dashboard import save_note  # it imports scikit-learn: a second of each worker's start

    optuna_study = optuna.load_study(study_name=study.spec.name, storage=study.storage)
    save_note(optuna_study, study_note(study, summary))


def study_note(study: StoredStudy, summary: Summary) -> str:
    """Return the study's note, in Markdown: attributes are plain text in the dashboard, links work only in notes."""
    spec = study.spec
    lines = [
        f"**{spec.name}**: {spec.objective}, {spec.direction} val {spec.metric}, {study.done(summary.finished)}.",
        "",
        f"[The study in MLflow]({study.attrs.get(RUN_URL, '')}); its workers: `{command('top', spec.name)}`",
    ]
    if (best := summary.best) is not None:
        url = best.user_attrs.get(RUN_URL)
        name = f"[trial {best.number}]({url})" if url else f"trial {best.number}"
        params = ", ".join(f"`{key}` = {format_value(value)}" for key, value in best.params.items())
        lines += ["", f"Best: {name}, val {spec.metric} {best.value:.4f} with {params}."]
    for line in confirmation_lines(study):
        lines += ["", f"{line[:1].upper()}{line[1:]}."]
    rungs = rung_lines(study)
    rungs += [best_open] if (best_open := foreseen_line(study)) else []
    lines += ["", *(f"- {line}" for line in rungs)] if rungs else []
    promoted = [line for line in promotion_lines(study) if line]
    lines += ["", *(f"- {line}" for line in promoted)] if promoted else []
    return "\n".join(lines)
