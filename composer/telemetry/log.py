"""The sink ``logging``: logs every attempt at level INFO with the logger ``composer``."""

from __future__ import annotations

import logging
from typing import Any

from composer.records import CompileReport
from composer.telemetry.base import Sink

log = logging.getLogger("composer")


class LoggingSink(Sink):
    """Logs every attempt. It is always on; nothing is shown until the user configures logging."""

    @classmethod
    def wanted(cls, name: str, named: frozenset[str]) -> bool:
        """Return true: this sink is always on."""
        return True

    def emit(self, record: dict[str, Any]) -> None:
        """Log a line for every attempt."""
        if log.isEnabledFor(logging.INFO):
            report = CompileReport.from_dict(record)
            for each in report.attempts:
                log.info("graph %s: %s (%.3f s)", report.label, each.sentence(), each.seconds)
