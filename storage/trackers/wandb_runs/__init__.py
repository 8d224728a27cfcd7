"""Weights & Biases: one run per trial, logged by a separate process with the threads and hooks of the library."""
