"""The contents of a file of records, by process."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from composer.telemetry.report import Report


@dataclass(frozen=True, slots=True)
class Process:
    """The process that wrote a record.

    Attributes:
        host: The name of the machine.
        pid: The process id.
        rank: The number in the environment variable ``RANK``, if there is one.
        started: The start of the process (UTC, ISO 8601).
    """

    host: str
    pid: int
    rank: int | None
    started: str

    @classmethod
    def here(cls) -> Process:
        """Return this process. In a forked child that is the child."""
        rank = os.environ.get("RANK", "")
        return cls(
            host=platform.node(),
            pid=os.getpid(),
            rank=int(rank) if rank.isascii() and rank.isdigit() else None,
            started=datetime.fromtimestamp(_started(), UTC).isoformat(timespec="milliseconds"),
        )


def _started() -> float:
    """Return the start of this process in Unix seconds, to 10 ms; outside Linux, the time now."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()


@dataclass(frozen=True, slots=True)
class Recording:
    """The graphs of one process, oldest first, each with its last record.

    ``written`` says when the newest of these records was written (UTC, ISO 8601), if that is known.
    """

    process: Process
    report: Report
    written: str = ""
