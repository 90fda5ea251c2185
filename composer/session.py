"""What this process remembers of its compiles: one object, replaced whole by ``reset``."""

from __future__ import annotations

import threading
from collections import deque

from composer.records import CompileReport

KEPT_REPORTS = 1000


class Session:
    """The last 1,000 reports, oldest first, and which fallbacks were warned of already.

    ``warned`` holds pairs of backend and reason.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: deque[CompileReport] = deque(maxlen=KEPT_REPORTS)
        self.warned: set[tuple[str, str]] = set()

    def keep(self, report: CompileReport) -> None:
        """Remember a report; beyond 1,000 the oldest goes."""
        with self._lock:
            self._reports.append(report)

    def reports(self) -> tuple[CompileReport, ...]:
        """The reports kept, oldest first."""
        with self._lock:
            return tuple(self._reports)


_current = Session()


def current() -> Session:
    """The session that compiles report to."""
    return _current


def reset() -> None:
    """Forget reports and warnings. Compiled functions go on working."""
    global _current
    _current = Session()
