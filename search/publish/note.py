"""The study's note in the Optuna dashboard: attributes are plain text there, links work only in notes."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial

from hpsearch.search.console import command, counted
from hpsearch.search.finalists.text import confirmation_lines
from hpsearch.search.report.foreseen import foreseen_line
from hpsearch.search.report.promotions import promotion_lines
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.rungs import rung_lines
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, format_value
from hpsearch.storage.attributes import RUN_URL

_MOST = 20  # trials of a front


def write_note(study: StoredStudy, summary: Summary) -> None:
    """Write the study's note in the dashboard."""
    from optuna_dashboard import save_note  # it imports scikit-learn: a second of each worker's start

    optuna_study = optuna.load_study(study_name=study.spec.name, storage=study.storage)
    save_note(optuna_study, study_note(study, summary))


def study_note(study: StoredStudy, summary: Summary) -> str:
    """Return the study's note, in Markdown: attributes are plain text in the dashboard, links work only in notes."""
    spec = study.spec
    lines = [
        f"**{spec.name}**: {spec.objective}, {_ways(spec)}, {study.done(summary.finished)}.",
        "",
        f"[The study in MLflow]({study.attrs.get(RUN_URL, '')}); its workers: `{command('top', spec.name)}`",
    ]
    if spec.several and summary.front:
        lines += ["", "Front, the trials that no other dominates:", "", *_front_table(spec, summary.front)]
    elif (best := summary.best) is not None:
        params = ", ".join(f"`{key}` = {format_value(value)}" for key, value in best.params.items())
        lines += ["", f"Best: {_linked(best)}, val {spec.metric} {first_value(best):.4f} with {params}."]
    if summary.out_of_bounds:
        bounds = " or ".join(f"`{bound}`" for bound in spec.bounds)
        lines += ["", f"{counted(summary.out_of_bounds, 'complete trial')} out of bounds: {bounds} is broken."]
    for line in confirmation_lines(study):
        lines += ["", f"{line[:1].upper()}{line[1:]}."]
    rungs = rung_lines(study)
    rungs += [best_open] if (best_open := foreseen_line(study)) else []
    lines += ["", *(f"- {line}" for line in rungs)] if rungs else []
    promoted = [line for line in promotion_lines(study) if line]
    lines += ["", *(f"- {line}" for line in promoted)] if promoted else []
    return "\n".join(lines)


def _ways(spec: StudySpec) -> str:
    if not spec.several:
        return f"{spec.direction} val {spec.metric}"
    return " and ".join(f"{way} {name}" for name, way in spec.ways.items())


def _linked(trial: FrozenTrial) -> str:
    url = trial.user_attrs.get(RUN_URL)
    return f"[trial {trial.number}]({url})" if url else f"trial {trial.number}"


def _front_table(spec: StudySpec, front: Sequence[FrozenTrial]) -> list[str]:
    head = [f"| trial | {' | '.join(spec.ways)} |", f"|---|{'---|' * len(spec.ways)}"]
    shown = [
        f"| {_linked(trial)} | {' | '.join(f'{value:.4g}' for value in trial.values)} |" for trial in front[:_MOST]
    ]
    return head + shown + ([f"| and {len(front) - _MOST} more | {'| ' * len(spec.ways)}"] if len(front) > _MOST else [])
