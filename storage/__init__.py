"""Where everything is kept: study storage, tracking, and the embedded stack."""
