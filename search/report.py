"""The report of a study: one HTML page that needs nothing beside itself."""

from __future__ import annotations

import datetime
import math
import warnings
from pathlib import Path
from typing import Any

import optuna
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, select_autoescape
from optuna.trial import FrozenTrial, TrialState

from search.smoke_test import SMOKE
from search.study import RUN_URL, StudyHandle
from search.summary import Summary, format_seconds, format_value, study_page, summarise
from search.worker import INFEASIBLE
from storage.claims import REASON

_GREY = "rgba(140, 140, 140, 0.45)"
_TOP = 10


def write_report(handle: StudyHandle, path: Path, *, dashboard_url: str | None) -> Path:
    """Write the report of `handle` to `path` and return it."""
    summary = summarise(handle)
    environment = Environment(loader=PackageLoader("search"), autoescape=select_autoescape())
    page = environment.get_template("report.html.j2").render(
        spec=handle.spec,
        summary=summary,
        saved=format_seconds(summary.seconds_saved),
        best_params={k: format_value(v) for k, v in summary.best.params.items()} if summary.best else {},
        figures=_figures(handle, summary),
        top=[_row(handle, t) for t in _top(handle)],
        unfinished=[_row(handle, t) for t in handle.trials() if _without_result(t)],
        mlflow_url=handle.attrs.get(RUN_URL),
        dashboard_url=study_page(dashboard_url, handle.study_id) if dashboard_url else None,
        smoke=handle.attrs.get(SMOKE),
        made_at=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _without_result(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.FAIL or bool(trial.user_attrs.get(INFEASIBLE))


def _top(handle: StudyHandle) -> list[FrozenTrial]:
    complete = [t for t in handle.trials() if t.state == TrialState.COMPLETE and t.value is not None]
    sign = -1 if handle.spec.direction == "maximize" else 1
    return sorted(complete, key=lambda t: (sign * (t.value or 0.0), t.number))[:_TOP]


def _row(handle: StudyHandle, trial: FrozenTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "value": "" if trial.value is None else f"{trial.value:.4f}",
        "epochs": f"{len(trial.intermediate_values)}/{handle.spec.epochs}",
        "duration": format_seconds(trial.duration.total_seconds()) if trial.duration else "",
        "params": ", ".join(f"{k} = {format_value(v)}" for k, v in trial.params.items()),
        "reason": trial.user_attrs.get(REASON, ""),
        "url": trial.user_attrs.get(RUN_URL),
    }


def _figures(handle: StudyHandle, summary: Summary) -> list[dict[str, str]]:
    """Return each figure's title and HTML; plotly's script travels once, inside the first."""
    study = handle.open()
    name = f"val {handle.spec.metric}"
    made: list[tuple[str, go.Figure | str]] = [("Learning curves", _learning_curves(handle))]
    enough = "Shown from two complete trials on."
    if summary.complete >= 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which visualisations are experimental is not the reader's concern
            made += [
                (
                    "Optimization history",
                    optuna.visualization.plot_optimization_history(study, target_name=name),
                ),
                ("Parameter importances", _importances(study, name)),
                ("Parallel coordinates", _parallel_coordinates(study, name)),
            ]
    else:
        made += [(t, enough) for t in ("Optimization history", "Parameter importances", "Parallel coordinates")]
    figures = []
    script: bool | str = True
    for title, figure in made:
        if isinstance(figure, str):
            figures.append({"title": title, "text": figure, "html": ""})
            continue
        figure.update_layout(title=None, template="plotly_white", margin={"t": 30, "l": 60, "r": 30, "b": 50})
        html = figure.to_html(
            full_html=False, include_plotlyjs=script, config={"displaylogo": False, "responsive": True}
        )
        figures.append({"title": title, "text": "", "html": html})
        script = False
    return figures


def _importances(study: optuna.Study, name: str) -> go.Figure | str:
    try:
        return optuna.visualization.plot_param_importances(study, target_name=name)
    except (ValueError, RuntimeError) as error:  # too few trials, or no spread in their values
        return f"Not to be told yet: {error}"


def _parallel_coordinates(study: optuna.Study, name: str) -> go.Figure:
    """Return Optuna's plot over the parameters that all trials have; a conditional one would hide half the trials."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    common = set.intersection(*(set(t.params) for t in complete))
    return optuna.visualization.plot_parallel_coordinate(study, params=sorted(common), target_name=name)


def _learning_curves(handle: StudyHandle) -> go.Figure:
    """Return the metric by epoch, a line per trial, the pruned ones grey and the best one thick."""
    best = summarise(handle).best
    figure = go.Figure()
    for trial in sorted(handle.trials(), key=lambda t: t.state == TrialState.COMPLETE):
        points = [(s, v) for s, v in sorted(trial.intermediate_values.items()) if not math.isnan(v)]
        if not points:
            continue
        complete = trial.state == TrialState.COMPLETE
        line: dict[str, Any] = {"width": 1.5} if complete else {"width": 1, "color": _GREY}
        if best is not None and trial.number == best.number:
            line = {"width": 4, "color": "#d62728"}
        figure.add_scatter(
            x=[step + 1 for step, _ in points],
            y=[value for _, value in points],
            mode="lines" if len(points) > 1 else "markers",
            line=line,
            marker={"color": line.get("color"), "size": 4},
            name=f"trial {trial.number}" + ("" if complete else f" ({trial.state.name.lower()})"),
            showlegend=complete,
        )
    figure.update_xaxes(title="epoch")
    figure.update_yaxes(title=f"val {handle.spec.metric}")
    return figure
