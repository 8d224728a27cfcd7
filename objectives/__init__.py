"""Objectives and their training loop."""

if __name__ != "hpsearch.objectives":
    raise ImportError(f"the package {__name__!r} is part of hpsearch; write `from hpsearch import Objective`")
