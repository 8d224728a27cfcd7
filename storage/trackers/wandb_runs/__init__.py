"""Weights & Biases: one run per trial, logged by a separate process that contains the wandb library's threads."""
