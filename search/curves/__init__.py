"""Curves: what trials will end with, told from their configurations and epochs, and the sampler that asks for it."""
