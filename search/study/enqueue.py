"""Enqueue trials with given parameters."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.search_space import FixedTrial, NotInSpaceError, TextFixedTrial
from hpsearch.search.console import format_command, pluralize
from hpsearch.search.errors import SearchError, as_search_error
from hpsearch.search.spec.spec import StudySpec, parse_stored_spec
from hpsearch.search.spec.spec_file import check_regular
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import ORIGIN
from hpsearch.storage.study_storage.creating import insert_missing_in
from hpsearch.storage.trials.budget import change_spec
from hpsearch.storage.trials.history import read_attempts


def default_params(objective: BaseObjective) -> dict[str, Any] | None:
    """Return the objective's `defaults`, completed by the middle of the range of each missing parameter.

    Returns:
        The parameters; None if the objective has no `defaults`.

    Raises:
        ObjectiveError: the defaults are not in the search space.
    """
    if not objective.defaults:
        return None
    space = FixedTrial(objective.defaults)
    try:
        validate_params(objective, space)
    except NotInSpaceError as error:
        name = type(objective).__name__
        raise ObjectiveError(f"{name}.defaults: {error}; correct the value, or give --no-default-first") from None
    return space.values


def validate_params(objective: BaseObjective, space: FixedTrial) -> dict[str, Any]:
    """Check fixed parameters against the objective's search space, and return those that were given.

    Raises:
        NotInSpaceError: a parameter is not in the search space.
        ObjectiveError: `suggest` failed.
    """
    with wrap_user_errors(f"{type(objective).__name__}.suggest"):
        objective.configure(space)
    space.require_all_used(objective.name)
    return {name: space.values[name] for name in space.given}


def make_waiting_trial(params: Mapping[str, Any], origin: str) -> FrozenTrial:
    """Return a waiting trial with fixed parameters; the sampler suggests its other parameters.

    Args:
        params: some or all parameters.
        origin: source of the parameters, as text.
    """
    system, user = {"fixed_params": dict(params)}, {ORIGIN: origin}
    return create_trial(state=TrialState.WAITING, system_attrs=system, user_attrs=user)


_MAX_BYTES = 100_000_000  # the file is read at once

Rows = Iterator[tuple[int, FixedTrial]]  # with their line or place
Configurations = Mapping[str, Any] | Sequence[Mapping[str, Any]] | Path | str


def read_rows(given: Configurations, objective: BaseObjective) -> list[FrozenTrial]:
    """Return one waiting trial per given configuration, in the given order.

    Args:
        given: a dictionary of parameters, a list of dictionaries, a .csv file with the parameter names as header, or a
            .jsonl file with one object per line. The sampler suggests missing parameters and those with empty cells.
        objective: objective whose search space must contain the values.

    Raises:
        SearchError: the file cannot be read, or a configuration is invalid; the message has the line.
        ObjectiveError: `suggest` failed.
    """
    if not isinstance(given, str | Path):
        rows = [given] if isinstance(given, Mapping) else given
        if not (isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows)):
            remedy = "give a dictionary, a list of dictionaries such as table.to_dict('records'), or a file"
            raise SearchError(f"--enqueue: a {type(given).__name__} is not supported; {remedy}")
        return _make_trials("params", "configuration", enumerate(map(FixedTrial, rows), start=1), objective)
    path = Path(given)
    read = {".csv": _read_csv, ".jsonl": _read_jsonl}.get(path.suffix.lower())
    if read is None:
        raise SearchError(f"--enqueue {path}: unknown file type {path.suffix!r}; use .csv or .jsonl")
    try:
        check_regular(path, "--enqueue")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise SearchError(f"--enqueue {path} has {size:,} bytes, more than {_MAX_BYTES:,}; split the file")
        return _make_trials(str(path), "line", read(path), objective)
    except OSError as error:
        raise SearchError(f"--enqueue {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SearchError(f"--enqueue {path} is not UTF-8 text; save the file as UTF-8") from None


def _make_trials(source: str, unit: str, rows: Rows, objective: BaseObjective) -> list[FrozenTrial]:
    """Return one waiting trial per row. The trial's origin names the source and the row."""
    found: dict[frozenset[tuple[str, Any]], tuple[dict[str, Any], int]] = {}
    for place, space in rows:
        where = f"--enqueue {source}: {unit} {place}"
        if unnamed := [name for name in space.given if not isinstance(name, str)]:
            raise SearchError(f"{where}: the parameter name {unnamed[0]!r} is not text; use names of the search space")
        with as_search_error(f"{where}: ", NotInSpaceError):
            params = validate_params(objective, space)
        if not params:
            raise SearchError(f"{where}: no parameter has a value; give at least one")
        if same := found.get(key := frozenset(params.items())):
            raise SearchError(f"{where} repeats {unit} {same[1]}; remove one of them")
        found[key] = (params, place)
    if not found:
        raise SearchError(f"--enqueue {source} contains no configuration; add at least one")
    return [make_waiting_trial(params, f"{Path(source).name}, {unit} {place}") for params, place in found.values()]


def _read_csv(path: Path) -> Rows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
            if len(names) == 1 and (separator := re.search("[;\t]", names[0])):
                raise _make_line_error(path, 1, f"the columns are separated by {separator[0]!r}; separate them by ','")
            if invalid := [name for name, number in Counter(names).items() if not name or number > 1]:
                fault = f"column {invalid[0]!r} appears twice; rename one" if invalid[0] else "a column has no name"
                raise _make_line_error(path, 1, fault)
            for cells in rows:
                if cells and len(cells) != len(names):
                    fault = f"the line has {pluralize(len(cells), 'cell')}, but line 1 has {len(names)}"
                    raise _make_line_error(path, rows.line_num, fault)
                if cells:
                    given = {name: cell.strip() for name, cell in zip(names, cells, strict=True) if cell.strip()}
                    yield rows.line_num, TextFixedTrial(given)
        except csv.Error as error:
            raise _make_line_error(path, rows.line_num, str(error)) from None


def _read_jsonl(path: Path) -> Rows:
    for line, text in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not text.strip():
            continue
        try:
            given = json.loads(text, object_pairs_hook=_make_object)
        except (ValueError, RecursionError) as error:
            raise _make_line_error(path, line, f"invalid JSON: {error}") from None
        if not isinstance(given, dict):
            raise _make_line_error(path, line, f'{given!r} is not an object such as {{"lr": 0.001}}')
        yield line, FixedTrial(given)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, number in Counter(name for name, _ in pairs).items():
        if number > 1:  # the json module would silently use the last of several equal keys
            raise ValueError(f"the key {name!r} appears twice; remove one")
    return dict(pairs)


def _make_line_error(path: Path, line: int, fault: str) -> SearchError:
    return SearchError(f"--enqueue {path}: line {line}: {fault}")


def find_stopped_warning(study: StoredStudy) -> str | None:
    """Return a warning if enqueued trials wait in a study that terminated early; else None."""
    if study.early_stop is None:
        return None
    waiting = [trial._trial_id for trial in study.trials(TrialState.WAITING)]
    count = len(waiting) - len(read_attempts(study.engine, waiting))
    if not count:
        return None
    name = study.spec.name
    return (
        f"study {name!r} stopped early and does not run {pluralize(count, 'enqueued trial')}; restart the study with "
        f"{format_command('start', name)}"
    )


def check_budget(spec: StudySpec, trials: int) -> None:
    """Check that a study's budget and sampler allow a number of first and enqueued trials.

    Raises:
        SearchError: there are more trials than the budget allows, or the sampler, such as `grid`, lists all its trials.
    """
    if spec.sampler.is_indexed_by_trial:
        raise SearchError(f"--enqueue is not available with sampler {spec.sampler.name}; extend sampler.search_space")
    if trials > spec.n_trials:
        raise SearchError(
            f"--enqueue: {trials} trials exceed the budget of {spec.n_trials}; raise the budget, or remove some trials"
        )


def enqueue(study: StoredStudy, trials: Sequence[FrozenTrial]) -> int:
    """Enqueue the trials that the study does not have yet, and return the number of enqueued trials.

    A configuration that is already enqueued, from any source, is not enqueued again.

    Raises:
        SearchError: the trials exceed the budget; nothing was written.
    """
    made: list[int] = []

    def insert(connection: sa.Connection, spec: dict[str, Any]) -> None:
        made.append(enqueue_in(connection, study.study_id, parse_stored_spec(spec), trials))

    change_spec(study.engine, study.study_id, lambda spec, _started: spec, then=insert)
    return made[-1]


def enqueue_in(connection: sa.Connection, study_id: int, spec: StudySpec, trials: Sequence[FrozenTrial]) -> int:
    """Enqueue trials like `enqueue`, in a transaction of the caller that holds the study's lock."""
    if not trials:
        return 0
    new, total = insert_missing_in(connection, study_id, trials)
    if new:
        check_budget(spec, total)
    return new
