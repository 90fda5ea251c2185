"""The sink ``logging``: an INFO line of the logger ``composer`` for every attempt."""

from __future__ import annotations

import logging
from typing import Any

from composer.records import CompileReport
from composer.telemetry.base import Sink

log = logging.getLogger("composer")


class LoggingSink(Sink):
    """Always on; says nothing until the user configures logging."""

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Yes."""
        return True

    def emit(self, record: dict[str, Any]) -> None:
        """A line for every attempt."""
        if log.isEnabledFor(logging.INFO):
            report = CompileReport.from_dict(record)
            for each in report.attempts:
                log.info("graph %s: %s (%.3f s)", report.label, each.sentence(), each.seconds)
