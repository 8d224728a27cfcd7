"""Objectives and their training loop."""

if __name__ != "hpsearch.objectives":
    raise ImportError(
        f"the package {__name__!r} of this folder is part of hpsearch: write `from hpsearch import Objective`; "
        f"for a package {__name__!r} of your own, put it next to the objective's file"
    )
