"""Imports for the server that forks commands (tests.faults.zygote), so that not each command repeats them."""

from __future__ import annotations

import gc
import importlib
import io

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hpsearch.search.cli import app

for _name in (
    *(
        "hpsearch.search.tracking.study_run",
        "hpsearch.search.run.search",
        "optuna_dashboard",
        "psycopg2",
        "sqlalchemy.dialects.postgresql.psycopg2",
    ),
    *("fsspec.implementations.local", "tests.faults.puppet", "tests.faults.zygote"),
):
    importlib.import_module(_name)

# Load the command line, the fonts of plots, and the math text of powers of ten.
typer.main.get_command(app)
_figure = Figure()
FigureCanvasAgg(_figure)
_axes = _figure.add_subplot()
_axes.semilogy([1.0, 1000.0], label="a")
_axes.legend(fontsize="small")
_figure.savefig(io.BytesIO())

gc.freeze()  # a garbage collection in a child would copy every memory page
