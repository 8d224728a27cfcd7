"""Finalists: the best trials of a search, trained anew on fresh seeds before one of them is crowned."""

from hpsearch.search.finalists.table import FinalistRow, Finalists, read_finalists

__all__ = ["FinalistRow", "Finalists", "read_finalists"]
