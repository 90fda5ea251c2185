"""Files of records, read back; and the command that prints them."""

from __future__ import annotations

import html
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from common import compiled, last
from engines import honest
from typer.testing import CliRunner

from composer.cli import app
from composer.records import CompileReport, Reason
from composer.telemetry import reader
from composer.telemetry.reasons import explained
from composer.telemetry.recording import Process
from composer.telemetry.report import Report

runner = CliRunner()


def process(pid: int, started: str, rank: int | None = None) -> dict[str, Any]:
    return {"host": "here", "pid": pid, "rank": rank, "started": started}


@pytest.fixture
def record() -> dict[str, Any]:
    compiled(torch.sin, honest)(torch.ones(2))
    return last().to_dict()


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def test_process_is_this_one() -> None:
    """It started a while ago, not in another unit or time zone."""
    here = Process.here()
    now = datetime.now(UTC)
    assert here.pid == os.getpid()
    assert now - timedelta(days=1) < datetime.fromisoformat(here.started) <= now


@pytest.mark.parametrize(("text", "rank"), [("7", 7), ("", None), ("first", None), ("-1", None)])
def test_rank_is_that_of_the_environment(monkeypatch: Any, text: str, rank: int | None) -> None:
    """None where it is no number."""
    monkeypatch.setenv("RANK", text)
    assert Process.here().rank == rank


def test_processes_are_ordered_by_their_start_and_graphs_by_their_time(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    """However the lines were mixed, in however many files."""
    late = {**record, "process": process(1, "2026-01-02")}
    early = {**record, "process": process(2, "2026-01-01", rank=0)}
    one = write(
        tmp_path / "one",
        {**late, "time": "2026-01-03"},
        {**early, "number": 2, "time": "2026-01-05"},
    )
    two = write(tmp_path / "two", {**early, "time": "2026-01-04"})
    found = reader.read([one, str(two)])
    assert [each.process.pid for each in found.recordings] == [2, 1]
    assert [graph.time for graph in found.recordings[0].report.graphs] == [
        "2026-01-04",
        "2026-01-05",
    ]


def test_last_record_of_a_graph_counts(tmp_path: Path, record: dict[str, Any]) -> None:
    """By process and number."""
    line = {**record, "process": process(1, "2026-01-01")}
    later = {**line, "runtime": {**record["runtime"], "calls": 9}}
    other = {**line, "process": process(1, "2026-01-02")}
    found = reader.read(write(tmp_path / "run", line, other, later))
    assert [each.report.graphs[0].runtime.calls for each in found.recordings] == [9, 1]


def test_lines_of_a_users_own_sink_are_one_unknown_process(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    """Just the records, each a graph of its own."""
    found = reader.read(write(tmp_path / "run", record, record))
    (recording,) = found.recordings
    assert recording.process == reader.UNKNOWN
    assert recording.report == Report((CompileReport.from_dict(record),) * 2)


def test_lines_that_hold_no_record_are_counted_with_the_reason(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    """And the records between them are read."""
    torn = json.dumps(record)[:200]
    foreign = [torn, "", "[1, 2]", "[" * 100_000, {"event": "epoch", "loss": 0.1}]
    wrong = [{**record, "schema": 2}, {**record, "nodes": "many"}, {**record, "process": "me"}]
    path = write(tmp_path / "run", record, *foreign, *wrong, record)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\x00\n" + b'{"not ended')
    found = reader.read(path)
    assert len(found.recordings[0].report.graphs) == 2
    assert found.left_out == len(found.faults) == 10
    assert [fault.line for fault in found.faults] == [2, 3, 4, 5, 6, 7, 8, 9, 11, 12]
    said = ("torn", "blank", "no object", "torn", "schema None", "schema 2", "nodes", "process")
    for fault, why in zip(found.faults, (*said, "torn", "torn"), strict=True):
        assert why in fault.why
        assert fault.file == str(path)


def test_reasons_are_bounded(tmp_path: Path) -> None:
    """Their number and their length, however large a foreign file is."""
    found = reader.read(write(tmp_path / "run", *[{"schema": "x" * 10_000}] * 50))
    assert (found.left_out, len(found.faults)) == (50, 20)
    assert max(len(fault.why) for fault in found.faults) == 200
    assert found.recordings == ()


def test_numbers_that_are_no_json_are_read(tmp_path: Path, record: dict[str, Any]) -> None:
    """A user's own ``json.dumps`` writes them."""
    record["attempts"][0]["engine"] = {"loss": float("nan")}
    found = reader.read(write(tmp_path / "run", record))
    engine = found.recordings[0].report.graphs[0].attempts[0].engine
    assert engine == {"loss": "NaN"}


def test_older_files_are_read_first(tmp_path: Path, record: dict[str, Any]) -> None:
    """Even where the newest is not there, for the moment of a rotation."""
    line = {**record, "process": process(1, "2026-01-01")}
    write(tmp_path / "run.2", {**line, "nodes": 1})
    write(tmp_path / "run.1", {**line, "nodes": 2})
    found = reader.read(tmp_path / "run")
    assert [graph.nodes for graph in found.recordings[0].report.graphs] == [2]


def test_older_files_that_are_given_too_are_read_once(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    """As by ``run.jsonl*`` in a shell: the newest line counts, and faults are counted once."""
    line = {**record, "process": process(1, "2026-01-01")}
    older = write(tmp_path / "run.jsonl.1", {**line, "chosen": "before"}, "torn")
    newest = write(tmp_path / "run.jsonl", {**line, "chosen": "after"})
    for given in ([newest, older], [older, newest], [newest, newest]):
        found = reader.read(given)
        assert found.recordings[0].report.graphs[0].chosen == "after"
        assert found.left_out == 1


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    """It names the file."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        reader.read(tmp_path / "nowhere")


# --- composer report ---


def test_report_of_one_process_is_its_table(tmp_path: Path, record: dict[str, Any]) -> None:
    """As ``composer.report()`` prints it."""
    result = runner.invoke(app, ["report", str(write(tmp_path / "run", record))])
    assert result.exit_code == 0
    assert result.output.strip() == str(Report((CompileReport.from_dict(record),)))


def test_report_of_several_processes_has_a_heading_for_each(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    """And says at the end what was left out."""
    first = {**record, "process": process(11, "2026-01-01", rank=0)}
    second = {**first, "process": process(12, "2026-01-02")}
    path = write(tmp_path / "run", first, second, record, '{"torn')
    lines = runner.invoke(app, ["report", str(path)]).output.splitlines()
    assert [line for line in lines if line.startswith("==")] == [
        "== a process that its lines do not name",
        "== process 11 on here, rank 0, started 2026-01-01",
        "== process 12 on here, started 2026-01-02",
    ]
    assert lines[-1].startswith(f"1 line left out, the first: {path}:4: torn, or no JSON")


def test_report_shows_the_newest_graphs_of_each_process(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    """As many as asked for."""
    path = write(tmp_path / "run", *({**record, "number": 7 + n} for n in range(3)))
    output = runner.invoke(app, ["report", str(path), "--last", "2"]).output
    assert output.startswith("composer: 2 graphs")
    assert "graph 7 [0/0]" not in output
    assert "graph 9 [0/0]" in output


def test_report_says_of_when_the_counters_are(tmp_path: Path, record: dict[str, Any]) -> None:
    """And what was built then, and why a graph was compiled again."""
    runtime = {**record["runtime"], "under_way": "onnxrt, 1 of 2"}
    again = {**record, "runtime": runtime, "recompiled": "0/0: x is None"}
    path = write(tmp_path / "run", {**again, "written": "2026-01-01T10:00:00+00:00"})
    when, _, _, _, *notes = runner.invoke(app, ["report", str(path)]).output.splitlines()
    assert when == "counters as of 2026-01-01T10:00:00+00:00"
    assert notes[1:3] == [
        "  in the background: onnxrt, 1 of 2",
        "  compiled again, Dynamo's reason: 0/0: x is None",
    ]


def test_report_speaks_json(tmp_path: Path, record: dict[str, Any]) -> None:
    """Process by process, with the records as they are in the file."""
    said = process(11, "2026-01-01")
    path = write(tmp_path / "run", {**record, "process": said}, "")
    asked = ["report", str(path), "--json", "--last", "1"]
    assert json.loads(runner.invoke(app, asked).output) == {
        "processes": [{"process": said, "graphs": [record]}],
        "left_out": 1,
        "faults": [{"file": str(path), "line": 2, "why": "a blank line"}],
    }


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (None, 2, "cannot be read: No such file"),
        ("", 1, "no line at all"),
        ("x\n", 1, "1 line left out, the first: "),
    ],
)
def test_report_without_a_record_says_why_in_one_line(
    tmp_path: Path, text: str | None, code: int, said: str
) -> None:
    """On stderr."""
    path = tmp_path / "run"
    if text is not None:
        path.write_text(text)
    result = runner.invoke(app, ["report", str(path)])
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr
    assert result.stderr.startswith("composer: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [None, ".", "/", ""])
def test_report_of_a_folder_says_so(tmp_path: Path, name: str | None) -> None:
    """Not by a traceback; no name is the working directory's (``report "$UNSET"``)."""
    result = runner.invoke(app, ["report", str(tmp_path) if name is None else name])
    assert result.exit_code == 2
    assert "cannot be read: Is a directory" in result.stderr


def test_report_command_writes_a_page(tmp_path: Path) -> None:
    """``--html``: with what each reason means, and a clear word where it cannot be written."""
    compiled(torch.sin, engines.raises, honest)(torch.ones(2))
    file, page = write(tmp_path / "run.jsonl", last().to_dict()), tmp_path / "report.html"
    done = runner.invoke(app, ["report", str(file), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "no such kernel" in page.read_text()
    assert explained(Reason.BUILD_FAILED).summary in html.unescape(page.read_text())
    for elsewhere, said in ((tmp_path, "is a folder"), (tmp_path / "no" / "page", "no folder")):
        done = runner.invoke(app, ["report", str(file), "--html", str(elsewhere)])
        assert done.exit_code == 2
        assert said in done.output


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.1", "linked", "./run.jsonl"])
@pytest.mark.parametrize("more", [[], ["--force"]])
def test_report_leaves_the_records_that_it_reads(
    tmp_path: Path, record: dict[str, Any], name: str, more: list[str]
) -> None:
    """Under any of their names, the older files' and links' among them."""
    file = write(tmp_path / "run.jsonl", record)
    write(tmp_path / "run.jsonl.1", record)
    os.link(file, tmp_path / "linked")
    page = f"{tmp_path}/{name}"
    before = Path(page).read_text()
    done = runner.invoke(app, ["report", str(file), "--html", page, *more])
    assert (done.exit_code, done.stdout, Path(page).read_text()) == (2, "", before)
    assert "is one of the files to read" in done.stderr


def test_page_takes_the_place_of_a_page_only(tmp_path: Path, record: dict[str, Any]) -> None:
    """Or of an empty file; what is somebody else's has to be given up by ``--force``."""
    file, page = write(tmp_path / "run.jsonl", record), tmp_path / "page"
    asked = ["report", str(file), "--html", str(page)]
    for text in ("notes\n", "<!doctype html>\n<title>mine</title>\n"):
        page.write_text(text)
        done = runner.invoke(app, asked)
        assert (done.exit_code, page.read_text()) == (2, text)
        assert "--force overwrites it" in done.stderr
    assert runner.invoke(app, [*asked, "--force"]).exit_code == 0
    assert "<title>composer: 1 graph</title>" in page.read_text()
    assert runner.invoke(app, asked).exit_code == 0
    page.write_text("")
    assert runner.invoke(app, asked).exit_code == 0


def test_report_is_a_page_or_json(tmp_path: Path, record: dict[str, Any]) -> None:
    """Exit code 2 where both are asked for, and nothing is written."""
    file, page = write(tmp_path / "run.jsonl", record), tmp_path / "page.html"
    done = runner.invoke(app, ["report", str(file), "--json", "--html", str(page)])
    assert (done.exit_code, done.stdout, page.exists()) == (2, "", False)
    assert "ask for one of them" in done.stderr
