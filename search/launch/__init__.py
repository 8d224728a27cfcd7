"""Launching: what an engine (Slurm, Kubernetes, Ray, systemd) is given to run workers; nothing is started here."""
