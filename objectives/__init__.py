"""Objectives and their training loop."""

if __name__ != "hpsearch.objectives":
    raise ImportError(
        f"package {__name__!r} in {__path__[0]!r} belongs to hpsearch; use `from hpsearch import Objective` instead, "
        f"or put your own package {__name__!r} in the folder of your objective file"
    )
