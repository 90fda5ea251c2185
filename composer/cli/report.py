"""``composer report``: prints files of records, process by process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from composer.cli.usage import USAGE, Json, fail, fail_if_not, refuse_folder
from composer.records import printable
from composer.telemetry import html, linefile, reader
from composer.telemetry.reader import Readout
from composer.telemetry.reasons import explained
from composer.telemetry.recording import Process, Recording
from composer.telemetry.report import Report, counted


def report(
    files: Annotated[list[Path], typer.Argument(help="What COMPOSER_TELEMETRY named.")],
    last: Annotated[
        int | None, typer.Option(min=1, help="Only so many of each process's newest graphs.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write all of it as one page for a browser.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --html: overwrite what is no such page.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say which engine ran each graph of a run, from the files that its processes wrote."""
    if page is not None:
        _check_page(page, files, force, as_json)
    readout = _read(files)
    recordings = [_newest(each, last) for each in readout.recordings]
    if page is not None:
        _write(page, html.render(recordings, means=lambda reason: explained(reason).summary))
    elif as_json:
        typer.echo(json.dumps(_plain(recordings, readout), indent=2))
    else:
        typer.echo("\n".join(_lines(recordings, readout)))


def _check_page(page: Path, files: Sequence[Path], force: bool, as_json: bool) -> None:
    """Refuse, before anything is read, a page that would overwrite another kind of file."""
    if as_json:
        fail("--html writes a page and --json prints; ask for one of them", USAGE)
    refuse_folder(page)
    for file in files:
        if any(_is_same(page, each) for each in linefile.rotated(file.resolve())):
            fail(f"{str(page)!r} is one of the files to read; name another for the page", USAGE)
    with fail_if_not("read", page, USAGE):
        is_foreign = page.is_file() and not html.is_page(page)
    if is_foreign and not force:
        fail(f"{str(page)!r} is no page of composer's; --force overwrites it", USAGE)


def _is_same(page: Path, file: Path) -> bool:
    """Return True if both paths lead to the same file."""
    if page.exists() and file.exists():
        return page.samefile(file)
    return page.resolve() == file


def _read(files: list[Path]) -> Readout:
    try:
        readout = reader.read(files)
    except OSError as error:
        fail(f"{str(error.filename)!r} cannot be read: {error.strerror}", USAGE)
    if not readout.recordings:
        fail(f"no record in {', '.join(map(str, files))}; {_left_out(readout)}")
    return readout


def _write(page: Path, text: str) -> None:
    with fail_if_not("written", page):
        page.write_text(text, encoding="utf-8")
    typer.echo(f"composer: wrote {page}", err=True)


def _newest(recording: Recording, last: int | None) -> Recording:
    if last is None:
        return recording
    return replace(recording, report=Report(recording.report.graphs[-last:]))


def _plain(recordings: list[Recording], readout: Readout) -> dict[str, object]:
    processes = [{"process": asdict(r.process), **r.report.to_dict()} for r in recordings]
    faults = [asdict(fault) for fault in readout.faults]
    return {"processes": processes, "left_out": readout.left_out, "faults": faults}


def _lines(recordings: list[Recording], readout: Readout) -> Iterator[str]:
    for each in recordings:
        if len(recordings) > 1:
            yield _heading(each.process)
        if each.written:
            yield printable(f"counters as of {each.written}")
        yield f"{each.report}\n"
    if readout.left_out:
        yield _left_out(readout)


def _heading(process: Process) -> str:
    if process == reader.UNKNOWN:
        return "== a process that its lines do not name"
    rank = "" if process.rank is None else f", rank {process.rank}"
    text = f"process {process.pid} on {process.host}{rank}, started {process.started}"
    return printable(f"== {text}")


def _left_out(readout: Readout) -> str:
    if not readout.left_out:
        return "no line at all"
    first = readout.faults[0]
    place = f"{first.file}:{first.line}: {first.why}"
    return printable(f"{counted(readout.left_out, 'line')} left out, the first: {place}")
