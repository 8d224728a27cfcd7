"""Reports: one HTML page of a study that needs nothing beside itself, and the lines that verbs print."""

from hpsearch.search.report.page import write_report

__all__ = ["write_report"]
