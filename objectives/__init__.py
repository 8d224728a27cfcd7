"""Objectives and their training loop."""

if __name__ != "hpsearch.objectives":
    raise ImportError(
        f"the package {__name__!r} of this folder is part of hpsearch: write `from hpsearch import Objective`; "
        f"put your own package {__name__!r} next to the objective's file"
    )
