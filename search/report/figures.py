"""The figures of a study's report."""

from __future__ import annotations

import math
import warnings
from typing import Any

import optuna
import plotly.graph_objects as go
from optuna.trial import TrialState

from search.finalists.table import Finalists
from search.study.study import StoredStudy
from search.study.summary import Summary

_GREY = "rgba(140, 140, 140, 0.45)"


def draw(study: StoredStudy, summary: Summary, finalists: Finalists | None) -> list[dict[str, str]]:
    """Return each figure's title and HTML; plotly's script travels once, inside the first."""
    opened = study.open()
    name = f"val {study.spec.metric}"
    made: list[tuple[str, go.Figure | str]] = [("Learning curves", _learning_curves(study, summary))]
    enough = "Shown from two complete trials on."
    if summary.complete >= 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which visualisations are experimental is not the reader's concern
            made += [
                (
                    "Optimization history",
                    optuna.visualization.plot_optimization_history(opened, target_name=name),
                ),
                ("Parameter importances", _importances(opened, name)),
                ("Parallel coordinates", _parallel_coordinates(opened, name)),
            ]
    else:
        made += [(t, enough) for t in ("Optimization history", "Parameter importances", "Parallel coordinates")]
    if finalists is not None:
        made.insert(0, ("Finalists", _finalists(finalists, name)))
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


def _learning_curves(study: StoredStudy, summary: Summary) -> go.Figure:
    """Return the metric by epoch, a line per trial, the pruned ones grey and the best one thick."""
    best = summary.best
    figure = go.Figure()
    for trial in sorted(study.trials(), key=lambda t: t.state == TrialState.COMPLETE):
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
    figure.update_yaxes(title=f"val {study.spec.metric}")
    return figure


def _finalists(found: Finalists, name: str) -> go.Figure:
    """Return each finalist's value in the search beside what it scored on the fresh seeds and their mean."""
    labels = [f"trial {row.trial}" for row in found.rows]
    figure = go.Figure()
    figure.add_scatter(
        x=[label for label, row in zip(labels, found.rows, strict=True) for v in row.values if v is not None],
        y=[v for row in found.rows for v in row.values if v is not None],
        mode="markers",
        marker={"color": _GREY, "size": 8},
        name="a fresh seed",
    )
    figure.add_scatter(
        x=labels,
        y=[row.search_value for row in found.rows],
        mode="markers",
        marker={"symbol": "circle-open", "size": 12, "color": "#175cd3", "line": {"width": 2}},
        name="in the search",
    )
    figure.add_scatter(
        x=labels,
        y=[row.mean for row in found.rows],
        mode="markers",
        marker={
            "symbol": "diamond",
            "size": 12,
            "color": ["#d62728" if row.trial == found.winner else "#1c2330" for row in found.rows],
        },
        name="mean of the fresh seeds",
    )
    figure.update_yaxes(title=name)
    return figure
