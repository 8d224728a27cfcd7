"""Launching: generate the job files with which Slurm, Kubernetes, Ray and systemd run workers."""
