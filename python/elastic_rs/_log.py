"""Log records of ``elastic-run``, whose process imports ``logging`` with the first record that somebody may see.

That import takes as long as all others of an agent together, and most agents have nothing to say. The core's records
wait for it in the same way (``crates/py/src/logging.rs``).
"""

from __future__ import annotations

import os
import sys

from elastic_rs import _elastic_rs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

__all__ = ["Log", "ready", "show_logs_if_asked"]

_pending = False
"""The destination of records was asked for, and is not set up yet."""


def show_logs_if_asked() -> None:
    """Do what ``_logging.show_logs_if_asked`` does: now if something uses ``logging``, else with the first record."""
    global _pending  # noqa: PLW0603 - one destination for the process
    _pending = True
    if "logging" in sys.modules or os.environ.get("ELASTIC_RS_LOG"):
        ready()
    else:
        _elastic_rs.expect_log_records()


def ready() -> None:
    """Set up the destination of records, if it was asked for. The core's thread calls it before its first record."""
    global _pending  # noqa: PLW0603
    if _pending:
        from elastic_rs import _logging

        _logging.show_logs_if_asked()  # two threads may both do it
        _pending = False


class Log:
    """The logger of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, text: str, *values: object) -> None:
        """Log at INFO. A process that has not imported ``logging`` shows nobody such records."""
        if "logging" in sys.modules:
            self._logger().info(text, *values, stacklevel=2)

    def warning(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Log at WARNING."""
        self._logger().warning(text, *values, exc_info=exc_info, stacklevel=2)

    def debug(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Log at DEBUG, as :meth:`info`."""
        if "logging" in sys.modules:
            self._logger().debug(text, *values, exc_info=exc_info, stacklevel=2)

    def _logger(self) -> logging.Logger:
        import logging

        ready()
        return logging.getLogger(self._name)
