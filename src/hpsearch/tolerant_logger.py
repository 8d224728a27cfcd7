"""Logger that suppresses errors of filters and handlers."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any


class TolerantLogger(logging.Logger):
    """Logger that suppresses errors of filters, handlers and the record factory, all of which an objective can set."""

    def handle(self, record: logging.LogRecord) -> None:
        """Pass the record to the handlers."""
        with suppress(Exception):
            super().handle(record)

    def makeRecord(self, *arguments: Any, **options: Any) -> logging.LogRecord:  # noqa: N802 a name of logging
        """Return a record of the factory that is set, or of the default one if this raises an error."""
        try:
            return super().makeRecord(*arguments, **options)
        except Exception:
            name, level, file, line, message, values, exc_info, *_ = arguments
            return logging.LogRecord(name, level, file, line, message, values, exc_info)
