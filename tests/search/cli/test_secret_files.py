"""The variable NAME_FILE is a file with the value of NAME."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpsearch.search import secret_files
from hpsearch.search.cli import run_command
from hpsearch.search.errors import SearchError
from hpsearch.search.secret_files import SECRET_VARIABLES, read_secret_files
from tests.faults.harness import Zygote


@pytest.mark.parametrize("name", SECRET_VARIABLES)
def test_the_content_of_the_file_is_the_value(name: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    environment = {f"{name}_FILE": str(file), "OTHER_FILE": "kept"}
    read_secret_files(environment)
    assert environment == {name: "s3cret", "OTHER_FILE": "kept"}, "whom it starts finds the value alone"
    read_secret_files(environment)


def test_without_a_file_nothing_changes() -> None:
    environment = {"PGPASSWORD": "a", "PGPASSWORD_FILE": "", "MLFLOW_DB_PASSWORD": "b"}
    before = dict(environment)
    read_secret_files(environment)
    assert environment == before


def test_an_empty_value_is_none(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a")
    environment = {"PGPASSWORD": "", "PGPASSWORD_FILE": str(tmp_path / "secret")}
    read_secret_files(environment)
    assert environment == {"PGPASSWORD": "a"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"a\0b", "contains a zero byte"),
        (b"\xff\xfe", "is not a text file"),
    ],
)
def test_an_unusable_secret_file_is_named(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SearchError, match=f"^PGPASSWORD_FILE '{re.escape(str(file))}' {said}[^\n]*$"):
        read_secret_files({"PGPASSWORD_FILE": str(file)})


def test_the_value_comes_from_a_pipe_or_the_pipe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell passes a pipe for `<(...)`."""
    monkeypatch.setattr(secret_files, "_MAX_SECONDS", 0.1)
    reader, writer = os.pipe()
    os.write(writer, b"s3cret\n")
    os.close(writer)
    environment = {"PGPASSWORD_FILE": f"/dev/fd/{reader}"}
    read_secret_files(environment)
    os.close(reader)
    assert environment == {"PGPASSWORD": "s3cret"}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SearchError, match=r"cannot be read \(no program has written to this pipe within 0 s\)"):
        read_secret_files({"PGPASSWORD_FILE": str(tmp_path / "pipe")})
    with pytest.raises(SearchError, match=r"cannot be read \(more than 1000000 bytes\)"):
        read_secret_files({"PGPASSWORD_FILE": "/dev/zero"})


def test_each_file_in_the_folder_is_a_variable(tmp_path: Path) -> None:
    """A Secret that Kubernetes mounts: links to files in a hidden folder."""
    data = tmp_path / "..data"
    data.mkdir()
    for name, value in {"PGPASSWORD": "a", "AWS_ACCESS_KEY_ID": "b\n", "notes.txt": "c"}.items():
        (data / name).write_text(value)
        (tmp_path / name).symlink_to(data / name)
    environment = {"HPSEARCH_SECRETS_FOLDER": str(tmp_path)}
    read_secret_files(environment)
    assert environment == {"PGPASSWORD": "a", "AWS_ACCESS_KEY_ID": "b"}
    for folder, given, fault in (
        (tmp_path, {"PGPASSWORD": "x"}, "and PGPASSWORD are both set"),
        (tmp_path / "none", {}, r"cannot be read \(No such file or directory\); give a folder"),
    ):
        with pytest.raises(SearchError, match=f"^HPSEARCH_SECRETS_FOLDER '[^\n]*{fault}[^\n]*$"):
            read_secret_files({"HPSEARCH_SECRETS_FOLDER": str(folder), **given})


def test_secret_files_are_read_before_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "url").write_text("mysql://root:geheim@host/db\n")
    monkeypatch.setenv("HPSEARCH_STORAGE_URL_FILE", str(tmp_path / "url"))
    monkeypatch.delenv("HPSEARCH_STORAGE_URL", raising=False)
    try:
        assert run_command(["serve", "dashboard"]) == 2
    finally:
        os.environ.pop("HPSEARCH_STORAGE_URL", None)  # the process keeps the values in its environment
    assert capsys.readouterr().err.startswith(
        "hpsearch: --storage-url 'mysql://root:***@host/db' is not a Postgres URL"
    )


def test_a_secret_given_twice_is_rejected_without_printing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("geheim")
    monkeypatch.setenv("PGPASSWORD_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("PGPASSWORD", "anders")
    assert run_command(["studies"]) == 2
    said = capsys.readouterr().err
    assert said == f"hpsearch: PGPASSWORD_FILE '{tmp_path / 'secret'}' and PGPASSWORD are both set; unset one of them\n"


@pytest.mark.parametrize("option", [["--storage-url", "{}"], ["--storage-url={}"]])
def test_a_password_in_the_arguments_is_named(zygote: Zygote, option: list[str], tmp_path: Path) -> None:
    """Other users can list the arguments of all processes."""
    url, secret = "mysql://a:hunter2@127.0.0.1:9/b", "other users of this machine can read the password"
    for given, is_named in ((url, True), (url.replace(":hunter2", ""), False)):
        command = ["studies", *(part.format(given) for part in option), "--home", str(tmp_path)]
        ended = zygote.command(command)
        output, _ = ended.communicate()
        assert ended.returncode == 2, output
        assert (secret in output) is is_named
        assert "hunter2" not in output
