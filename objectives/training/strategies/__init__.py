"""Strategies that distribute the training of a model over several devices."""
