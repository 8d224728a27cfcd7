"""What a worker loads at its start or in its first trial, loaded at once.

Imported by the server that workers are forked from (:mod:`search.fleet.fork`), and by nothing else: it takes that
process out of the terminal, whose Ctrl-C and hang-up are for the fleet to pass on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from hpsearch.search.process import exit_on_signals

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

_fleet = os.getppid()
# This process stays when all processes of a job get a signal: it reports to the fleet how its workers end.
exit_on_signals(only_forked=True)
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
