"""Storage: the study database, tracking and the embedded stack."""

if __name__ != "hpsearch.storage":
    raise ImportError(
        f"the package {__name__!r} of this folder is part of hpsearch: write `import hpsearch.storage`; "
        f"for a package {__name__!r} of your own, put it next to the objective's file"
    )
