"""Trials: who runs which, by claims, leases and attempts, and how each ends."""

LEASE = 60.0  # seconds without a heartbeat after which others take a worker's trial over
