"""Weights & Biases: a run a trial, by a process of its own, whose threads, hooks and waits are no worker's."""
