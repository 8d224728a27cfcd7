"""Signals of commands."""

from __future__ import annotations

import signal

from hpsearch.search.process.signals import restore_handlers, stop_on_signals


def test_a_command_that_nohup_starts_ignores_the_end_of_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with restore_handlers():
            stop_on_signals(signal.SIGHUP, signal.SIGTERM)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in {signal.SIG_IGN, signal.SIG_DFL}
    finally:
        signal.signal(signal.SIGHUP, before)
