"""`hpsearch export`: the formats of its tables, which equal those of the Python API."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest

from hpsearch import Study
from hpsearch.search.cli import run_command
from hpsearch.search.report.table_file import format_csv, write_table
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.report.support import BOUNDS, TRIALS, study_of


@pytest.fixture
def study(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Study:
    study_of(open_storage(database_url, application_name="test"), TRIALS, constraints=BOUNDS)
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    return Study.open("s")


def test_each_format_has_the_values_of_the_dataframe(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = study.trials_dataframe()
    expected["duration"] = expected["duration"].dt.total_seconds()
    assert run_command(["export", "s"]) == 0
    read = {"csv": pd.read_csv(io.StringIO(capsys.readouterr().out), keep_default_na=False, na_values={"duration": ""})}
    for suffix in ("csv", "json", "parquet"):
        path = tmp_path / f"trials.{suffix}"
        assert run_command(["export", "s", "-o", str(path)]) == 0
        assert capsys.readouterr().out == f"{path}\n"
    read |= {
        "json": pd.read_json(tmp_path / "trials.json", precise_float=True),
        "parquet": pd.read_parquet(tmp_path / "trials.parquet"),
    }
    for table in read.values():
        pd.testing.assert_frame_equal(table, expected, check_dtype=False, rtol=0, atol=0)


def test_choices_of_several_types_are_text_in_parquet(tmp_path: Path) -> None:
    choices = [1, "auto", None, True]
    write_table(pd.DataFrame({"params_a": pd.Series(choices, dtype=object)}), tmp_path / "a.parquet")
    assert pd.read_parquet(tmp_path / "a.parquet")["params_a"].fillna("").tolist() == ["1", "auto", "", "True"]


def test_numbers_in_json_have_all_digits(tmp_path: Path) -> None:
    numbers = [0.6923861580443115, 1.7976931348623157e308, 5e-324, 2**53 + 1, float("nan"), float("inf")]
    write_table(pd.DataFrame({"value": pd.Series(numbers, dtype=object)}), tmp_path / "a.json")
    assert [row["value"] for row in json.loads((tmp_path / "a.json").read_text())] == [*numbers[:4], None, None]


def test_epochs_are_numbered_from_one(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["export", "s", "--epochs"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert list(table.columns) == ["number", "epoch", "val_accuracy", "val_latency_ms"]
    steps = [(trial.number, step + 1) for trial in study.trials for step in sorted(trial.intermediate_values)]
    assert list(zip(table["number"], table["epoch"], strict=True)) == steps


@pytest.mark.parametrize(
    ("name", "reason"),
    [("trials.xlsx", "unknown format; use a file name"), ("missing/trials.csv", "choose another file")],
)
def test_an_impossible_file_is_an_error_of_one_line(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    assert run_command(["export", "s", "-o", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hpsearch: --output {tmp_path / name}: ")
    assert reason in error
    assert error.count("\n") == 1


def test_no_spreadsheet_evaluates_a_text_as_a_formula(tmp_path: Path) -> None:
    table = pd.DataFrame({"=a": ["=1+1", "-2", "mlp"], "value": [-1.5, 2.0, None]})
    write_table(table, tmp_path / "a.csv")
    lines = ["'=a,value", "'=1+1,-1.5", "-2,2.0", "mlp,"]
    assert (tmp_path / "a.csv").read_text().splitlines() == format_csv(table).splitlines() == lines
