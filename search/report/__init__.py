"""The report of a study: one HTML page that needs nothing beside itself."""

from search.report.page import write_report

__all__ = ["write_report"]
