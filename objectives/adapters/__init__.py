"""Adapters for the trainers of other libraries in a custom loop, each needing its library."""
