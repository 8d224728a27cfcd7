"""What a run leaves to read: its directory, its report, its plots."""
