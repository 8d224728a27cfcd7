"""Reports of a run: its directory, its report and its plots."""
