"""What a file of records holds, process by process."""

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
    """Who wrote a record: one process, one ``started`` (UTC, ISO 8601), its rank if it has one."""

    host: str
    pid: int
    rank: int | None
    started: str

    @classmethod
    def here(cls) -> Process:
        """This process, as it is now: a forked child is another."""
        rank = os.environ.get("RANK", "")
        return cls(
            host=platform.node(),
            pid=os.getpid(),
            rank=int(rank) if rank.isascii() and rank.isdigit() else None,
            started=datetime.fromtimestamp(_started(), UTC).isoformat(timespec="milliseconds"),
        )


def _started() -> float:
    """When this process started, to 10 ms; now, where the system is not Linux. Unix seconds."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()


@dataclass(frozen=True, slots=True)
class Recording:
    """The graphs of one process, oldest first, each as its last record has it."""

    process: Process
    report: Report
