"""Trials: who runs which, by claims, leases and attempts, and how each ends."""
