"""The search service: study definition, worker loop, fleets, report, Python API and command line."""

if __name__ != "hpsearch.search":
    raise ImportError(
        f"package {__name__!r} in {__path__[0]!r} belongs to hpsearch; use `from hpsearch import Study` instead, "
        f"or put your own package {__name__!r} in the folder of your objective file"
    )
