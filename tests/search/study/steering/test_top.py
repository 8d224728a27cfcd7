"""The live view `top` on a terminal."""

from __future__ import annotations

import os
import pty
import threading

import optuna
import pytest

from hpsearch.search.cli import main


def test_the_view_ends_when_its_terminal_is_closed(
    study: optuna.Study, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = pty.openpty()

    def close_after_first_view() -> None:
        shown = b""
        while b"0/3 trials" not in shown:
            shown += os.read(controller, 10_000)
        os.close(controller)

    reader = threading.Thread(target=close_after_first_view)
    reader.start()
    with os.fdopen(os.dup(terminal), "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(SystemExit) as ended:
            main(["top", "s", "--every", "0.2", "--storage-url", database_url])
    assert ended.value.code == 0
    reader.join()
    os.close(terminal)
