"""What a worker forks during a trial, such as the processes of a data loader, is not told to go: the worker is.

An engine that stops a job signals each of its processes. A loader that died of it would fail the trial for good, while
its worker ends the epoch and saves.
"""

from __future__ import annotations

import functools
import signal
from multiprocessing import popen_fork, util
from typing import Any

from torch.utils.data._utils import signal_handling

from hpsearch.objectives.training.data.child import ending_with_parent


@functools.cache  # once is enough
def shield_children() -> None:
    """Let no SIGTERM or SIGINT end what this process forks from now on; it ends with this one.

    Forked processes inherit the worker's handlers, which do nothing in them; exec gives a program the defaults back.
    Torch puts a handler of its own in their place, so that is replaced. As SIGTERM is not heard, `terminate` of a
    process of `multiprocessing`, by which pools and loaders end theirs, kills.
    """
    torch_signals: Any = signal_handling  # it names no types
    handle_faults, bind = torch_signals._set_worker_signal_handlers, ending_with_parent()

    def begin_loader() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        handle_faults()
        signal.signal(signal.SIGTERM, _not_heard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    torch_signals._set_worker_signal_handlers = begin_loader
    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]  # SIGTERM is shielded
    util.register_after_fork(shield_children, lambda _: bind())


def _not_heard(*_: object) -> None:
    """Do nothing; unlike SIG_IGN, a program that is executed does not inherit it."""
