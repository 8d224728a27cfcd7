"""Write tables of trials or epochs to CSV, JSON or Parquet files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pandas as pd

from hpsearch.search.errors import SearchError
from hpsearch.storage.display import escape_csv_cell
from hpsearch.storage.replacement import replacement


def format_csv(table: pd.DataFrame) -> str:
    """Return the table as CSV, with durations in seconds."""
    return str(_escape(_with_seconds(table)).to_csv(index=False))


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write the table in the format of the file's suffix, with durations in seconds.

    JSON is a list of objects, with null for missing and infinite values. In Parquet, a column with values of several
    types has text.

    Raises:
        SearchError: the suffix is not .csv, .json or .parquet, or the file cannot be written. An existing file is
            unchanged then.
    """
    table = _with_seconds(table)
    writers: dict[str, Callable[[IO[bytes]], Any]] = {
        ".csv": lambda file: _escape(table).to_csv(file, index=False),
        ".json": lambda file: file.write(_format_json(table).encode()),
        ".parquet": lambda file: _with_one_type_per_column(table).to_parquet(file, index=False),
    }
    if (suffix := path.suffix.lower()) not in writers:
        raise SearchError(f"--output {path}: unknown format; use a file name that ends in .csv, .json or .parquet")
    try:
        with replacement(path) as file:
            writers[suffix](file)
    except OSError as error:
        raise SearchError(f"--output {path}: {error.strerror or error}; choose another file") from None


def _escape(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with texts that no spreadsheet evaluates as formulas."""
    texts = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    escaped = table.assign(**{name: table[name].map(escape_csv_cell, na_action="ignore") for name in texts})
    return escaped.rename(columns=escape_csv_cell)


def _format_json(table: pd.DataFrame) -> str:
    """Return the rows as JSON with all digits, which `DataFrame.to_json` rounds to 15."""
    known = table.notna() & ~table.isin([math.inf, -math.inf])  # JSON has no infinity
    rows = table.astype(object).where(known, None).to_dict("records")
    return json.dumps(rows, indent=1, default=lambda value: value.item() if hasattr(value, "item") else str(value))


def _with_one_type_per_column(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with text in columns whose values have several types, such as a choice of 1 and "auto"."""
    objects = [name for name in table if table[name].dtype == object]
    mixed = [name for name in objects if len({type(each) for each in table[name].dropna()}) > 1]
    return table.assign(**{name: table[name].map(str, na_action="ignore") for name in mixed})


def _with_seconds(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(**{name: table[name].dt.total_seconds() for name in table.select_dtypes("timedelta")})
