from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from optuna.study import StudyDirection

from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

_PROBE = "import subprocess, sys, hpsearch; subprocess.run([sys.executable, '-c', 'import hpsearch'], check=True)"


@dataclass
class OrdinaryUser:
    """A user other than root, with methods to run commands as this user."""

    uid: int
    gid: int
    prefix: Sequence[str]

    def own(self, path: Path) -> Path:
        """Make a folder of this user's."""
        path.mkdir(parents=True)
        os.chown(path, self.uid, self.gid)
        return path

    def can_read(self, path: Path) -> bool:
        """Return whether this user can read a file, without the capability that `python` may have."""
        switch = [f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups", "--no-new-privs"]
        command = ["setpriv", *switch, "cat", str(path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def python(self, code: str, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python code with an environment of a new login."""
        return subprocess.run(
            [*self.prefix, sys.executable, "-c", code, *map(str, arguments)],
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **env},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def ordinary_user() -> OrdinaryUser:
    """The user `nobody`, if the tests run as root."""
    if os.geteuid() != 0:
        pytest.skip("takes root to become another user")
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv (util-linux) is not installed")
    nobody = pwd.getpwnam("nobody")
    switch = [setpriv, f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    # For an interpreter in root's folder (pyenv): a capability to read all files, but not to write.
    # access(2), which initdb uses to find postgres, respects it only with this securebit.
    read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--securebits=+no_setuid_fixup"]
    for prefix in (switch, [*switch, *read]):
        user = OrdinaryUser(nobody.pw_uid, nobody.pw_gid, prefix)
        if user.python(_PROBE).returncode == 0:
            return user
    pytest.skip("the user `nobody` cannot run this interpreter")


Open = Callable[..., PostgresStorage]


@pytest.fixture
def opened(database_url: str) -> Iterator[Open]:
    """Return a function that opens a separate storage on the database, which is closed after the test."""
    storages: list[PostgresStorage] = []

    def open_one(application_name: str, *, retry_seconds: float) -> PostgresStorage:
        storages.append(open_storage(database_url, application_name=application_name, retry_seconds=retry_seconds))
        return storages[-1]

    yield open_one
    for storage in storages:
        storage.engine.dispose()


@pytest.fixture
def study_id(storage: PostgresStorage) -> int:
    return storage.create_new_study([StudyDirection.MAXIMIZE], "s")
