"""Checks outside of a run: smoke test, learning-rate range test, evaluation on the held-out test split."""
