"""Checks beside a run: overfit one batch, range of learning rates, the held-out test split."""
