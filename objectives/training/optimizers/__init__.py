"""Optimizers, learning-rate schedules, weight averages and precision."""
