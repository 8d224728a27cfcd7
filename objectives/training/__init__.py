"""The training loop: torch and a small session protocol, nothing of the service."""
