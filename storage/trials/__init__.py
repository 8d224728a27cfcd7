"""Trials: claims, leases, attempts and outcomes."""

LEASE = 60.0  # seconds without a renewal after which another worker may take a trial
