"""The training loop. It depends on torch and a small session protocol, not on the service."""
