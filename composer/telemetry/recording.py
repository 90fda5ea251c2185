"""What a file of records holds, process by process."""

from __future__ import annotations

from dataclasses import dataclass

from composer.telemetry.report import Report


@dataclass(frozen=True, slots=True)
class Process:
    """Who wrote a record: one process, one ``started`` (UTC, ISO 8601), its rank if it has one."""

    host: str
    pid: int
    rank: int | None
    started: str


@dataclass(frozen=True, slots=True)
class Recording:
    """The graphs of one process, oldest first, each as its last record has it."""

    process: Process
    report: Report
