"""Where a server's log goes: to a file descriptor, of which the server does not depend."""

from __future__ import annotations

import logging
import os


class LogHandler(logging.Handler):
    """Writes lines to a file descriptor; a line that cannot be written is lost, and counted in the next that can.

    On a full disk, or when nobody reads the pipe any more, the server goes on.
    """

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._descriptor = descriptor
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            text = self.format(record)
        except Exception as error:  # a bad format string must not fail a request
            text = f"a line of the log could not be formatted: {error!r}"
        if self._lost:
            text = f"({self._lost} lines of this log were lost)\n{text}"
        try:
            os.write(self._descriptor, f"{text}\n".encode(errors="backslashreplace"))
            self._lost = 0
        except OSError:
            self._lost += 1


def log_to(descriptor: int = 2, level: int = logging.INFO) -> LogHandler:
    """Send what dagexec and uvicorn log to a file descriptor."""
    handler = LogHandler(descriptor)
    for name, least in (("dagexec", level), ("uvicorn", max(level, logging.ERROR))):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(least)
        logger.propagate = False
    return handler
