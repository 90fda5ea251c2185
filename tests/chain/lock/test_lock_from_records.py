"""``composer lock --from``: the lock of a program that ran elsewhere, from its records."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from forked import Interpreter
from locks import LOCK, cosine, differences, edit, program, run

from composer.knowledge import lock_file

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

RECORDS = Path("run.jsonl")


@pytest.fixture
def recorded(interpreter: Interpreter) -> Callable[[], list[dict[str, Any]]]:
    """Runs the script with telemetry in a process of its own; the last line of each graph."""

    def run_script() -> list[dict[str, Any]]:
        RECORDS.unlink(missing_ok=True)
        environment = {**os.environ, "COMPOSER_TELEMETRY": str(RECORDS)}
        done = interpreter.run(["script.py"], env=environment)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, RECORDS.read_text().splitlines())
        return list({line["number"]: line for line in lines}.values())

    return run_script


Recorded = Callable[[], list[dict[str, Any]]]
"""The fixture ``recorded``."""

TWICE = "for dtype in (torch.float32, torch.float64): compiled(torch.ones(4, dtype=dtype))"
"""Compiles two graphs."""


def write(lines: list[dict[str, Any]]) -> None:
    RECORDS.write_text("".join(f"{json.dumps(each)}\n" for each in lines))


def test_lock_of_records_is_that_of_the_program(recorded: Recorded) -> None:
    """Byte for byte but for the command; with passes, options, a precision and a measurement."""
    chain = [{"backend": "onnxrt", "options": {"threads": 1}}, "aot_eager"]
    program(
        "with torch.no_grad():",
        "    compiled(torch.ones(4))",
        "    compiled(torch.ones(4, dtype=torch.int32))",
        chain=chain,
        passes=["fold_constants", {"pass": "remove_no_ops"}],
        precision="auto",
        verify="compile",
    )
    recorded()
    done = run("lock", "--from", RECORDS)
    assert done.exit_code == 0, done.output
    first, by_records = LOCK.read_text().split("\n", 1)
    assert first == "# Written by `composer lock --from run.jsonl`: the engine of each graph."
    assert done.stdout == f"{LOCK.absolute()}: 2 graphs, served by: onnxrt 2\n"
    LOCK.unlink()
    assert run("lock", "script.py").exit_code == 0
    assert LOCK.read_text().split("\n", 1)[1] == by_records
    assert differences() == []


def test_service_that_only_warned_gives_the_lock_that_holds_all_its_graphs(
    recorded: Recorded,
) -> None:
    """So the next one can be held to it."""
    program(chain=["aot_eager"])
    assert run("lock", "script.py").exit_code == 0
    program(TWICE, chain=["aot_eager"], locked="warn")
    lines = recorded()
    assert [bool(each["lock"]["unlocked"]) for each in lines] == [False, True]
    assert run("lock", "--check", "--from", RECORDS).exit_code == 1
    assert run("lock", "--from", RECORDS).exit_code == 0
    assert run("lock", "--check", "--from", RECORDS).exit_code == 0
    program(TWICE, chain=["aot_eager"], locked="raise")
    assert run("run", "script.py").exit_code == 0


def test_check_of_records_compares_the_versions_that_they_have(recorded: Recorded) -> None:
    """Whatever is installed where the command runs; engines of no graph there do not count."""
    program(chain=["aot_eager"])
    lines = recorded()
    assert run("lock", "--from", RECORDS).exit_code == 0
    edit(lambda table: table["versions"].update({"no-such-package": "1.0"}))
    assert run("lock", "--check", "--from", RECORDS).exit_code == 0
    for line in lines:
        for versions in line["lock"]["versions"].values():
            versions["torch"] = "2.99.0"
    write(lines)
    done = run("lock", "--check", "--from", RECORDS)
    assert done.exit_code == 1
    assert f"torch {torch.__version__} in the lock, 2.99.0 here" in done.stdout


def test_graph_of_several_processes_is_in_the_lock_once(recorded: Recorded) -> None:
    """With the engine of most; the command says where another one served."""
    program(chain=["aot_eager"])
    (line,) = recorded()
    files = []
    for number, engine in enumerate(["aot_eager", "eager", "aot_eager"]):
        process = {**line["process"], "pid": number}
        Path(f"{number}.jsonl").write_text(
            json.dumps({**line, "process": process, "chosen": engine}) + "\n"
        )
        files += ["--from", f"{number}.jsonl"]
    done = run("lock", *files)
    assert done.exit_code == 0, done.output
    (graph,) = lock_file.read(LOCK).graphs
    assert graph.engine == "aot_eager"
    assert "served by eager in 1 of 3 compiles; composer.lock says aot_eager" in done.stderr
    assert run("lock", "--check", *files).exit_code == 1


def test_last_record_of_a_compile_counts(recorded: Recorded) -> None:
    """An engine may have failed at a call."""
    engine = "FakeBackend('raises', at=2, name='vendor')"
    program(
        f"fails = torch.compile(f, backend='composer', options={{'chain': [{engine}, 'eager']}})",
        "for _ in range(3): fails(torch.ones(4))",
    )
    recorded()
    assert run("lock", "--from", RECORDS).exit_code == 0
    (graph,) = lock_file.read(LOCK).graphs
    assert (graph.model, graph.engine) == ("__main__.f", "eager")


def without_lock(line: dict[str, Any]) -> None:
    del line["lock"]


def switched(line: dict[str, Any]) -> None:
    line["policy"] = ["options", "COMPOSER_CHAIN"]


def upgraded(line: dict[str, Any]) -> None:
    line["lock"]["versions"]["eager"]["torch"] = "2.99.0"


def raised(line: dict[str, Any]) -> None:
    line["chosen"] = ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_lock, "graph 2 [0/1] of __main__.f has no key 'lock' in its record"),
        (switched, "graph 2 [0/1] of __main__.f was compiled under COMPOSER_CHAIN"),
        (upgraded, f"the records are of several versions of torch: {torch.__version__} and 2.99.0"),
        (raised, "graph 1 of __main__.f is served by nobody"),
    ],
)
def test_records_that_lack_what_a_lock_needs_are_refused(
    recorded: Recorded, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """By name; no file is written."""
    program(TWICE, chain=["aot_eager"])
    lines = recorded()
    change(lines[1])
    write(lines)
    done = run("lock", "--from", RECORDS)
    assert (done.exit_code, LOCK.exists()) == (1, False)
    assert said in done.stderr


def test_graph_whose_engine_was_not_chosen_yet_is_left_out(recorded: Recorded) -> None:
    """What serves then is not what the policy asks for; the command says so."""
    program(TWICE, chain=["aot_eager"])
    lines = recorded()
    lines[1]["attempts"][0]["timing"] = "in the background, from the second call on"
    lines[0]["attempts"][0]["timing"] = "no: the inputs cannot be copied"
    RECORDS.write_text("torn\n" + "".join(f"{json.dumps(each)}\n" for each in lines))
    done = run("lock", "--from", RECORDS)
    assert done.exit_code == 0, done.output
    assert len(lock_file.read(LOCK).graphs) == 1
    assert "graph 2 [0/1] of __main__.f is left out: its record was written before" in done.stderr
    assert "1 line without a valid record left out" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--from", "run.jsonl", "script.py"], "leave out SCRIPT"),
        (["--from", "run.jsonl", "--policy", "composer.toml"], "leave out SCRIPT"),
        (["--from", "none.jsonl"], "'none.jsonl' cannot be read: No such file"),
        ([], "give a SCRIPT to run, or --from FILE"),
    ],
)
def test_command_that_is_used_wrongly_runs_nothing(args: list[str], said: str) -> None:
    """It exits with 2."""
    program("raise SystemExit(9)")
    Path("composer.toml").write_text("version = 1\n")
    RECORDS.write_text("")
    done = run("lock", *args)
    assert (done.exit_code, LOCK.exists()) == (2, False)
    assert said in done.stderr


def test_records_without_a_graph_make_no_lock() -> None:
    """As a script that compiles nothing."""
    RECORDS.write_text("")
    done = run("lock", "--from", RECORDS)
    assert (done.exit_code, LOCK.exists()) == (1, False)
    assert "nothing was compiled through composer" in done.stderr


def test_record_has_what_a_lock_needs_only_where_it_is_asked_for() -> None:
    """Making it takes a moment at each compile."""
    compiled(cosine, "eager")(torch.ones(4))
    assert last().lock is None
