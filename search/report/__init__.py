"""Reports: a self-contained HTML page of a study, and the text output of commands."""

from hpsearch.search.report.page import write_report

__all__ = ["write_report"]
