"""What a worker loads at its start or in its first trial, loaded at once.

Imported by the server that workers are forked from (:mod:`search.fleet.fork`), and by nothing else: it takes that
process out of the terminal, whose Ctrl-C and hang-up are for the fleet to pass on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

MODULES = (
    "hpsearch.search.worker.join",
    "mlflow.pytorch",
    "torch._inductor",  # by which torch answers a call for deterministic algorithms
    "torch.export._trace",  # these two by the first export of a model
    "torch.export.pt2_archive._package",
    "torchmetrics",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "yaml",
    "sklearn.datasets",  # the data of the built-in objectives, and how it is divided
    "sklearn.model_selection",
)

_fleet, _own = os.getppid(), os.getpid()


def _on_signal(number: int, _frame: object) -> None:
    """Stay, when all processes of a job are told to go: the fleet learns from this one how its workers end."""
    if os.getpid() != _own:
        os._exit(128 + number)  # a worker that has only just been forked


signal.signal(signal.SIGTERM, _on_signal)
with contextlib.suppress(OSError):
    os.setsid()
gc.disable()
for _name in MODULES:
    if os.getppid() != _fleet:  # it ended with a mistake to tell: there is nobody to load for
        os._exit(0)
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
gc.enable()
gc.freeze()  # what the collector never touches stays shared between all workers
