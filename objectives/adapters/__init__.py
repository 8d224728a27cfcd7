"""Adapters for the trainers of other libraries in a custom loop; each requires its library."""
