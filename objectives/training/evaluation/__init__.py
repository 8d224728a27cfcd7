"""Evaluation of models: losses and metrics, computed from sums over all samples."""
