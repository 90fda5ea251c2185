"""The sink ``jsonl``: no line is lost or torn, whoever writes, dies or holds the lock."""

from __future__ import annotations

import html
import json
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import jsonschema
import pytest
import torch
from common import compiled, last
from engines import honest
from torch._dynamo.exc import BackendCompilerFailed

from composer import session
from composer.build import current_build
from composer.errors import OptionError, TelemetryWarning
from composer.telemetry import jsonl, linefile, schema
from composer.telemetry.html import render
from composer.telemetry.linefile import LineFile
from composer.telemetry.reader import read
from composer.testing import FakeBackend

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the environment names; the session's sinks are its own."""
    file = tmp_path / "logs" / "run.jsonl"
    monkeypatch.setenv("COMPOSER_TELEMETRY", str(file))
    monkeypatch.setattr(session, "_current", session.Session())
    yield file
    session.current().sinks.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what a line is ---


def test_line_is_the_record_with_its_process(path: Path, monkeypatch: Any) -> None:
    """In a folder made for it; the rank is torchrun's."""
    monkeypatch.setenv("RANK", "3")
    compiled(torch.nn.Linear(2, 2), engines.raises, honest)(torch.ones(2))
    compiled(torch.sin, honest)(torch.ones(2))
    first, second = lines(path)
    assert (first["number"], second["number"]) == (1, 2)
    process = first.pop("process")
    assert process == second["process"]
    assert process["rank"] == 3
    assert process["started"] < first["time"]
    jsonschema.validate(first, schema.committed())
    assert first["time"][:19] <= first.pop("written")[:19]
    first.pop("runtime")
    assert {**first, "runtime": 0} == {**session.current().reports()[0].to_dict(), "runtime": 0}


def test_nothing_is_written_without_the_variable(path: Path, monkeypatch: Any) -> None:
    """Empty counts as unset."""
    monkeypatch.setenv("COMPOSER_TELEMETRY", "")
    compiled(torch.sin, honest)(torch.ones(2))
    assert not path.parent.exists()


def test_line_is_json_whatever_an_engine_says(path: Path) -> None:
    """Numbers that JSON does not know and half characters, which would spoil it for readers."""

    def odd(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        numbers = {"loss": float("nan"), "bounds": [float("-inf"), 1.5]}
        current_build().facts.extra |= {**numbers, "file": "caf\udce9", "nested": {1: 2}}
        return honest(gm, example_inputs)

    compiled(torch.sin, odd)(torch.ones(2))
    (line,) = path.read_text(encoding="utf-8").splitlines()
    engine = json.loads(line, parse_constant=pytest.fail)["attempts"][0]["engine"]
    assert engine == {"loss": "nan", "bounds": ["-inf", 1.5], "file": "caf?", "nested": {"1": 2}}
    assert read(path).left_out == 0


def test_further_record_of_a_graph_has_its_number(path: Path) -> None:
    """The last one counts, with what happened at run time."""
    compiled(torch.sin, honest)(torch.ones(2))
    compiled(torch.cos, honest)(torch.ones(2))
    first, second = session.current().reports()
    session.current().sinks.emit(first, first=False)
    assert [line["number"] for line in lines(path)] == [1, 2, 1]
    session.current().sinks.close()
    assert [line["number"] for line in lines(path)] == [1, 2, 1, 2]
    (recording,) = read(path).recordings
    assert recording.report.graphs == (first, second)


def fails_at_its_second_call() -> Any:
    """A graph, called once; its engine raises at the next call, and another serves from then on."""
    f = compiled(torch.sin, FakeBackend("raises", at=2), "aot_eager")
    f(torch.ones(2))
    return f


def calls_and_numbers(path: Path, serves: str) -> list[tuple[int, int]]:
    """Of each line about the graph that ``aot_eager`` serves in the end, and whoever served it."""
    session.current().sinks.close()
    mine = [line for line in lines(path) if len(line["attempts"]) > 1 or line["chosen"] == serves]
    return [(line["runtime"]["calls"], line["number"]) for line in mine]


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_counters_of_a_graph_from_before_the_sink_do_not_go_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changed later is written, and nothing that was true before."""
    monkeypatch.setenv("COMPOSER_TELEMETRY", "")
    f = fails_at_its_second_call()
    monkeypatch.setenv("COMPOSER_TELEMETRY", str(path))
    compiled(torch.cos, honest)(torch.ones(2))
    for _ in range(5):
        f(torch.ones(2))
    told = calls_and_numbers(path, "fake_raises")
    assert told == sorted(told)
    assert {number for _, number in told} == {1}
    graphs = [graph for each in read(path).recordings for graph in each.report.graphs]
    assert sorted(graph.chosen for graph in graphs) == ["aot_eager", "honest"]


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_graph_that_newer_ones_pushed_out_keeps_its_number(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long-lived process; nobody counts the graph twice."""
    monkeypatch.setattr(jsonl, "_FOLLOWED", 2)
    f = fails_at_its_second_call()
    for function in (torch.cos, torch.tan, torch.exp):
        compiled(function, honest)(torch.ones(2))
    for _ in range(5):
        f(torch.ones(2))
    told = calls_and_numbers(path, "fake_raises")
    assert (told[0], {number for _, number in told}) == ((0, 1), {1})
    assert told == sorted(told)
    (recording,) = read(path).recordings
    assert [graph.chosen for graph in recording.report.graphs].count("aot_eager") == 1
    assert len(recording.report.graphs) == 4


def test_second_series_in_a_file_goes_on_where_the_first_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unset for a while, and set again: no graph stands in for another."""
    compiled(torch.sin, honest)(torch.ones(2))
    monkeypatch.delenv("COMPOSER_TELEMETRY")
    compiled(torch.tan, honest)(torch.ones(2))
    monkeypatch.setenv("COMPOSER_TELEMETRY", str(path))
    compiled(torch.cos, honest)(torch.ones(2))
    assert {line["number"] for line in lines(path)} == {1, 3}


def test_changed_path_is_followed_and_the_counters_go_to_the_old_one(
    path: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each graph's records stay in one file; unset, the last counters are written at once."""
    f = compiled(torch.sin, honest)
    f(torch.ones(2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER_TELEMETRY", "other.jsonl")
    compiled(torch.cos, honest)(torch.ones(2))
    monkeypatch.delenv("COMPOSER_TELEMETRY")
    compiled(torch.tan, honest)(torch.ones(2))
    assert [line["runtime"]["calls"] for line in lines(path)] == [0, 1]
    assert [line["runtime"]["calls"] for line in lines(tmp_path / "other.jsonl")] == [0, 1]


# --- what the user may get wrong, and what may go wrong ---


@pytest.mark.parametrize("limit", ["64MB", "-1", "0", "1.5", "٣"])
def test_malformed_limit_is_an_error_at_every_compile(
    path: Path, monkeypatch: Any, limit: str
) -> None:
    """It is the user's own mistake."""
    monkeypatch.setenv("COMPOSER_TELEMETRY_MAX_BYTES", limit)
    for function in (torch.sin, torch.cos):
        with pytest.raises(BackendCompilerFailed, match="COMPOSER_TELEMETRY_MAX_BYTES") as caught:
            compiled(function, honest)(torch.ones(2))
        assert isinstance(caught.value.inner_exception, OptionError)
    assert not path.exists()


def test_sink_named_without_a_file_is_an_error(path: Path, monkeypatch: Any) -> None:
    """At every compile, until there is a file."""
    monkeypatch.delenv("COMPOSER_TELEMETRY")
    monkeypatch.setenv("COMPOSER_SINKS", "jsonl")
    for function in (torch.sin, torch.cos):
        with pytest.raises(BackendCompilerFailed, match="'jsonl', and COMPOSER_TELEMETRY no file"):
            compiled(function, honest)(torch.ones(2))
    monkeypatch.setenv("COMPOSER_TELEMETRY", str(path))
    compiled(torch.tan, honest)(torch.ones(2))
    assert len(lines(path)) == 1


def test_folder_in_the_files_place_is_warned_of_once(path: Path) -> None:
    """The calls are answered."""
    path.mkdir(parents=True)
    with pytest.warns(TelemetryWarning, match="'jsonl' failed: IsADirectoryError"):
        assert compiled(torch.sin, honest)(torch.zeros(2)).sum() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.cos, honest)(torch.zeros(2)).sum() == 2
    assert list(path.parent.iterdir()) == [path]


HOLDS = """
import os, signal, sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_lock_of_a_stopped_process_is_warned_of_once(path: Path, monkeypatch: Any) -> None:
    """Waited for once, not at every compile; what could not be written is written at the end."""
    monkeypatch.setattr(jsonl, "PATIENCE", 0.3)
    path.parent.mkdir()
    command = [sys.executable, "-c", HOLDS, f"{path}.lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.warns(TelemetryWarning, match=r"run\.jsonl\.lock, after 0\.3 s"):
                compiled(torch.sin, honest)(torch.ones(2))
            monkeypatch.setattr(jsonl, "PATIENCE", 1000.0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                compiled(torch.cos, honest)(torch.ones(2))
        finally:
            holder.kill()
    assert not path.exists()
    session.current().sinks.close()
    assert [line["number"] for line in lines(path)] == [1, 2]


# --- rotation ---


def test_file_is_rotated_before_it_grows_too_large(tmp_path: Path) -> None:
    """Three older ones are kept; a line longer than the limit has a file to itself."""
    file = LineFile(tmp_path / "run")
    for number in range(9):
        file.append(b"%d\n" % number, 4, 1)
    file.append(b"a long line\n", 4, 1)
    contents = [name.read_bytes() for name in linefile.rotated(file.path)]
    assert contents == [b"a long line\n", b"8\n", b"6\n7\n", b"4\n5\n"]


def test_rotation_that_died_half_way_loses_nothing(tmp_path: Path) -> None:
    """A name left free is filled; the files behind it stay."""
    file = LineFile(tmp_path / "run")
    for number in range(7):
        file.append(b"%d\n" % number, 2, 1)
    names = linefile.rotated(file.path)
    names[1].replace(names[2])
    file.append(b"7\n", 2, 1)
    assert [name.read_bytes() for name in names] == [b"7\n", b"6\n", b"5\n", b"3\n"]


def test_rotated_files_are_read_as_one(path: Path, monkeypatch: Any) -> None:
    """A graph whose first record is gone is known by its last."""
    monkeypatch.setenv("COMPOSER_TELEMETRY_MAX_BYTES", "4000")
    for number in range(6):
        compiled(torch.sin, honest)(torch.ones(2 + number))
        torch.compiler.reset()
    assert linefile.rotated(path)[1].exists()
    (recording,) = read(path).recordings
    assert recording.report.graphs == session.current().reports()


# --- several writers ---


def test_threads_lose_no_line(path: Path) -> None:
    """Eight at once."""
    compiled(torch.sin, honest)(torch.ones(2))
    report = last()

    def emit() -> None:
        for _ in range(25):
            session.current().sinks.emit(report)

    threads = [threading.Thread(target=emit) for _ in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines(path)) == 201


FORKS = """
import os, sys
from composer.records import CompileReport
from composer.telemetry.jsonl import JsonLinesSink

def report(text, number=1):
    return CompileReport(
        time="2026-01-01T00:00:00.000+00:00", number=number, graph_id="0/0", graph_key=text,
        model="m", device="cpu", dtype="float32", training=False, dynamic=False, nodes=1, inputs=(),
        policy=(), attempts=(), chosen="eager", seconds=0.0,
    )

def forked(step):
    child = os.fork()
    if child == 0:
        try:
            step()
        finally:
            os._exit(0)
    return child
"""

FOUR_WRITERS = f"""{FORKS}
def write():
    sink = JsonLinesSink()
    for number in range(100):
        one = report(f"{{number}} {{'x' * 300 * (number % 7)}}", number)
        sink.follow(one)
        sink.emit(one.to_dict())

for child in [forked(write) for _ in range(4)]:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_four_processes_write_every_line(path: Path, run_python: RunPython) -> None:
    """None is lost, none torn."""
    done = run_python(FOUR_WRITERS)
    assert done.returncode == 0, done.stderr
    found = read(path)
    assert (found.left_out, len(found.recordings)) == (0, 4)
    for recording in found.recordings:
        numbers = sorted(int(each.graph_key.split()[0]) for each in recording.report.graphs)
        assert numbers == list(range(100))


def test_four_processes_rotate_one_file(path: Path, run_python: RunPython) -> None:
    """Each file stays within the limit, and nothing is missing among the newest lines."""
    done = run_python(FOUR_WRITERS, env={"COMPOSER_TELEMETRY_MAX_BYTES": "100000"})
    assert done.returncode == 0, done.stderr
    files = linefile.rotated(path)
    assert all(file.stat().st_size <= 100_000 for file in files)
    assert all(file.stat().st_size > 95_000 for file in files[1:])
    found = read(path)
    assert found.left_out == 0
    assert sum(len(lines(file)) for file in files) == sum(
        len(recording.report.graphs) for recording in found.recordings
    )
    for recording in found.recordings:  # the oldest lines went, so what is left is a tail
        numbers = sorted(int(each.graph_key.split()[0]) for each in recording.report.graphs)
        assert numbers == list(range(numbers[0], 100))


KILLED = f"""{FORKS}
import random, signal, time
from pathlib import Path
from composer.telemetry.reader import read

path = Path(os.environ["COMPOSER_TELEMETRY"])
random.seed(0)

def write_on():
    sink = JsonLinesSink()
    big = report("x" * 4_000_000).to_dict()
    print("on", flush=True)
    while True:
        sink.emit(big)

for turn in range(25):
    path.unlink(missing_ok=True)
    began, told = os.pipe()
    child = forked(lambda: (os.dup2(told, 1), write_on()))
    os.read(began, 2)
    time.sleep(random.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    torn = read(path).left_out if path.exists() else 0
    assert torn <= 1, "a kill tore more than one line"
    sink = JsonLinesSink()
    for number in range(3):
        sink.emit(report(f"{{number}}", number).to_dict())
    found = read(path)
    mine = {{graph.graph_key for each in found.recordings for graph in each.report.graphs}}
    assert {{"0", "1", "2"}} <= mine, "a line after the torn one is lost"
    assert found.left_out == torn, "the torn line spoiled another"
"""


def test_killed_writers_spoil_at_most_the_line_they_were_at(
    path: Path, run_python: RunPython
) -> None:
    """Killed at 25 random moments: the next writer's lines are whole."""
    done = run_python(KILLED)
    assert done.returncode == 0, done.stderr


def test_torn_last_line_stays_alone(path: Path) -> None:
    """The next line starts on a line of its own."""
    path.parent.mkdir()
    path.write_text('{"schema": 1, "ti')
    compiled(torch.sin, honest)(torch.ones(2))
    found = read(path)
    assert (found.left_out, found.faults[0].line) == (1, 1)
    assert found.recordings[0].report.graphs == (last(),)


# --- the end of a process ---

PROGRAM = """
import os, sys, torch
def honest(gm, example_inputs):
    return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)
f = torch.compile(torch.sin, backend="composer", options={"chain": [honest]})
for _ in range(20):
    f(torch.zeros(2))
"""


def test_counters_are_written_at_exit(path: Path, run_python: RunPython) -> None:
    """Once more for a graph that was called since; the reader keeps the last."""
    done = run_python(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert [line["runtime"]["calls"] for line in lines(path)] == [0, 20]
    (recording,) = read(path).recordings
    (graph,) = recording.report.graphs
    assert graph.runtime.calls == 20
    assert graph.runtime.seconds > 0


KILLED_PROGRAM = f"""
import signal, threading
from composer.telemetry import jsonl

jsonl.EVERY = 0.01
{PROGRAM}
while '"calls": 20' not in open(os.environ["COMPOSER_TELEMETRY"]).read():
    threading.Event().wait(0.01)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_counters_survive_sigterm(path: Path, run_python: RunPython) -> None:
    """They are written while the program runs, since a signal leaves no time for it."""
    done = run_python(KILLED_PROGRAM)
    assert done.returncode == -signal.SIGTERM, done.stderr
    (recording,) = read(path).recordings
    (graph,) = recording.report.graphs
    assert graph.runtime.calls == 20
    assert recording.written >= recording.process.started[:19]
    page = html.unescape(render([recording]))
    assert f"counters as of {recording.written}" in page


def test_counters_that_cannot_be_written_are_warned_of_and_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes them goes on."""
    monkeypatch.setattr(jsonl, "EVERY", 0.01)
    tried, warned = threading.Semaphore(0), threading.Event()

    def fail(*args: Any) -> None:
        tried.release()
        raise OSError("no space left")

    monkeypatch.setattr(jsonl, "warn_once", lambda *_, **__: warned.set())
    f = compiled(torch.sin, honest)
    f(torch.ones(2))
    with monkeypatch.context() as broken:
        broken.setattr(LineFile, "append", fail)
        f(torch.ones(2))
        assert all(tried.acquire(timeout=60) for _ in range(2))
        assert warned.wait(60)
    session.current().sinks.close()
    assert lines(path)[-1]["runtime"]["calls"] == 2


def test_graph_that_cannot_be_written_leaves_the_others_their_counters(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose file is of an earlier folder."""
    for function in (torch.sin, torch.cos):
        compiled(function, honest)(torch.ones(2))
    append = LineFile.append

    def of_the_second(self: LineFile, line: bytes, *how: Any) -> None:
        if json.loads(line)["number"] == 1:
            raise OSError("read-only file system")
        append(self, line, *how)

    monkeypatch.setattr(LineFile, "append", of_the_second)
    with pytest.warns(TelemetryWarning, match="read-only file system"):
        session.current().sinks.close()
    written = lines(path)[-1]
    assert (written["number"], written["runtime"]["calls"]) == (2, 1)


def test_folder_that_was_removed_is_not_made_again_at_the_end(path: Path) -> None:
    """Nobody is warned either: that the file went was somebody's wish."""
    f = compiled(torch.sin, honest)
    f(torch.ones(2))
    shutil.rmtree(path.parent)
    f(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.current().sinks.close()
    assert not path.parent.exists()


FORKED_PROGRAM = f"""{PROGRAM}
child = os.fork()
g = torch.compile(torch.cos, backend="composer", options={{"chain": [honest]}})
for _ in range(5 if child else 3):
    f(torch.zeros(2))
    g(torch.zeros(2))
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_child_writes_its_own_graphs_only(path: Path, run_python: RunPython) -> None:
    """As a process of its own; what the parent compiled stays the parent's to write."""
    done = run_python(FORKED_PROGRAM)
    assert done.returncode == 0, done.stderr
    parent, child = read(path).recordings
    assert parent.process.pid != child.process.pid
    assert parent.process.started <= child.process.started
    assert [each.runtime.calls for each in parent.report.graphs] == [25, 5]
    assert [each.runtime.calls for each in child.report.graphs] == [3]


@pytest.mark.slow
def test_ranks_of_torchrun_write_one_file(path: Path, tmp_path: Path, run_python: Any) -> None:
    """Two ranks, a line each and their counters."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    launch = f"""
import sys
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node=2", {str(script)!r}])
"""
    done = run_python(launch, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = read(path)
    assert found.left_out == 0
    assert {each.process.rank for each in found.recordings} == {0, 1}
    assert [each.report.graphs[0].runtime.calls for each in found.recordings] == [20, 20]
