"""Storage: the study database, tracking and the embedded stack."""

if __name__ != "hpsearch.storage":
    raise ImportError(
        f"the package {__name__!r} of this folder is part of hpsearch: write `import hpsearch.storage`; "
        f"put your own package {__name__!r} next to the objective's file"
    )
