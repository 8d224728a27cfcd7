"""Where everything is kept: study storage, tracking, and the embedded stack."""

if __name__ != "hpsearch.storage":
    raise ImportError(f"the package {__name__!r} is part of hpsearch; write `import hpsearch.storage`")
