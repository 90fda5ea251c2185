"""The graphs of a lock are kept, and compiled again with what is installed then."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Done
from locks import LOCK, program, run
from test_repro import contents

from composer.tools import replay as tool
from composer.tools.replay import changes_of, kept
from composer.tools.replay.kept import KeptGraphs, Result
from composer.tools.trial import HANG, NUMBERS, Trial

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

GRAPHS = Path("composer.graphs")
GRAPH = "__main__.f-0"
NUMBER = 1234.5678


@pytest.fixture(autouse=True)
def _room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keep(**options: Any) -> None:
    """Lock a program whose input has a number of the user's, and keep its graph."""
    program(f"compiled(torch.full((4,), {NUMBER}))", **{"chain": ["aot_eager"], **options})
    done = run("lock", "--graphs", "script.py")
    assert done.exit_code == 0, done.output


def test_graphs_are_kept_beside_the_lock() -> None:
    """Each as a folder, with the engines of its chain, and without the user's data."""
    keep(chain=["aot_eager", "eager"])
    assert sorted(each.name for each in GRAPHS.iterdir()) == [GRAPH, "results.json"]
    folder = GRAPHS / GRAPH
    names = [each.name for each in folder.iterdir()]
    assert sorted(names) == ["about.json", "check.py", "comparison.py", "graph.py"]
    about = json.loads((folder / "about.json").read_text())
    assert (about["model"], about["position"]) == ("__main__.f", 0)
    engines = [each["backend"] for each in KeptGraphs.read(GRAPHS).candidates(GRAPH)]
    assert engines == ["aot_eager", "eager"]
    assert b"class Graph" in contents(GRAPHS)
    assert str(NUMBER).encode() not in contents(GRAPHS)


def test_a_lock_without_graphs_keeps_none() -> None:
    program()
    assert run("lock", "script.py").exit_code == 0
    assert (LOCK.exists(), GRAPHS.exists()) == (True, False)


def test_graphs_of_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the program ran with ``COMPOSER_DUMP``; else the command says that they are not."""
    program()
    for name in ("without", "with"):
        if name == "with":
            monkeypatch.setenv("COMPOSER_DUMP", str(tmp_path / "dumps"))
        record = tmp_path / f"{name}.jsonl"
        assert run("run", "--telemetry", record, "script.py").exit_code == 0
        done = run("lock", "--graphs", "--from", record)
        assert done.exit_code == 0, done.output
        assert ("is not kept for composer replay" in done.stderr) == (name == "without")
        assert (GRAPHS / GRAPH).is_dir() == (name == "with")


def test_graphs_that_cannot_be_replaced_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their results."""
    keep()
    (GRAPHS / "results.json").write_text('{"results": []}')
    before = contents(GRAPHS)
    rename = Path.rename

    def once(self: Path, target: Path) -> Path:
        if self.name.startswith(f".{GRAPHS.name}-") and target.name == GRAPHS.name:
            monkeypatch.setattr(Path, "rename", rename)
            raise OSError("no space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", once)
    assert run("lock", "--graphs", "script.py").exit_code != 0
    assert contents(GRAPHS) == before


def test_a_folder_of_somebody_else_stays() -> None:
    program()
    GRAPHS.mkdir()
    (GRAPHS / "mine.txt").touch()
    done = run("lock", "--graphs", "script.py")
    assert (done.exit_code, "was not written by composer" in done.stderr) == (2, True)
    assert ((GRAPHS / "mine.txt").exists(), LOCK.exists()) == (True, False)
    done = run("lock", "--graphs", "--check", "script.py")
    assert (done.exit_code, "leave out one of them" in done.stderr) == (2, True)


class Installed:
    """Stands for what is installed: each run of an engine has this outcome."""

    def __init__(self) -> None:
        self.trial = Trial(errors=(1e-7, 1e-7), ratio=(1.9, 2.0, 2.1), coverage=1.0)
        self.next: list[Trial] = []
        self.ran: list[str] = []

    def __call__(self, folder: Path, seconds: float, *, timed: bool) -> Trial:
        assert timed
        self.ran.append((folder / "run.py").read_text())
        return self.next.pop(0) if self.next else self.trial


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    found = Installed()
    monkeypatch.setattr(tool, "tried", found)
    return found


def replayed(*args: str) -> Done:
    return run("replay", *args)


def test_the_first_replay_keeps_what_later_ones_are_compared_with(installed: Installed) -> None:
    """What got worse is exit status 1. ``--keep`` keeps the new results."""
    keep()
    good = installed.trial
    done = replayed()
    assert (done.exit_code, "1 result kept" in done.stdout) == (0, True)
    done = replayed()
    assert (done.exit_code, "0 of 1 result worse" in done.stdout) == (0, True)
    installed.trial = Trial({NUMBERS: "output 0 is off by 3"})
    for _ in range(2):
        done = replayed()
        assert done.exit_code == 1
        assert f"{GRAPH} by aot_eager: worse: wrong numbers: output 0 is off by 3" in done.stdout
    assert replayed("--keep").exit_code == 1
    assert b"off by 3" not in contents(GRAPHS)  # an engine may say the user's names
    assert replayed().exit_code == 0
    installed.trial = good
    done = replayed()
    assert (done.exit_code, "works now; it was: wrong numbers" in done.stdout) == (0, True)
    assert "run.py" not in installed.ran[0]
    assert "backend='aot_eager'" in installed.ran[0]


def test_an_engine_is_slower_only_if_a_second_run_agrees(installed: Installed) -> None:
    """Times of two processes differ by more than the rounds of one."""
    keep()
    replayed()
    slow = Trial(ratio=(1.0, 1.1, 1.2))
    for second, code in ((installed.trial, 0), (slow, 1)):
        installed.next = [slow, second]
        done = replayed()
        assert (done.exit_code, "worse: slower" in done.stdout) == (code, bool(code))
        assert installed.next == []


def test_without_an_earlier_result_a_wrong_engine_is_worse(installed: Installed) -> None:
    """An engine that refuses is not: the next one of a chain serves."""
    keep(chain=["aot_eager", "eager"])
    installed.trial = Trial({"raises RuntimeError": "no kernel"})
    done = replayed("--engine", "aot_eager")
    assert (done.exit_code, "refuses" in done.stdout) == (0, True)
    installed.trial = Trial({HANG: "no end"})
    done = replayed("--engine", "eager", "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["worse"]) == (1, 1)
    (row,) = told["results"]
    assert (row["engine"], row["now"]["faults"], row["then"]) == ("eager", {HANG: "no end"}, None)


def test_versions_that_changed_are_told(installed: Installed) -> None:
    """Those of the packages of each engine."""
    keep()
    replayed()
    path = GRAPHS / kept.RESULTS
    results = json.loads(path.read_text())
    results["results"][0]["versions"]["torch"] = "2.0.0"
    path.write_text(json.dumps(results))
    assert "torch 2.0.0 -> " in replayed().stdout


def test_a_lock_that_is_written_again_keeps_the_results_of_graphs_that_stay(
    installed: Installed,
) -> None:
    keep()
    replayed()
    keep()
    assert len(KeptGraphs.read(GRAPHS).results) == 1
    program("compiled(torch.ones(4, 3))", chain=["aot_eager"])
    assert run("lock", "--graphs", "script.py").exit_code == 0
    assert KeptGraphs.read(GRAPHS).results == {}


def test_mistakes_are_told(installed: Installed) -> None:
    done = replayed("nowhere")
    assert (done.exit_code, "make one by composer lock --graphs" in done.stderr) == (2, True)
    keep()
    done = replayed("--engine", "onnxrt")
    assert (done.exit_code, "has the engine onnxrt" in done.stderr) == (2, True)
    (GRAPHS / kept.RESULTS).write_text('{"form": 99, "results": []}')
    done = replayed()
    assert (done.exit_code, "has the form 99, not 1" in done.stderr) == (2, True)


WORKS = Result(errors=(2e-7, 1e-7), ratio=(1.9, 2.0, 2.1), coverage=0.9)
REFUSES = Result({"raises RuntimeError": "no kernel"})
WRONG = Result({NUMBERS: "off"})

CHANGES: dict[str, tuple[Result, dict[str, Any], list[tuple[str, bool]]]] = {
    "nothing": (WORKS, {}, []),
    "a little slower": (WORKS, {"ratio": (1.7, 1.75, 1.8)}, []),
    "slower within the spread": (WORKS, {"ratio": (1.0, 1.5, 2.0)}, []),
    "slower": (WORKS, {"ratio": (1.4, 1.5, 1.6)}, [("slower: 2.00 (1.90-2.10) times", True)]),
    "slower beside a load": (WORKS, {"ratio": (1.4, 1.5, 1.6), "beside_load": True}, []),
    "faster": (WORKS, {"ratio": (2.9, 3.0, 3.1)}, [("faster: 2.00", False)]),
    "takes less": (WORKS, {"coverage": 0.5}, [("takes 50% of the work; it was 90%", True)]),
    "takes more": (WORKS, {"coverage": 1.0}, [("takes 100% of the work", False)]),
    "a little less exact": (WORKS, {"errors": (9e-7, 1e-7)}, []),
    "less exact": (
        WORKS,
        {"errors": (3e-6, 1e-7)},
        [("its error is 3.0e-06; it was 2.0e-07", True)],
    ),
    "as inexact as eager": (WORKS, {"errors": (3e-6, 1e-6)}, []),
    "unknown now": (WORKS, {"unknown": "no module"}, [("unknown: no module", True)]),
    "unknown in place of refused": (REFUSES, {"unknown": "no module"}, [("unknown: no", False)]),
    "random numbers": (WORKS, {"errors": ()}, []),
    "refused now": (WORKS, {"faults": REFUSES.faults}, [("raises RuntimeError: no kernel", True)]),
    "taken now": (REFUSES, {"faults": {}}, [("works now; it was: raises RuntimeError", False)]),
    "wrong now": (WORKS, {"faults": WRONG.faults}, [("wrong numbers: off", True)]),
    "wrong in place of refused": (
        REFUSES,
        {"faults": WRONG.faults},
        [("wrong numbers: off", True)],
    ),
    "refused in place of wrong": (WRONG, {"faults": REFUSES.faults}, [("raises Runt", False)]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_told(name: str) -> None:
    """And whether a program is worse off."""
    then, fields, expected = CHANGES[name]
    found = [*changes_of(then, dataclasses.replace(then, **fields))]
    assert [each.is_worse for each in found] == [is_worse for _, is_worse in expected]
    for change, (text, _) in zip(found, expected, strict=True):
        assert text in change.text


@pytest.mark.slow
def test_engines_run_in_child_processes() -> None:
    """Beside eager mode, with numbers, times and coverage; one that crashes is told."""
    keep(chain=["onnxrt", "faulty:wrong_value", "faulty:os_exits"])
    done = replayed("--json")
    rows = {each["engine"]: each["now"] for each in json.loads(done.stdout)["results"]}
    assert done.exit_code == 1
    good = rows["onnxrt"]
    assert (good["faults"], good["coverage"], len(good["ratio"])) == ({}, 1.0, 3)
    assert max(good["errors"]) < 1e-6
    assert [*rows["faulty:wrong_value"]["faults"]] == [NUMBERS]
    assert [*rows["faulty:os_exits"]["faults"]] == ["crash"]
    done = replayed("--engine", "onnxrt")
    assert "onnxrt" in done.stdout
    assert "times eager's speed" in done.stdout
