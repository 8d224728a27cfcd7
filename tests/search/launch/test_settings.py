"""The settings of a fleet: each mistake is an error of one line with exit code 2, without passwords."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.errors import USER_ERRORS
from hpsearch.search.launch.launch import ENGINES, LaunchConfig
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.launch.support import AWAY, launch

BAD = [
    ({"engine": "slrum"}, ["'slrum'", "'slurm'"]),
    ({"engine": ""}, ["known: kubernetes, ray, slurm, systemd"]),
    ({"workers": 0}, ["--workers", "not 0"]),
    ({"workers": -3}, ["--workers", "-3"]),
    ({"workers": 10**9}, ["--workers", "10000"]),
    ({"gpus": -1.0}, ["--gpus-per-worker", "not -1"]),
    ({"gpus": 1.5}, ["--gpus-per-worker", "not 1.5"]),
    ({"gpus": float("nan")}, ["--gpus-per-worker", "nan"]),
    ({"gpus": float("inf")}, ["--gpus-per-worker", "inf"]),
    ({"gpus": 0.001}, ["--gpus-per-worker", "0.001", "64"]),
    ({"engine": "kubernetes", "image": "a", "gpus": 0.5}, ["--gpus-per-worker", "0.5", "time slicing"]),
    ({"cpus": 0}, ["--cpus-per-worker", "not 0"]),
    ({"memory": "8"}, ["--memory", "'8'", "8G"]),
    ({"memory": "0G"}, ["--memory", "'0G'"]),
    ({"memory": "8G\n#SBATCH --uid=0"}, ["--memory"]),
    ({"time": "4h"}, ["--time", "'4h'", "4:00:00"]),
    ({"time": "4:00"}, ["--time", "'4:00'"]),
    ({"time": "4:61:00"}, ["--time", "'4:61:00'"]),
    ({"time": "0:01:00"}, ["--time", "'0:01:00'", "--grace 60"]),
    ({"time": "4:00:00\n"}, ["--time"]),
    ({"engine": "ray", "time": "4:00:00"}, ["--time", "slurm", "ray"]),
    ({"image": "a"}, ["--image", "kubernetes"]),
    ({"engine": "ray", "command": ("hpsearch",)}, ["--command", "slurm and systemd"]),
    ({"engine": "kubernetes"}, ["--image"]),
    ({"engine": "kubernetes", "image": "a b"}, ["--image", "'a b'"]),
    ({"grace": 5}, ["--grace", "10"]),
    ({"grace": 10**6}, ["--grace", "65535"]),
    ({"study": "a b"}, ["STUDY", "'a b'"]),
    ({"study": "a\n"}, ["STUDY"]),
    ({"study": "$(reboot)"}, ["STUDY"]),
    ({"study": "a" * 101}, ["STUDY"]),
    ({"storage_url": "sqlite:///x.db"}, ["--storage-url", "sqlite"]),
    ({"storage_url": "postgresql://u@h/d\nx"}, ["--storage-url"]),
    ({"home": "/a\nb"}, ["--home"]),
    ({"folder": "/a\\", "engine": "systemd"}, ["this folder", "backslash"]),
    ({"folder": "/a\x1b"}, ["folder"]),
]


@pytest.mark.parametrize(("changed", "words"), BAD, ids=lambda value: str(value)[:60])
def test_a_mistake_is_an_error_of_one_line(changed: dict[str, object], words: list[str]) -> None:
    with pytest.raises(USER_ERRORS) as raised:
        launch(**changed)
    message = str(raised.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:geheim@h/d",
        "postgres://u:@h/d",
        "postgresql://u@h/d?password=geheim",
        "postgresql://u:a@geheim@h/d",
    ],
)
def test_a_password_in_a_url_is_rejected_and_not_printed(engine: str, url: str) -> None:
    with pytest.raises(USER_ERRORS, match="contains a password") as raised:
        launch(engine=engine, image="hpsearch:1" if engine == "kubernetes" else None, storage_url=url)
    assert "geheim" not in str(raised.value)


def test_derived_settings() -> None:
    assert [launch(gpus=gpus).workers_per_gpu for gpus in (0, 0.1, 0.25, 0.3, 0.34, 0.5, 0.7, 1, 2)] == [
        *(1, 10, 4, 3, 2, 2, 1, 1, 1)
    ]
    assert launch(grace=30).worker_grace == 25
    assert launch(memory="512M").memory_parts == (512, "M")


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setattr("hpsearch.storage.database.connect.STARTUP_RETRY_SECONDS", 0.1)

    def run(*arguments: str) -> str:
        assert run_command(["fleet", "print", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, captured.err
        assert captured.err.startswith("hpsearch: ")
        return captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["slrum", "wine", "--workers", "2"], ["'slrum'", "'slurm'"]),
        (["slurm", "wine", "--workers", "0"], ["--workers", "0"]),
        (["slurm", "wine", "--workers", "many"], ["--workers", "'many'"]),
        (["slurm", "wine"], ["--workers"]),
        (["slurm", "wine", "--workers", "2", "--time", "tomorrow"], ["--time", "'tomorrow'"]),
        (["slurm", "wine", "--workers", "2", "--gpus-per-worker", "-1"], ["--gpus-per-worker", "-1"]),
        (["slurm", "wine", "--workers", "2", "--command", "'"], ["--command", "quote"]),
        (["ray", "wine", "--workers", "2", "--storage-url", "postgresql://u:geheim@h/d"], ["password", ".pgpass"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_invalid_options_of_fleet_print_are_an_error(refuse, arguments: list[str], words: list[str]) -> None:
    message = refuse(*arguments)
    assert [word for word in words if word not in message] == []
    assert "geheim" not in message


def test_the_url_from_the_environment_is_checked_too(refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", "postgresql://u:geheim@h/d")
    message = refuse("systemd", "wine", "--workers", "2")
    assert "worker.env" in message
    assert "geheim" not in message


def test_an_unknown_study_is_an_error_if_the_database_answers(
    refuse, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _, rest = database_url.partition("://")
    user, _, host = rest.partition("@")
    name, _, password = user.partition(":")
    monkeypatch.setenv("PGPASSWORD", password)
    open_storage(database_url, application_name="test")
    message = refuse("slurm", "wine", "--workers", "2", "--storage-url", f"{head}://{name}@{host}")
    assert "no study 'wine'" in message


def test_the_script_is_printed_if_the_database_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpsearch.storage.database.connect.STARTUP_RETRY_SECONDS", 0.1)
    assert run_command(["fleet", "print", "slurm", "wine", "--workers", "2", "--storage-url", AWAY]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("#!/bin/bash\n")
    assert "could not check that study 'wine' exists" in captured.err
    assert isinstance(launch(), LaunchConfig)
