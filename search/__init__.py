"""The search service: study definition, worker loop, fleets, report, Python API and command line."""

if __name__ != "hpsearch.search":
    raise ImportError(
        f"the package {__name__!r} of this folder is part of hpsearch: write `from hpsearch import Study`; "
        f"put your own package {__name__!r} next to the objective's file"
    )
