"""Finalists: the best trials of a search, retrained on new seeds before one of them wins."""

from hpsearch.search.finalists.table import FinalistRow, Finalists, read_finalists

__all__ = ["FinalistRow", "Finalists", "read_finalists"]
