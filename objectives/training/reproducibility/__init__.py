"""What it takes to repeat or resume a run: seeds, environment, checkpoint files, records."""
