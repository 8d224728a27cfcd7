"""The wrapper ./hpsearch with the real uv and pip, in small clones that install quickly."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.wrapper.clone import PYTHON, REPOSITORY, Clone, change, make_wheel, pin, there

PUBLIC_PYTHON = shutil.which("python3.11", path="/usr/local/bin:/usr/bin")
UNPRIVILEGED = 65534  # the user `nobody`
OTHER_USER: dict[str, Any] = {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": [], "cwd": "/"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wrapper"),
]  # one pytest process runs the tests of the shared clone


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """Return a clone that was called once, for tests that do not change it."""
    folder = tmp_path_factory.mktemp("installed")
    clone = Clone(folder / "a clone")
    first = clone.run("show", "a b", "--flag", cwd=folder)
    assert first.returncode == 0, first.stderr
    assert "installed in" in first.stderr
    seen = json.loads(first.stdout)
    assert seen["argv"] == ["show", "a b", "--flag"]
    assert seen["cwd"] == str(folder)
    assert seen["prefix"] == str(clone.venv)
    return clone


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600  # an installation can be slow
    while not condition():
        assert time.monotonic() < deadline, "this never came about"
        time.sleep(0.02)


def test_the_first_call_installs_and_later_calls_only_run(installed: Clone) -> None:
    second = installed.run("exit", "5")
    assert (second.returncode, second.stderr, installed.builds()) == (5, "", 1)


@pytest.mark.parametrize(
    "program", [REPOSITORY / "hpsearch", Path(sys.prefix, "bin", "hpsearch")], ids=["wrapper", "program"]
)
def test_ctrl_c_before_the_command_has_loaded_is_one_line(program: Path) -> None:
    """The wrapper blocks the signal, also for the program that replaces it, until it can be handled."""

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)  # remains pending

    done = subprocess.run([program, "--version"], preexec_fn=interrupt, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hpsearch: interrupted\n")


def test_a_full_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [REPOSITORY / "hpsearch", "requirements"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    line = "hpsearch: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_the_wrapper_works_through_a_symlink(installed: Clone, tmp_path: Path) -> None:
    link = tmp_path / "bin" / "hps"
    link.parent.mkdir()
    link.symlink_to(installed.root / "hpsearch")
    done = subprocess.run([PYTHON, link, "x"], env=installed.environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["prefix"] == str(installed.venv)


def test_signals_reach_the_command(installed: Clone) -> None:
    process = installed.start("wait")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["pid"] == process.pid
    process.terminate()
    process.communicate()
    assert process.returncode == 7


@pytest.mark.soak  # another whole installation
def test_extras_are_installed_for_their_commands_and_a_moved_clone_reinstalls(clone: Clone, tmp_path: Path) -> None:
    (clone.root / "test_one.py").write_text("")
    tested = clone.run("test", "-q")
    assert "No module named pytest" in tested.stderr  # the tiny clone has none: pytest was what it came to
    assert (clone.venv / "hpsearch.stamp").read_text().splitlines()[-1] == "test"
    assert clone.run("lint").returncode == 1
    assert clone.run("test").stderr.count("installing") == 0
    assert (clone.venv / "hpsearch.stamp").read_text().splitlines()[-1] == "lint test"
    assert clone.run("lint", "--fix").returncode == 2

    clone.root = clone.root.rename(tmp_path / "elsewhere")
    moved = clone.run("x")
    assert "installing again" in moved.stderr
    assert json.loads(moved.stdout)["prefix"] == str(tmp_path / "elsewhere" / ".venv")


@pytest.mark.soak
def test_two_concurrent_first_calls_install_once(clone: Clone) -> None:
    (clone.root / "hold").touch()
    calls = [clone.start("x") for _ in range(2)]
    until(lambda: clone.builds() == 1)
    (clone.root / "hold").unlink()
    outputs = [call.communicate() for call in calls]
    assert [call.returncode for call in calls] == [0, 0], outputs
    assert clone.builds() == 1
    assert sum("installed in" in stderr for _, stderr in outputs) == 1


@pytest.mark.soak
def test_a_killed_installation_is_detected_and_repeated(clone: Clone) -> None:
    (clone.root / "hold").touch()
    killed = clone.start("x")
    until(lambda: clone.builds() == 1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    torn = clone.site_packages() / "half_a_package.py"
    torn.touch()
    after = clone.start("x")  # uv of the killed call still runs and holds the lock
    assert after.stderr is not None
    assert "waiting for another" in after.stderr.readline()
    (clone.root / "hold").unlink()
    _, stderr = after.communicate()
    assert after.returncode == 0, stderr
    assert "installing again" in stderr
    assert not torn.exists()


@pytest.mark.soak
def test_a_stopped_installation_ends_its_installer(clone: Clone) -> None:
    (clone.root / "hold").touch()
    for builds, number in enumerate((signal.SIGINT, signal.SIGTERM), start=1):
        call = clone.start("x")
        until(lambda: clone.builds() == builds)  # noqa: B023 called at once
        call.send_signal(number)
        _, stderr = call.communicate()
        assert call.returncode == 128 + number
        assert "Traceback" not in stderr
        until(clone.lock_is_free)  # although the build is still held: no process waits for it any more
    (clone.root / "hold").unlink()
    assert clone.run("x").returncode == 0


@pytest.mark.parametrize("content", ["", "torch\n", "torch==2.12.0\n"])
def test_constraints_without_the_torch_pin_are_rejected(clone: Clone, content: str) -> None:
    (clone.root / "constraints-torch.txt").write_text(content)
    refused = clone.run("x")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "does not pin torch==2.13.0" in refused.stderr
    assert not clone.venv.exists()


def test_tab_completion_installs_nothing(clone: Clone) -> None:
    clone.environment["_HPSEARCH_COMPLETE"] = "complete_bash"
    done = clone.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not clone.venv.exists()


def test_a_venv_of_the_user_is_not_changed(clone: Clone) -> None:
    clone.venv.mkdir()
    (clone.venv / "precious.txt").touch()
    refused = clone.run("x")
    assert refused.returncode == 2
    assert "was not created by ./hpsearch" in refused.stderr
    assert (clone.venv / "precious.txt").exists()


@pytest.mark.soak
def test_a_failed_installation_prints_its_reason_and_is_repeated(clone: Clone) -> None:
    clone.environment["PIP_NO_INDEX"] = "1"
    clone.require(make_wheel(clone.root.parent, "hpsearch_no_such_package"))
    failed = clone.run("x")
    assert failed.returncode == 1
    assert "hpsearch-no-such-package" in failed.stderr.splitlines()[-1] + failed.stderr
    assert "Traceback" not in failed.stderr
    clone.require()
    assert clone.run("x").returncode == 0


@pytest.mark.soak  # another whole installation
def test_uv_uses_the_pip_configuration_and_reinstalls_after_a_change(clone: Clone, tmp_path: Path) -> None:
    """Configure pip by the environment, then by a file, then by an index. Each of them has a package of its own."""
    plain = dict(clone.environment)

    def install(package: str, folder: Path, **configured: str) -> None:
        clone.require(make_wheel(folder, package))
        clone.environment = plain | configured
        done = clone.run("x")
        assert done.returncode == 0, done.stderr
        assert "installed in" in done.stderr
        assert "with pip" not in done.stderr
        assert list(clone.site_packages().glob(f"__pycache__/{package}.*.pyc")), "not compiled"
        assert clone.run("x").stderr == ""

    install("first", tmp_path / "wheels", PIP_NO_INDEX="true", PIP_FIND_LINKS=str(tmp_path / "wheels"))

    change(clone.root / "constraints.txt")
    folder = tmp_path / "in-a-file"
    (tmp_path / "pip.conf").write_text(f"[global]\nfind-links =\n    {folder}\n[install]\nno-index = true\n")
    install("second", folder, PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))

    change(clone.root / "pyproject.toml")
    page, wheel = tmp_path / "simple" / "third" / "index.html", tmp_path / "some wheels" / "third-1.0-py3-none-any.whl"
    page.parent.mkdir(parents=True)
    page.write_text(f'<!DOCTYPE html><html><body><a href="{wheel.as_uri()}">{wheel.name}</a></body></html>')
    index = (tmp_path / "simple").as_uri()
    install("third", wheel.parent, PIP_INDEX_URL=index, PIP_EXTRA_INDEX_URL=index)
    assert clone.builds() == 3


@pytest.mark.soak  # another whole installation
def test_pip_installs_if_uv_is_unavailable(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "tools" / "uv").unlink()
    deep = make_wheel(tmp_path / "wheels", "deep")
    clone.require(make_wheel(tmp_path / "wheels", "onlyhere", more="Requires-Dist: deep\n"))
    clone.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    refused = clone.run("x")
    assert refused.returncode == 2
    assert (
        "constraints.txt has no hash of deep==1.0: check the index, or run .ci/constraints"
        in refused.stderr.splitlines()[-1]
    )
    change(clone.root / "constraints.txt", pin(deep))
    done = clone.run("x")
    assert done.returncode == 0, done.stderr
    assert "installing with pip" in done.stderr
    assert {"onlyhere-1.0", "deep-1.0"} <= there(clone)
    assert list(clone.site_packages().glob("__pycache__/onlyhere.*.pyc")), "not compiled"
    make_wheel(tmp_path / "wheels", "backward", "1.0", "Requires-Dist: onlyhere>1\n")
    (tmp_path / "pip.py").write_text("import pathlib; pathlib.Path(__file__).with_name('imported').touch()")
    refused = clone.run("add", "backward", cwd=tmp_path)
    assert not (tmp_path / "imported").exists(), "a file of the working folder"
    assert refused.returncode == 2
    assert "cannot add backward: Cannot install backward==1.0 because these package" in refused.stderr.splitlines()[-1]
    assert "keep their versions" in refused.stderr.splitlines()[-1]


@pytest.fixture
def shop(clone: Clone, tmp_path: Path) -> Clone:
    """Return a clone whose only index is a folder of wheels: torch, which it requires, and packages to add."""
    folder = tmp_path / "wheels"
    torch = [make_wheel(folder, "torch", version) for version in ("2.12.0", "2.13.0")]
    make_wheel(folder, "plain")
    make_wheel(folder, "plain", "2.0")
    make_wheel(folder, "rich_one", "1.0", "Provides-Extra: all\nRequires-Dist: deeper; extra == 'all'\n")
    make_wheel(folder, "deeper")
    make_wheel(folder, "backward", "1.0", "Requires-Dist: torch<2.13\n")
    clone.require(torch[1])
    clone.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return clone


@pytest.mark.soak
def test_added_packages_are_recorded_and_installed_again(shop: Clone, tmp_path: Path) -> None:
    nothing = shop.run("add")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "no packages were added" in nothing.stderr
    assert not shop.venv.exists(), "to list is not to install"

    added = shop.run("add", "plain<2", "rich-one[all]")  # the very first call also installs the clone
    assert added.returncode == 0, added.stderr
    assert "added plain<2, rich-one[all] in" in added.stderr
    assert there(shop) == {"tiny-1.0", "torch-2.13.0", "plain-1.0", "rich_one-1.0", "deeper-1.0"}
    assert list(shop.site_packages().glob("__pycache__/plain.*.pyc")), "not compiled"
    assert shop.run("x").stderr == ""
    assert shop.run("add", "Plain>=2").returncode == 0  # replaces the earlier requirement
    assert shop.run("add").stdout.split() == ["rich-one[all]", "Plain>=2"]
    assert "plain-2.0" in there(shop)
    assert shop.builds() == 1, "the clone itself is left as it is"

    (tmp_path / "wheels" / "plain-2.0-py3-none-any.whl").unlink()
    shop.root = shop.root.rename(tmp_path / "elsewhere")
    shop.venv = shop.root / ".venv"
    moved = shop.run("x")
    assert moved.returncode == 0, moved.stderr
    assert "the added package Plain>=2 cannot be installed and was dropped: " in moved.stderr
    assert there(shop) == {"tiny-1.0", "torch-2.13.0", "rich_one-1.0", "deeper-1.0"}
    assert shop.run("add").stdout.split() == ["rich-one[all]"]


SECRET_URLS = ("HTTPS://user:hunter2@host/a.whl", "git+http://hunter2@host/a.git", "git+ssh://git:hunter2@host/a.git")


@pytest.mark.soak  # another whole installation
def test_a_package_that_cannot_be_added_is_an_error_and_changes_nothing(shop: Clone) -> None:
    assert shop.run("x").returncode == 0
    before = there(shop), (shop.venv / "hpsearch.stamp").read_text()
    for package, why, remedy in (
        ("hpsearch-no-such-package", "was not found", "check the package name"),
        ("torch==2.12.0", "torch==2.13.0", "keep their versions"),
        ("backward", "depend on torch<2.13", "keep their versions"),
        ("-r", "an option", "give package names"),
        ("./plain", "not the name of a package", "give package names"),
        ("", "not the name of a package", "give package names"),
        *((f"secret @ {url}", "could read the login", "into ~/.netrc") for url in SECRET_URLS),
    ):
        refused = shop.run("add", "deeper", package)
        lines = [
            line for line in refused.stderr.splitlines() if not re.search(r"\[ *\d+ s\]", line)
        ]  # lines of progress
        assert (refused.returncode, len(lines), refused.stdout) == (2, 1, ""), (package, refused.stderr)
        named = package.partition(" @ ")[0]
        assert all(part in lines[0] for part in ("error: cannot add", named, why, remedy)), lines
        assert "hunter2" not in lines[0]
        assert (there(shop), (shop.venv / "hpsearch.stamp").read_text()) == before
    assert shop.run("add").stdout == ""
    assert shop.run("add", "--help").stdout.startswith("usage: ./hpsearch add [PACKAGE...]")


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Clone]:
    """Return a clone of root for calls of another user, outside of pytest's folders, which other users cannot enter."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    if not PUBLIC_PYTHON:
        pytest.skip("no Python 3.11 that every user may run")
    with tempfile.TemporaryDirectory(prefix="hpsearch wrapper ") as folder:
        Path(folder).chmod(0o755)
        clone = Clone(Path(folder) / "clone", PUBLIC_PYTHON)
        clone.environment["HOME"] = str(tmp_path)
        yield clone


def test_a_clone_of_another_user_is_rejected_in_one_line(foreign: Clone) -> None:
    refused = foreign.run("x", **OTHER_USER)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"cannot install into {foreign.venv}" in refused.stderr


def test_a_python_without_access_for_others_is_an_error_of_one_line(foreign: Clone, tmp_path: Path) -> None:
    (foreign.venv / "bin").mkdir(parents=True)
    (foreign.venv / "bin" / "python").symlink_to(tmp_path / "python3")  # as for the Python of root's pyenv
    refused = foreign.run("x", **OTHER_USER)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "is not accessible to this user; run ./hpsearch as the owner of the clone" in refused.stderr


@pytest.mark.soak
def test_an_unprivileged_user_installs_without_a_home(foreign: Clone) -> None:
    for path in [foreign.root, *foreign.root.rglob("*")]:
        os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
    done = foreign.run("x", **OTHER_USER)
    assert done.returncode == 0, done.stderr
    assert "with pip" not in done.stderr
    assert foreign.run("x").stderr == ""  # all users can run its installation


def test_an_old_python_can_read_the_wrapper() -> None:
    ast.parse((REPOSITORY / "hpsearch").read_text(), feature_version=(3, 6))
