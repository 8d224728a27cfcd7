"""The command line: every mistake is an error of one line, with exit code 2."""

from __future__ import annotations

import io
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from optuna.study import StudyDirection

from hpsearch.objectives.loading import load_objective
from hpsearch.search.cli import run_command
from hpsearch.search.cli.app import HELP_SECTIONS, confirm
from hpsearch.search.errors import SearchError
from hpsearch.search.process.signals import raise_interrupt
from hpsearch.search.study.enqueue import read_rows
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import LOOP_OBJECTIVE


@pytest.fixture(autouse=True)
def _nothing_is_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the loading of libraries for workers, which a rejected `run` starts in the background."""
    monkeypatch.setattr("hpsearch.search.fleet.fork_server.can_fork", lambda: False)


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """Run a command that must fail, and return its error of one line."""

    def run(*arguments: str) -> str:
        assert run_command(list(arguments)) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1, captured.err
        assert "Traceback" not in captured.err
        assert captured.err.startswith("hpsearch: ")
        return captured.err

    return run


BAD = [
    (["run", "digts"], ["'digts'", "digits"]),
    (["run", "no.such.module:Class"], ["no.such.module"]),
    (["run", "hpsearch.objectives.builtin.digits:Digit"], ["Digit", "Digits"]),
    (["run", "nowhere.py"], ["nowhere.py"]),
    (["run", "/dev/null"], ["/dev/null is not a regular file"]),
    (["run", "/dev"], ["/dev is a folder; give a file of Python code"]),
    (["run", "--spec", "/dev/zero"], ["--spec /dev/zero: unknown file type ''; use .toml"]),
    (["run", "digit.py"], ["file digit.py does not exist; did you mean 'digits'?"]),
    (["run", "x" * 300 + ".py"], ["does not exist"]),
    (["objective", "show", "x" * 300], ["unknown objective"]),
    (["objective", "show", "digits", "--set", "lr"], ["--set 'lr'", "lr=1e-3"]),
    (["run", "digits", "--trials=1e3"], ["--trials '1e3'"]),
    (["top", "s", "--every="], ["--every ''"]),
    (["top", "s", "--every", "inf"], ["--every", "86400"]),
    (["promote", "s", "--model", ""], ["--model ''", "1 to "]),
    (["objective", "show", "digits", "--set", "batch_size=99999999999999999999"], ["batch_size", "2147483647"]),
    (["train", "digits", "--run-dir", "/dev/null/x"], ["--run-dir '/dev/null/x'", "Not a directory"]),
    (["lr-range", "digits", "--run-dir", "/dev/null"], ["--run-dir '/dev/null'", "File exists"]),
    (["smoke", "digits", "--run-dir", "/dev/null"], ["--run-dir '/dev/null'", "File exists"]),
    (["smoke", "digits", "--device", "hpu"], ["device 'hpu' is not available"]),
    (["smoke", "digits", "--device", "meta"], ["device 'meta' is not available", "cpu, cuda or cuda:N"]),
    (["run", "digits", "--devices", "cuda:99"], ["--devices 'cuda:99'", "valid integer"]),
    (["up", "--home", "/dev/null"], ["--home '/dev/null' is not a folder"]),
    (["up", "--home", "s3://bucket"], ["--home 's3://bucket' is a URL; set --home to a folder"]),
    (["up", "--home", "x\r"], [r"x\r' contains a line end; use a path without one"]),
    (["objective", "show", "~nosuch/x.py"], ["file ~nosuch/x.py does not exist"]),
    (["list"], ["unknown command 'list'; did you mean 'studies'?"]),
    (["studies", "--home", "a\udcff"], ["--home", "is not valid UTF-8; use another name"]),
    (["init", "a\udcff.py"], ["is not valid UTF-8; use another name"]),
    (["show", "a\udcff"], ["is not valid UTF-8; use another name"]),
    (["run", "digits", "--sampler", "tpe", "--sampler-option", "n=!!bool x"], ["--sampler-option 'n=!!bool x'"]),
    (["train", "digits", "--set", 'lr=!!int ""'], ["--set", "not valid YAML"]),
    (["run"], ["OBJECTIVE", "--spec"]),
    (["run", "digits", "--trials", "0"], ["--trials", "0"]),
    (["run", "digits", "--trials", "many"], ["--trials", "'many'", "it must be a valid integer"]),
    (["run", "digits", "--budget-seconds", "1e308"], ["--budget-seconds", "at most 1000000000"]),
    (["run", "digits", "--sampler", "grid"], ["--sampler-option", "search_space="]),
    (
        ["run", "digits", "--sampler", "grid", "--sampler-option", "search_space={lr: [[1]]}"],
        ["lr has the invalid value [1]"],
    ),
    (["run", "digits", "--workers", "-1"], ["--workers", "-1"]),
    (["run", "digits", "--workers", "99999999999"], ["--workers", "512"]),
    (["run", "digits", "--epochs", "0"], ["epochs", "0"]),
    (["run", "digits", "--direction", "sideways"], ["direction", "'sideways'"]),
    (["run", "digits", "--name", "../../etc"], ["name", "'../../etc'"]),
    (["run", "digits", "--sampler", "tpee"], ["'tpee'", "'tpe'"]),
    (["run", "digits", "--sampler-option", "seed=1"], ["sampler.seed"]),
    (["run", "digits", "--pruner-option", "n_warmup_steps"], ["--pruner-option", "KEY=VALUE"]),
    (["run", "digits", "--pruner", "hyperband", "--pruner-option", "max_resource=auto"], ["max_resource", "'auto'"]),
    (["run", "digits", "--pruner", "wilcoxon"], ["--pruner wilcoxon", "add --folds"]),
    (["run", "digits", "--pruner", "wilcoxon", "--folds", "3"], ["p_threshold 0.1", "above 0.125", "3 folds"]),
    (
        ["run", "digits", "--pruner", "wilcoxon", "--folds", "5", "--pruner-option", "p_threshold=1.5"],
        ["pruner.p_threshold", "below 1", "1.5"],
    ),
    (["run", "digits", "--metric", "accurcy"], ["--metric 'accurcy'", "accuracy"]),
    (["run", "digits", "--metric", "loss", "--direction", "maximize"], ["direction", "'maximize'", "'minimize'"]),
    (["run", "--spec", "nowhere.toml"], ["--spec", "nowhere.toml", "No such file"]),
    (["run", "digits", "--storage-url", "sqlite:///x.db", "--tracking-uri", "http://127.0.0.1:1"], ["--storage-url"]),
    (["run", "digits", "--storage-url", "postgresql://u@127.0.0.1:1/x"], ["--tracking-uri"]),
    (["run", "digits", "--tracking-uri", "http://127.0.0.1:1"], ["--storage-url"]),
    (["sync", "s", "--tracking-uri", "http://127.0.0.1:1"], ["--tracking-uri needs --storage-url"]),
    (["run", "digits", "--checkpoint-url", "foo://bucket"], ["--checkpoint-url", "'foo://bucket'", "s3"]),
    (["run", "digits", "--checkpoint-url", "file://relative"], ["--checkpoint-url", "file:///FOLDER"]),
    (["run", "digits", "--checkpoint-url", "/dev/null/x"], ["--checkpoint-url", "cannot be written"]),
    (["worker"], ["--study"]),
    (["rnu"], ["'rnu'", "'run'"]),
    (["serve", "nothing"], ["'nothing'", "dashboard, metrics, mlflow"]),
    (["run", "digits", "--trails", "3"], ["--trails", "did you mean '--trials'"]),
    (["show", "s", "--xyz"], ["unknown option --xyz", "hpsearch show --help"]),
    (["train", "digits", "--devices", "2"], ["train uses one device", "'run OBJECTIVE --trials 1 --devices N'"]),
    (["lr-range", "digits", "--nodes", "2"], ["lr-range uses one device"]),
    (["run", "digits", "--stop-when", "1"], ["unknown option --stop-when; it is now '--min-expected-gain'"]),
    (["run", "digits", "--stall", "9"], ["unknown option --stall; it is now '--stall-factor'"]),
    (["worker", "--leave-when-idle", "9"], ["unknown option --leave-when-idle; it is now '--idle-timeout'"]),
    (["run", "digits", "--sampler", "curves"], ["unknown sampler 'curves'; it is now 'freeze_thaw'"]),
    (["open-test", "s"], ["unknown command 'open-test'; it is now 'evaluate-test'"]),
    (["train", "digits", "--set", "accumulate=2"], ["it is now 'gradient_accumulation_steps'"]),
    (["run", "digits", "--lease", "0.5"], ["--lease must be at least 1, not 0.5"]),
    (["migrate"], ["--storage-url", "HPSEARCH_OWNER_URL"]),
    (["migrate", "--bootstrap"], ["HPSEARCH_ADMIN_URL"]),
    (["serve", "mlflow"], ["MLFLOW_BACKEND_STORE_URI"]),
    (["serve", "dashboard"], ["--storage-url"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_an_error_of_one_line(
    refuse, arguments: list[str], words: list[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refuse(*arguments)
    for word in words:
        assert word in message
    assert "geheim" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("objective = 'digits'\nn_trails = 3\n", ["'n_trails'", "'n_trials'"]),
        ("objective = 'digits'\n[sampler]\nname = 'tpe'\nstartup = 3\n", ["sampler.startup"]),
        ("objective = 'digits'\nstop_when = 3\n", ["unknown setting 'stop_when'", "'min_expected_gain'"]),
        ("objective = 'digits'\nsampler = 5\n", ["sampler is 5"]),
        ("objective = \n", ["--spec", "line 1"]),
        ("n_trials = 3\nn_trials = 4\n", ["--spec", "a key appears twice (at line 2"]),
        ("[sampler]\n[sampler]\n", ["--spec", "a key appears twice (at line 2"]),
        ("version = 2\nobjective = 'digits'\n", ["version", "2"]),
    ],
)
def test_a_mistake_in_a_spec_file_is_reported(refuse, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    message = refuse("run", "--spec", str(path))
    for word in words:
        assert word in message


def test_a_former_environment_variable_is_refused(refuse, monkeypatch) -> None:
    monkeypatch.setenv("HPSEARCH_STALL", "9")
    assert "HPSEARCH_STALL=9 is no longer supported; set HPSEARCH_STALL_FACTOR instead" in refuse("run", "digits")


@pytest.mark.parametrize(("name", "text"), [("s.yaml", "- a\n- b\n"), ("s.json", "{}"), ("s.yml", "a: [1\n")])
def test_a_spec_file_of_another_kind_is_refused(refuse, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert name in refuse("run", "--spec", str(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("import os\n".encode("utf-16"), ["u.py contains a null byte; save it as a text file in UTF-8"]),
        (b"import os\0\n", ["u.py contains a null byte; save it as a text file in UTF-8"]),
        (b"from . import other\n", ["u.py:1", "give its module instead of the file, such as pkg.u:CLASS"]),
    ],
    ids=["utf-16", "nul", "relative"],
)
def test_a_file_that_cannot_be_an_objective_is_named(refuse, tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "u.py").write_bytes(content)
    message = refuse("objective", "show", str(tmp_path / "pkg" / "u.py"))
    assert [word for word in words if word not in message] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the import is tried in a forked process on Linux only")
@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "SIGSEGV"),
        ("import os\nos.kill(os.getpid(), 9)\n", "SIGKILL"),
        ("import os\nos._exit(0)\n", "exit code 0"),
        ("import os\nos._exit(143)\n", "exit code 143"),
    ],
    ids=["segfault", "kill", "exit 0", "exit 143"],
)
def test_an_objective_that_ends_the_process_during_its_import(refuse, tmp_path: Path, code: str, how: str) -> None:
    (tmp_path / "u.py").write_text(code)
    message = refuse("objective", "show", str(tmp_path / "u.py"))
    assert f"u.py' ends the process during its import ({how}); trace it with: python -X faulthandler" in message


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("s.yaml", "objective: digits\nepochs: 2\nepochs: 3\n", ["duplicate key 'epochs'", "line 3"]),
        ("s.yaml", "n_trials: &n 4\nepochs: *n\n", ["the alias '*n' is not supported", "line 2"]),
        ("s.yaml", "n_trials: !!bool maybe\n", ["a value does not match its YAML tag"]),
        ("s.yaml", "a: 2001-99-99\n", ["s.yaml: month must be in 1..12"]),
        ("s.yaml", f"a: {'[' * 5000}", ["nested too deeply"]),
        ("s.toml", f"a = {'[' * 5000}", ["nested too deeply"]),
        ("s.toml", "\ufeffobjective = 'digits'\nepochs = 0\n", ["s.toml: epochs must be at least 1, not 0"]),
        ("s.toml", "objective = 'digits'\nepoch = 1\n", ["s.toml: unknown setting 'epoch'", "epochs"]),
        ("s.yaml", "a: 1\n" * 300_000, ["s.yaml has 1500000 bytes", "at most 1000000 bytes"]),
    ],
    ids=["duplicate", "alias", "tag", "date", "nested yaml", "nested toml", "byte order mark", "unknown", "huge"],
)
def test_a_fault_in_a_spec_file_names_the_file(refuse, tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    (tmp_path / name).write_text(text)
    message = refuse("run", "--spec", str(tmp_path / name))
    assert message.startswith(f"hpsearch: --spec {tmp_path / name}")
    assert [word for word in words if word not in message] == []


def test_a_pipe_is_no_file_of_settings(refuse, tmp_path: Path) -> None:
    for name in ("s.yaml", "rows.csv"):
        os.mkfifo(tmp_path / name)
    assert "s.yaml is not a regular file" in refuse("run", "--spec", str(tmp_path / "s.yaml"))
    (tmp_path / "u.py").write_text(LOOP_OBJECTIVE)
    objective = load_objective(str(tmp_path / "u.py"))
    with pytest.raises(SearchError, match="is not a regular file"):
        read_rows(tmp_path / "rows.csv", objective)


def test_an_error_in_the_users_file_names_its_file_and_line(refuse, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import math\n\nx = math.nonsense\n")
    message = refuse("run", str(path))
    assert "mine.py:3" in message
    assert "nonsense" in message


def _answer(listener: socket.socket, answer: bytes) -> None:
    """Answer each connection of the listener, until it is closed."""
    with suppress(OSError):
        while True:
            with listener.accept()[0] as client:
                client.recv(4096)
                client.sendall(answer)


@pytest.fixture
def other_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the address of a server that gives the answer of the test's parameter to every request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer, args=(listener, request.param), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("other_server", [b"SSH-2.0-OpenSSH_9.0\r\n"], indirect=True)
def test_a_tracking_server_with_another_protocol_is_rejected(refuse, database_url: str, other_server: str) -> None:
    message = refuse("run", "digits", "--storage-url", database_url, "--tracking-uri", f"http://{other_server}")
    assert f"--tracking-uri http://{other_server} is not an MLflow server" in message


_REJECTION = b"SFATAL\0C28P01\0Mpassword authentication failed f\xfcr u\0\0"  # in ISO 8859-1


@pytest.mark.parametrize("other_server", [b"E" + (len(_REJECTION) + 4).to_bytes(4, "big") + _REJECTION], indirect=True)
def test_a_rejection_by_postgres_in_another_encoding_is_an_error_of_one_line(refuse, other_server: str) -> None:
    message = refuse("studies", "--storage-url", f"postgresql://u:p@{other_server}/x?sslmode=disable")
    assert "rejected the password of user 'u'; correct the password" in message


def services(url: str) -> list[str]:
    return ["--storage-url", url, "--tracking-uri", "http://127.0.0.1:1"]


def test_an_unreachable_database_may_come_back(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("hpsearch.storage.database.connect.STARTUP_RETRY_SECONDS", 0.0)
    for arguments in (["run", "digits", "--tracking-uri", "http://127.0.0.1:1"], ["worker", "--study", "s"]):
        assert run_command([*arguments, "--storage-url", "postgresql://u:geheim@127.0.0.1:1/x"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert "nothing listens at 127.0.0.1:1" in said
        assert "geheim" not in said


def test_a_wrong_password_is_not_printed(refuse, database_url: str) -> None:
    wrong = re.sub(r":[^:@/]+@", ":geheim@", database_url)
    message = refuse("run", "digits", *services(wrong))
    assert "password" in message
    assert "geheim" not in message


def test_a_database_without_tables_is_an_error_with_a_remedy(refuse, empty_database_url: str) -> None:
    assert "hpsearch migrate" in refuse("run", "digits", *services(empty_database_url))


@pytest.mark.parametrize(
    ("objective", "metric", "fits"),
    [("digits", "auroc", "accuracy, macro_f1, loss"), ("breast_cancer", "accuracy", "auroc, average_precision, loss")],
)
def test_an_incompatible_metric_is_an_error_with_the_compatible_ones(
    refuse, database_url: str, objective, metric, fits
) -> None:
    message = refuse("run", objective, "--metric", metric, *services(database_url))
    assert f"--metric '{metric}' is incompatible with" in message
    assert f"compatible metrics: {fits}; or" in message


def test_an_unreachable_tracking_server_is_reported(capsys: pytest.CaptureFixture[str], database_url: str) -> None:
    assert run_command(["run", "digits", "--tracking-required", *services(database_url)]) == 1
    assert "--tracking-uri http://127.0.0.1:1: no MLflow server answers" in capsys.readouterr().err


@pytest.mark.parametrize("uri", ["file:///tmp/runs", "http://[", "http://127.0.0.1:99999"])
def test_a_server_that_is_not_mlflow_is_reported(refuse, database_url: str, uri: str) -> None:
    message = refuse("run", "digits", "--storage-url", database_url, "--tracking-uri", uri)
    assert f"--tracking-uri {uri} must be the http(s):// address" in message


def test_a_name_that_is_not_utf8_is_refused(refuse, database_url: str) -> None:
    assert "'\\udcff' is not valid UTF-8; use another name" in refuse("show", "\udcff", "--storage-url", database_url)


@pytest.mark.parametrize(
    "options", [["--tensorboard"], ["--profile", "2"], ["--test"], ["--device", "hpu"]], ids=lambda options: options[0]
)
def test_a_rejected_training_leaves_no_run_directory(refuse, tmp_path: Path, monkeypatch, options: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP_OBJECTIVE)
    assert (options[-1] if options[0] == "--device" else options[0]) in refuse("train", "loop.py", *options)
    assert [path.name for path in tmp_path.iterdir()] == ["loop.py"]


def test_an_invalid_variable_of_mlflow_leaves_no_study(
    refuse, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "soon")
    message = refuse("run", "digits", "--name", "named", *services(database_url))
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT 'soon' is invalid; correct or unset the variable" in message
    assert run_command(["studies", "--storage-url", database_url]) == 0
    assert "named" not in capsys.readouterr().out


def test_an_unknown_study_is_an_error(refuse, database_url: str) -> None:
    for verb in (["show"], ["report"], ["delete", "--yes"], ["worker", "--study"]):
        assert "no study 'nope'" in refuse(*verb, "nope", "--storage-url", database_url)


def test_a_port_in_use_is_reported(refuse, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", database_url)
    monkeypatch.setenv("HPSEARCH_WEB_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert f"--port {port}" in refuse("serve", "mlflow", "--port", port)
        assert f"--port {port}" in refuse("serve", "dashboard", "--port", port, "--storage-url", database_url)


def test_help_has_sections_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections = [line for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert sections == ["Options:", *(f"{name}:" for name in HELP_SECTIONS)]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith("...")] == ["Usage: hpsearch [OPTIONS] COMMAND [ARGS]..."], "cut"
    assert run_command(["run", "--help"]) == 0
    sections = re.findall(r"^[A-Z]\w+(?=:$)", capsys.readouterr().out, re.MULTILINE)
    assert sections == ["Arguments", "Study", "Options", "Workers", "Addresses"]


def test_init_does_not_overwrite_an_objective(refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    assert run_command(["init", str(path)]) == 0
    capsys.readouterr()
    assert "exists" in refuse("init", str(path))


def test_init_prints_a_command_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "--", "-x.py"]) == 0
    assert capsys.readouterr().out.endswith(" run ./-x.py\n")


def test_another_metric_has_its_own_direction() -> None:
    from hpsearch import load_objective
    from hpsearch.search.spec.resolve import resolve_spec

    digits = load_objective("digits")
    assert resolve_spec({"objective": "digits"}, digits).direction == "maximize"
    by_loss = resolve_spec({"objective": "digits", "metric": "loss"}, digits)
    assert (by_loss.metric, by_loss.direction) == ("loss", "minimize")


def test_a_prompt_without_a_terminal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for without_answer in ("", "\n", "maybe\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(without_answer))
        with pytest.raises(SearchError, match="add --yes"):
            confirm("remove it?")
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(SearchError, match="add --yes"):
            confirm("remove it?")
    for answer, is_yes in {"y\n": True, " Yes\n": True, "n": False}.items():
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert confirm("remove it?") is is_yes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--spec {file}: n_trials must be at least 1, not 0"),
        (("--trials", "-1"), "--trials must be at least 1, not -1"),
    ],
)
def test_an_error_names_a_setting_as_in_the_command(
    refuse: Any, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("objective: digits\nn_trials: 0\n")
    assert refuse("run", "--spec", str(file), *flags) == f"hpsearch: {said.format(file=file)}\n"


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hpsearch.search.api.studies.list_studies", lambda **_: raise_interrupt())
    assert run_command(["studies"]) == 130
    assert capsys.readouterr().err == "hpsearch: interrupted\n"


def test_tab_completes_the_names_of_studies(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = open_storage(database_url, application_name="test")
    for name in ("wine", "wine-2", "digits", "wi\x1bne", "w\\$(id)", "w;id", "w`id`", "wine\n"):
        storage.create_new_study([StudyDirection.MAXIMIZE], name)
    monkeypatch.setenv("_HPSEARCH_COMPLETE", "complete_bash")
    for given, expected in ((database_url, ["wine", "wine-2"]), ("postgresql://u@127.0.0.1:1/none", [])):
        monkeypatch.setenv("HPSEARCH_STORAGE_URL", given)
        for words in ("hpsearch show w", "hpsearch worker --study w"):
            monkeypatch.setenv("COMP_WORDS", words)
            monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
            with pytest.raises(SystemExit):
                run_command([])
            captured = capsys.readouterr()
            assert (captured.out.split(), captured.err) == (expected, "")
