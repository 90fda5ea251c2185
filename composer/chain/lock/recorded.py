"""Who served the graphs of programs that wrote their records to files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer.chain.lock.observed import Served, served_by
from composer.errors import RecordError
from composer.policy import switches
from composer.records import CompileReport
from composer.telemetry import reader
from composer.telemetry.report import counted

_UNDECIDED = "is left out: its record was written before the selection in the background had ended"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What files of records say for a lock.

    Attributes:
        served: The graphs of all processes, each once.
        left_out: What the files hold besides, one sentence each.
    """

    served: list[Served]
    left_out: list[str]


def recorded(files: Sequence[Path]) -> Recorded:
    """Return who served the graphs of the programs that wrote files of records.

    Args:
        files: Files that the sink ``jsonl`` wrote (``COMPOSER_TELEMETRY``).

    Raises:
        OSError: a file cannot be read.
        RecordError: a record cannot stand in a lock; the error says which and why.
    """
    readout = reader.read(files)
    reports = [each for recording in readout.recordings for each in recording.report.graphs]
    versions = sorted({pair for each in reports for pair in _versions(each)})
    for (name, version), (following, other) in itertools.pairwise(versions):
        if name == following:
            both = f"{version or 'none'} and {other}"
            raise RecordError(f"the records are of several versions of {name}: {both}")
    decided = []
    left_out = []
    for report in reports:
        if _is_decided(report):
            decided.append(report)
        else:
            left_out.append(f"{_name(report)} {_UNDECIDED}")
    if readout.left_out:
        left_out.append(f"{counted(readout.left_out, 'line')} without a valid record left out")
    return Recorded(served_by(decided), left_out)


def _name(report: CompileReport) -> str:
    return f"graph {report.label} of {report.model}"


def _versions(report: CompileReport) -> Iterator[tuple[str, str]]:
    """Yield the name and the version of each package in a record.

    Raises:
        RecordError: the record cannot stand in a lock.
    """
    if report.lock is None:
        why = "has no key 'lock' in its record: an older composer or another sink wrote it"
        raise RecordError(f"{_name(report)} {why}")
    switch = next(filter(switches.CHOOSING.__contains__, report.policy), "")
    if switch:
        why = f"was compiled under {switch}, which would stand in the lock in place of the policy"
        raise RecordError(f"{_name(report)} {why}")
    for packages in report.lock.versions.values():
        yield from packages.items()


def _is_decided(report: CompileReport) -> bool:
    """Return False if a selection in the background had not ended when the record was written."""
    said = (each.timing for each in report.attempts if isinstance(each.timing, str))
    return all(each.startswith("no: ") for each in said)
