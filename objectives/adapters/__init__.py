"""Adapters for the trainers of Lightning and transformers in a custom training loop; both packages are optional."""
