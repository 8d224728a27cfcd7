"""Storage: the study database, tracking and the embedded stack."""

if __name__ != "hpsearch.storage":
    raise ImportError(
        f"package {__name__!r} in {__path__[0]!r} belongs to hpsearch; use `import hpsearch.storage` instead, "
        f"or put your own package {__name__!r} in the folder of your objective file"
    )
