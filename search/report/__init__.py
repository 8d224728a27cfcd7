"""Reports: a self-contained HTML page of a study, and the text output of commands."""

from hpsearch.search.report.page import update_report, write_report

__all__ = ["update_report", "write_report"]
