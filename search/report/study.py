"""One study on a page of the terminal: its spec, its trials, its finalists, and what it came to."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hpsearch.search.finalists import read_finalists
from hpsearch.search.finalists.text import finalist_table
from hpsearch.search.report.foreseen import foreseen_table
from hpsearch.search.report.promotions import promotion_lines
from hpsearch.search.report.summary import summary_lines
from hpsearch.search.report.trial import why_waiting
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import format_value, summarise
from hpsearch.storage.attributes import ORIGIN, PARENT_TRIAL, REASON, STOPPED, WORKER

_LAST = 20
_UNSAID = {
    "finalists_of",
    "budget_epochs",
    "budget_seconds",
    "warm_start",
    "stop_when",
    "directions",
    "constraints",
    "tensorboard",
    "wandb",
}
_WIDE = 100  # columns, from which on there is room for more


def print_study(console: Console, study: StoredStudy, dashboard_url: str | None, *, every: bool) -> None:
    """Print all there is to know about a study; of its trials the last ones, or `every` one."""
    told = {"metric", "direction"} if study.spec.several else set()  # by the directions
    for key, value in study.spec.model_dump(exclude={"name", "version", *told}).items():
        if key in _UNSAID and value is None:
            continue
        shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(value) if isinstance(value, list) else shown
        shown = ", ".join(map(str, study.spec.bounds)) if key == "constraints" else shown
        console.print(f"{key:>13}  {shown}")
    console.print()
    _print_trials(console, study, every=every)
    console.print()
    if (table := foreseen_table(study, every=every)) is not None:
        console.print(table)
        console.print()
    if (found := read_finalists(study)) is not None:
        console.print(finalist_table(study, found))
        console.print()
    lines = [*summary_lines(study, summarise(study), dashboard_url=dashboard_url), *promotion_lines(study)]
    if why := study.attrs.get(STOPPED):
        lines.append(f"stopped {why}")
    for line in lines:
        console.print(line)


def _print_trials(console: Console, study: StoredStudy, *, every: bool) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    # A narrow terminal has room for reasons alone: who ran a trial is told by `show --trial`.
    worker = ("worker",) if console.width >= _WIDE else ()
    values = tuple(study.spec.ways) if study.spec.several else ("value",)
    for column in ("trial", "state", "epochs", *values, *worker, "reason"):
        right, reason = column in {"trial", "epochs", *values}, column == "reason"
        table.add_column(column, justify="right" if right else "left", no_wrap=not reason, overflow="fold")
    trials, waiting = study.trials(), why_waiting(study)
    for trial in trials if every else trials[-_LAST:]:
        attrs = trial.user_attrs
        again = f"trial {attrs[PARENT_TRIAL]} again" if PARENT_TRIAL in attrs else None
        reason = "; ".join(filter(None, [attrs.get(ORIGIN), again, waiting.get(trial.number) or attrs.get(REASON)]))
        table.add_row(
            str(trial.number),
            trial.state.name,
            str(len(trial.intermediate_values)),
            *(format_value(value) for value in trial.values or [""] * len(values)),
            *[attrs.get(WORKER, "") for _ in worker],
            reason.splitlines()[0] if reason else "",
        )
    if not every and len(trials) > _LAST:
        console.print(f"the last {_LAST} of {len(trials)} trials; all of them with --all")
    console.print(table)
