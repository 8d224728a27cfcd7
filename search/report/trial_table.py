"""The table of trials in the terminal: one line per trial, best first, with parameters and a short reason."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from optuna.trial import FrozenTrial, TrialState
from rich.table import Table

from hpsearch.search.console import format_number, plain_table, shorten_line
from hpsearch.search.report.trials import PARAMETER_PREFIX, format_state, get_pruning_record, list_parameter_names
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.summary import format_value, list_violations
from hpsearch.storage.attributes import ORIGIN, PARENT_TRIAL, REASON, WORKER

_PADDING = 2  # spaces between columns
_MIN_REASON_WIDTH = len("0.8861 ties 0.8861 at epoch 13")
_WORKER_WIDTH = 150  # in characters; a narrower table has no workers, which `show --trial` prints


def format_short_reason(spec: StudySpec, trial: FrozenTrial) -> str:
    """Return why a trial ended, in a few words: ``0.8861 < 0.9444 at epoch 3``; empty for most complete trials."""
    attrs = trial.user_attrs
    parts = [
        {"default": "default configuration"}.get(str(origin), str(origin)) if (origin := attrs.get(ORIGIN)) else "",
        f"retrains trial {attrs[PARENT_TRIAL]}" if PARENT_TRIAL in attrs else "",
    ]
    if trial.state == TrialState.COMPLETE:
        parts += list_violations(spec, trial)
    elif trial.state.is_finished():
        parts.append(_shorten(get_pruning_record(trial), str(attrs.get(REASON, ""))))
    return "; ".join(filter(None, parts))


_PRUNER_REASON = re.compile(r"\w+ pruner at epoch (\d+) of \d+: (.*)")
_COMPARISON = re.compile(r"(?:best )?\S+ (\S+) is (below|above) (?:the threshold )?(-?[\d.]+(?:e[+-]?\d+)?)\b.*")
_RANK = re.compile(r"(rank \d+ of \d+)(?: by Pareto fronts)? at rung .*")


def shorten_reason(reason: str) -> str:
    """Return the first line of a reason, and a pruner's reason in a few words: ``0.8861 < 0.9444 at epoch 3``."""
    first = reason.split("\n", 1)[0]
    if (pruned := _PRUNER_REASON.fullmatch(first)) is None:
        return first
    if compared := _COMPARISON.fullmatch(pruned[2]):
        return f"{compared[1]} {'<' if compared[2] == 'below' else '>'} {compared[3]} at epoch {pruned[1]}"
    if ranked := _RANK.fullmatch(pruned[2]):
        return f"{ranked[1]} at epoch {pruned[1]}"
    return f"epoch {pruned[1]}: {pruned[2]}"


def _shorten(record: Mapping[str, object], reason: str) -> str:
    """Return a reason in a few words, from the record of the pruner's decision if it has a comparison."""
    value, cutoff, epoch = (record.get(key) for key in ("value", "cutoff", "epoch"))
    if isinstance(value, int | float) and isinstance(cutoff, int | float) and isinstance(epoch, int):
        sign = "<" if value < cutoff else ">" if value > cutoff else "ties"
        digits = next((d for d in (4, 6) if value == cutoff or f"{value:.{d}g}" != f"{cutoff:.{d}g}"), 9)
        return f"{format_number(value, digits)} {sign} {format_number(cutoff, digits)} at epoch {epoch + 1}"
    return shorten_reason(reason)


def make_trial_table(
    spec: StudySpec,
    trials: Sequence[FrozenTrial],
    *,
    width: int,
    waiting: Mapping[int, str] | None = None,
    parameters: Sequence[str] | None = None,
) -> Table:
    """Return the table of trials, one line per trial.

    The columns of parameters are those that fit: the given ones, or first the parameters in which the trials differ.

    Args:
        spec: spec of the study.
        trials: trials in the order of the table.
        width: width of the table in characters.
        waiting: reasons why trials wait, by number; None omits them.
        parameters: names of the parameters to show. Then the reasons get only the space that is left.
    """
    metrics = tuple(spec.direction_by_metric)
    cells: dict[str, list[str]] = {
        "trial": [str(trial.number) for trial in trials],
        "state": [format_state(trial) for trial in trials],
        "epochs": [str(len(trial.intermediate_values)) for trial in trials],
    }
    for place, metric in enumerate(metrics):
        name = metric if spec.is_multi_objective else "value"
        cells[name] = [format_value(trial.values[place]) if trial.values else "" for trial in trials]
    numbers = [name for name in cells if name != "state"]
    waits = waiting or {}
    reasons = ["; ".join(filter(None, [format_short_reason(spec, t), waits.get(t.number)])) for t in trials]
    longest = max(map(len, reasons), default=0)
    room = width - sum(_measure(name, column) for name, column in cells.items())
    reserved = min(max(longest, len("reason")), max(_MIN_REASON_WIDTH, width // 3)) + _PADDING
    left = room - (reserved if longest and parameters is None else 0)
    shown = _select_parameters(trials, left, parameters, taken={*cells, "worker", "reason"})
    cells |= shown
    left -= sum(_measure(name, column) for name, column in shown.items())
    if width >= _WORKER_WIDTH:
        workers = [str(trial.user_attrs.get(WORKER, "")) for trial in trials]
        if left >= _measure("worker", workers):
            cells["worker"] = workers
    if longest and (parameters is None or left >= _MIN_REASON_WIDTH + _PADDING):
        # Shortened here, because rich omits columns of tables that are too wide. In a list, the reasons wrap.
        room = width - sum(_measure(name, column) for name, column in cells.items()) - _PADDING
        cells["reason"] = [shorten_line(reason, room if room >= _MIN_REASON_WIDTH else longest) for reason in reasons]
    table = plain_table(*cells, right=numbers, wrap=(), header_style="bold")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table


def _measure(name: str, column: Sequence[str]) -> int:
    return max(len(name), *map(len, column), 0) + _PADDING


def _select_parameters(
    trials: Sequence[FrozenTrial], room: int, wanted: Sequence[str] | None, *, taken: Collection[str]
) -> dict[str, list[str]]:
    """Return the cells of the parameters that fit, in the order of the trials, by column.

    Args:
        trials: trials in the order of the table.
        room: width in characters.
        wanted: names of the parameters in their order; None selects among all parameters.
        taken: names of other columns; a parameter of such a name has the column `params_NAME`, as in Optuna's tables.
    """
    columns = {
        (f"{PARAMETER_PREFIX}{name}" if name in taken else name): [
            format_value(trial.params[name]) if name in trial.params else "" for trial in trials
        ]
        for name in wanted or list_parameter_names(list(trials))
    }
    names = (
        list(columns) if wanted else sorted(columns, key=lambda name: len(set(columns[name])) == 1)
    )  # stable: the order of the objective
    selected = set()
    for name in names:
        if (needed := _measure(name, columns[name])) <= room:
            selected.add(name)
            room -= needed
    return {name: column for name, column in columns.items() if name in selected}
