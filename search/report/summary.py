"""What a study came to, as lines of plain text: the end of `run`, and of `show`."""

from __future__ import annotations

import textwrap

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.finalists.text import confirmation_lines
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.devices import devices_line, devices_of
from hpsearch.search.study.front import front_lines
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.rungs import rung_lines
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, format_seconds, format_value, study_page
from hpsearch.storage.attributes import REASON, RUN_URL, TRACKING


def _failed(study: StoredStudy) -> list[FrozenTrial]:
    return [t for t in study.trials() if t.state == TrialState.FAIL and REASON in t.user_attrs]


def _bounds(spec: StudySpec) -> str:
    return " or ".join(map(str, spec.bounds))


def summary_lines(study: StoredStudy, summary: Summary, *, dashboard_url: str | None) -> list[str]:
    """Return the end of a run as lines of plain text."""
    spec = study.spec
    counts = [f"{summary.complete} complete", f"{summary.pruned} pruned"]
    counts += [f"{summary.infeasible} infeasible"] if summary.infeasible else []
    counts += [f"{summary.failed} failed"]
    counts += [f"{summary.running} running"] if summary.running else []
    counts += [f"{summary.waiting} waiting"] if summary.waiting else []
    lines = [f"study {spec.name}: {study.done(summary.finished)} ({', '.join(counts)})"]
    if (given_up := study.given_up) is not None:
        lines.append(f"stopped after {given_up.started} of {given_up.budget} trials: {given_up.why}")
    if spec.several and summary.front:
        lines += front_lines(spec, summary.front)
    elif summary.best is not None:
        best = summary.best
        lines.append(f"best: trial {best.number}, val {spec.metric} {first_value(best):.4f}")
        lines += [f"    {key} = {format_value(value)}" for key, value in best.params.items()]
    else:
        why = "all break a constraint" if summary.out_of_bounds else "no trial has run to its end"
        lines.append(f"best: none, {why}")
        lines += [f"the last failure, of trial {t.number}: {t.user_attrs[REASON]}" for t in _failed(study)[-1:]]
    if summary.out_of_bounds:
        lines.append(f"out of bounds: {summary.out_of_bounds} of the complete trials break {_bounds(spec)}")
    lines += confirmation_lines(study)
    if summary.epochs_saved:
        lines.append(
            f"pruning saved {summary.epochs_saved} of {summary.epochs_saved + summary.epochs_run} epochs, "
            f"about {format_seconds(summary.seconds_saved)} of worker time"
        )
    lines += rung_lines(study)
    if (devices := devices_of(study)) is not None:
        lines.append(f"devices: {devices_line(devices)}")
    if summary.untracked:
        first = next(trial for trial in study.trials() if TRACKING in trial.user_attrs)
        why = textwrap.shorten(str(first.user_attrs[TRACKING]), 160, placeholder=" ...")
        lines.append(f"MLflow lacks something of {summary.untracked} trials, such as of trial {first.number}: {why}")
    if summary.best is not None and (url := summary.best.user_attrs.get(RUN_URL)):
        which = f"trial {summary.best.number}:" if spec.several else "best trial:"
        lines.append(f"MLflow, {which} {url}")
    if url := study.attrs.get(RUN_URL):
        lines.append(f"MLflow, study:      {url}")
    if dashboard_url:
        lines.append(f"Optuna dashboard:   {study_page(dashboard_url, study.study_id)}")
    return lines
