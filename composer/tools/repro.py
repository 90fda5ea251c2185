"""Makes a folder of a graph and an engine, by which others can see what goes wrong.

The graph was kept by ``COMPOSER_DUMP``, or by the policy's ``repro`` when an engine went wrong on
it. For an engine that runs ONNX models, the folder has the model of the first part of the graph
that shows the fault; it needs no composer then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer import session
from composer.backends import find_backend
from composer.backends.onnx_engine import OnnxEngine
from composer.chain.repro import FACT, FAULTS, is_importable, write
from composer.errors import ReproError
from composer.graphs import check
from composer.graphs.case import Case
from composer.records import CompileReport

WHOLE = "whole-graph"
"""The folder of the graph that composer compiles, next to the program of a part of it."""

_SLACK = 120.0
_BROKEN = -1
_OUTCOMES = {
    check.RIGHT: "the fault does not show",
    check.WRONG: check.SHOWS,
    check.UNKNOWN: "nothing can be said of the engine",
    _BROKEN: "run.py does not run",
}


@dataclass(frozen=True)
class Reproduction:
    """A folder that was made.

    Attributes:
        folder: The folder. ``python run.py`` in it runs the engine.
        outcome: What came of that.
        shows: True if the fault shows with the values in the folder.
        needs_composer: True if ``run.py`` imports composer.
        said: What the run printed.
    """

    folder: Path
    outcome: str
    shows: bool
    needs_composer: bool
    said: str

    def __str__(self) -> str:
        """Return the result in one line."""
        needs = "it needs composer" if self.needs_composer else "it needs no composer"
        return f"{self.folder}: {self.outcome}; {needs}"


def repro(
    graph: CompileReport | int | str,
    engine: str,
    folder: str | os.PathLike[str],
    with_data: bool = False,
    *,
    seconds: float | None = None,
) -> Reproduction:
    """Make a folder of a graph of this process and an engine, and run it in a child process.

    Without data, the folder has no value of a weight or an input: it draws others like them.

    Args:
        graph: The report of the graph, its number, or Dynamo's id, such as ``"0/0"``.
        engine: The engine, as the chain spells it.
        folder: The folder to make, which must not be there.
        with_data: True to put the values of weights and inputs into the folder. The program has to
            run with ``COMPOSER_DUMP_DATA=1`` for that.
        seconds: The time limit of a run, after which the engine counts as hanging.

    Returns:
        The folder, and whether the fault shows in it.

    Raises:
        ReproError: the graph was not kept, or the folder cannot be made.
        UnknownNameError: there is no such engine.
    """
    report = graph if isinstance(graph, CompileReport) else _report_of(graph)
    return make(source_of(report, engine), Path(folder), engine, with_data, seconds)


def _report_of(graph: int | str) -> CompileReport:
    for each in reversed(session.reports()):
        if graph in (each.number, each.graph_id):
            return each
    raise ReproError(f"no graph {graph!r} was compiled in this process")


def source_of(report: CompileReport, engine: str) -> Path:
    """Return the folder in which a graph was kept.

    Raises:
        ReproError: it was not kept, or is gone.
    """
    told = [each.engine.get(FACT) for each in report.attempts if each.backend == engine]
    places = [each for each in (report.dumped, *told) if each]
    for each in places:
        if not each.startswith("not written") and (Path(each) / "about.json").is_file():
            return Path(each)
    why = f" ({'; '.join(places)})" if places else ""
    how = 'set COMPOSER_DUMP=FOLDER or the policy\'s repro = "FOLDER", and run the program again'
    raise ReproError(f"graph {report.number} was not kept{why}; {how}")


def failed_engine(report: CompileReport) -> str:
    """Return the first engine that went wrong on a graph; empty if none did."""
    return next((each.backend for each in report.attempts if each.status in FAULTS), "")


def make(
    source: Path,
    folder: Path,
    engine: str = "",
    with_data: bool = False,
    seconds: float | None = None,
) -> Reproduction:
    """Make a folder of a graph that was kept in another one.

    Args:
        source: The folder in which the graph was kept.
        folder: As for :func:`repro`.
        engine: The engine; by default that of ``source``.
        with_data: As for :func:`repro`.
        seconds: As for :func:`repro`.

    Raises:
        ReproError: as for :func:`repro`.
        UnknownNameError: as for :func:`repro`.
    """
    case = _read(source, with_data)
    candidate = dict(_candidate(case.facts, engine))
    if seconds is not None:
        candidate["timeout"] = seconds
    folder = folder.absolute()
    if folder.exists():
        raise ReproError(f"{str(folder)!r} is there already")
    with tempfile.TemporaryDirectory(dir=_parent(folder), prefix=".repro-") as name:
        made = Path(name, "made")
        write(case, made, candidate)
        if is_importable(candidate) and isinstance(find_backend(candidate["backend"]), OnnxEngine):
            made = _smallest(made, Path(name), candidate)
        code, said = run(made, candidate)
        outcome = _OUTCOMES.get(code, f"run.py ended with exit status {code}")
        about = json.loads((made / "about.json").read_text())
        (made / "about.json").write_text(json.dumps({**about, "outcome": outcome}, indent=1))
        made.rename(folder)
    needs = "import composer" in (folder / "run.py").read_text()
    return Reproduction(folder, outcome, code == check.WRONG, needs, said)


def _read(source: Path, with_data: bool) -> Case:
    try:
        return Case.read(source, with_data=with_data)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        why = f"{str(source)!r} has no {missing}"
        if missing == "data.pt":
            why = f"{why}; set COMPOSER_DUMP_DATA=1 with COMPOSER_DUMP, and run the program again"
        raise ReproError(why) from error


def _candidate(facts: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    """Return the engine as the policy of the graph has it."""
    own = facts.get("candidate")
    chain = facts["policy"].get("chain", ())
    named = [each for each in (own, *chain) if each and engine in ("", each["backend"])]
    if not named and not engine:
        raise ReproError("no engine went wrong on this graph; name one with --engine")
    candidate = named[0] if named else {"backend": engine}
    return {"options": {}, **candidate}


def _parent(folder: Path) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReproError(f"{str(folder)!r} cannot be made: {error.strerror}") from error
    return folder.parent


def _smallest(made: Path, room: Path, candidate: Mapping[str, Any]) -> Path:
    """Return the folder of the first part of the graph that shows the fault, else the whole's."""
    regions = room / "regions"
    limit = (candidate.get("timeout") or 0.0) + 5 * _SLACK
    _child([sys.executable, "-m", "composer.tools.regions", str(made), str(regions)], limit)
    for region in sorted(regions.glob("region-*/run.py")):
        code, _ = run(region.parent, candidate)
        if code == check.WRONG:
            made.rename(region.parent / WHOLE)
            return region.parent
    return made


def run(folder: Path, candidate: Mapping[str, Any]) -> tuple[int, str]:
    """Run ``run.py`` of a folder; return its exit status and what it printed."""
    limit = (candidate.get("timeout") or 300.0) + _SLACK
    code, said = _child([sys.executable, str(folder / "run.py")], limit)
    is_python = code == check.WRONG and check.SHOWS not in said  # it ends so after any exception
    return (_BROKEN if is_python else code), said


def _child(command: list[str], limit: float) -> tuple[int, str]:
    """Run a command with this process's modules, and none of its switches."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COMPOSER_")
    }
    environment["PYTHONPATH"] = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return check.WRONG, f"there is no end after {limit:g} seconds: {check.SHOWS}"
    return done.returncode, done.stdout + done.stderr
