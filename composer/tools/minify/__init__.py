"""Finds the smallest program on which an engine still shows a fault.

It begins with a folder of :mod:`composer.tools.repro`, and makes folders of the same form. Each
smaller program is kept as soon as it is found, so a search that was ended goes on from there.
:mod:`~composer.tools.minify.search` has the search, :mod:`~composer.tools.minify.programs` the
changes that it tries, and :mod:`composer.tools.trial` what runs in the child processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import runpy
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer.chain.repro import is_importable
from composer.errors import ReproError, error_line
from composer.graphs import capture, clones
from composer.graphs.case import Case
from composer.graphs.nodes import placeholders_of
from composer.graphs.written import Unsayable, qualified
from composer.tools.minify.programs import Program
from composer.tools.minify.search import Minified, first_wrong, smallest
from composer.tools.repro import WHOLE
from composer.tools.trial import NON_FINITE, NUMBERS, tried

__all__ = ["Minified", "Result", "minify", "smallest"]

_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """The smallest program so far.

    Attributes:
        folder: Its folder; ``python run.py`` in it shows the fault.
        fault: The kind of the fault, such as ``"wrong numbers"``.
        what: What was seen of it.
        calls: The number of operators.
        is_minimal: False if the time was up before the search was over.
        first_wrong: Where numbers are wrong, the first operator that is, with both values.
    """

    folder: Path
    fault: str
    what: str
    calls: int
    is_minimal: bool = False
    first_wrong: str = ""

    @property
    def program(self) -> str:
        """The graph and its inputs as Python."""
        text = (self.folder / "graph.py").read_text()
        return text[text.index("class Graph") :].partition("\n\ndef main")[0].strip()


def minify(
    source: Path,
    folder: Path,
    *,
    seconds: float = 600.0,
    timeout: float | None = None,
    factor: float | None = None,
    said: Callable[[str], object] = lambda line: None,
) -> Result:
    """Find the smallest program that shows the fault which a folder shows.

    Args:
        source: The folder of a graph and an engine, by ``composer repro``.
        folder: The folder for the results. If it has some, the search goes on from there.
        seconds: The time limit.
        timeout: An engine hangs if it takes longer; by default, the limit of ``source``, or 60.
        factor: It is a fault if the engine takes as many times as long as eager mode.
        said: Called with a line on each smaller program.

    Raises:
        ReproError: the folder shows no fault, or its graph cannot be captured again.
        Refusal: no child process can be started here.
    """
    until = time.monotonic() + seconds
    steps = sorted(filter(_is_step, folder.glob("*")), key=_number)
    begin = steps[-1] if steps else _whole(source)
    about = json.loads((begin / "about.json").read_text())
    of = hashlib.sha256((_whole(source) / "graph.py").read_bytes()).hexdigest()
    if steps and about.get("source", of) != of:
        raise ReproError(f"{str(folder)!r} has the search for another graph; say another by --to")
    if not is_importable(about["candidate"]):
        raise ReproError(f"no child process can import {about['candidate']['backend']}")
    limit = timeout or about.get("timeout") or about["candidate"].get("timeout") or _SECONDS
    facts = {**about, "source": of, "timeout": limit, "factor": factor or about.get("factor")}
    facts.setdefault("from_data", about["with_data"])
    faults = tried(begin.absolute(), limit, factor=facts["factor"]).faults
    kind = about.get("fault") or next(iter(faults), "")
    if kind not in faults:
        raise ReproError(f"{str(begin)!r} does not show a fault: {kind}".removesuffix(": "))
    if about.get("is_minimal"):
        return _result(begin, faults[kind], about)
    said(f"{kind}: {faults[kind]}")
    facts["fault"] = kind
    folder.mkdir(parents=True, exist_ok=True)
    with _modes(about), tempfile.TemporaryDirectory(dir=folder.absolute(), prefix=".") as room:
        program, weights = _captured(begin)
        facts["calls"] = len(program.calls)
        trials = _Trials(begin, folder, Path(room), facts, weights, said)
        found = smallest(program.gm, program.inputs, trials.shows, found=trials.keep, until=until)
        if found.is_complete:
            trials.finish(found.program)
    about = facts | json.loads((trials.best / "about.json").read_text())
    return _result(trials.best, trials.what or faults[kind], about)


def _is_step(folder: Path) -> bool:
    return re.fullmatch(r"step-\d+", folder.name) is not None


def _number(step: Path) -> int:
    return int(step.name.rpartition("-")[2])


def _whole(source: Path) -> Path:
    """Return the folder of the graph that torch captured, if the engine runs a model of a part."""
    whole = source / WHOLE
    begin = whole if whole.is_dir() else source
    if not (begin / "run.py").is_file():
        raise ReproError(f"{str(source)!r} has no run.py; make a folder by composer repro")
    return begin


def _result(folder: Path, what: str, about: Mapping[str, Any]) -> Result:
    names = ("fault", "calls", "is_minimal", "first_wrong")
    return Result(folder, what=what, **{name: about[name] for name in names if name in about})


@contextlib.contextmanager
def _modes(about: Mapping[str, Any]) -> Iterator[None]:
    """Set torch's modes to those under which the graph was captured."""
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as modes:
        modes.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(_dtype(about["default_dtype"]))
        modes.enter_context(torch.set_grad_enabled(about["training"]))
        for device, dtype in about["autocast"]:
            modes.enter_context(torch.autocast(device, _dtype(dtype)))
        yield


def _dtype(text: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return dtype


def _captured(folder: Path) -> tuple[Program, frozenset[str]]:
    """Return the program of a folder as Dynamo captures it, and the names of its weights.

    Raises:
        ReproError: Dynamo does not capture it as one graph.
    """
    found: list[tuple[Program, frozenset[str]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        names = [str(node.target) for node in placeholders_of(gm.graph)]
        weights = capture.read_request(gm, inputs).weights
        program = Program.of(gm, clones.copy_inputs(inputs, weights))
        found.append((program, frozenset(names[i] for i in weights)))
        return gm.forward

    written = runpy.run_path(str(folder / "graph.py"))
    module = written["Graph"]()
    run: Any = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    try:
        run(*written["inputs"]())
    except Exception as error:
        raise ReproError(f"{str(folder)!r} cannot be captured: {error_line(error)}") from error
    if not found:
        raise ReproError(f"{str(folder)!r} has a graph without operators")
    return found[0]


def _name_of(call: torch.fx.Node) -> str:
    is_method = isinstance(call.target, str)
    return f"Tensor.{call.target}" if is_method else qualified(call.target)


class _Trials:
    """The folders of programs: those that are tried, and the best so far.

    They do not have the engine's message, since that may name files of the user.
    """

    def __init__(
        self,
        begin: Path,
        folder: Path,
        room: Path,
        facts: Mapping[str, Any],
        weights: frozenset[str],
        said: Callable[[str], object],
    ) -> None:
        self.best = begin
        self.what = ""
        self._folder = folder
        self._room = room
        self._facts = facts
        self._weights = weights
        self._said = said
        self._texts = {each.name: each.read_text() for each in begin.glob("policy.toml")}
        self._texts["run.py"] = (begin / "run.py").read_text()
        self._since = time.monotonic()
        self._seen = ""

    def shows(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Return True if a program shows the fault in a child process."""
        return self._tried(Program(gm, inputs), {})

    def keep(self, program: Program, tries: int) -> None:
        """Keep the program that was tried last as the best."""
        self._move()
        counts = f"{len(program.calls)} operators, {len(program.inputs)} inputs"
        self._said(f"{counts}; {tries} tries, {time.monotonic() - self._since:.0f} s")

    def finish(self, program: Program) -> None:
        """Keep the smallest program, if possible without a file of values."""
        facts: dict[str, Any] = {"is_minimal": True}
        if self._facts["fault"] in (NUMBERS, NON_FINITE):
            call = first_wrong(program, self.shows)
            if call is not None:
                values = "" if self._facts["from_data"] else f": {self._seen}"
                facts["first_wrong"] = f"{_name_of(call)}{values}"
        if self._tried(program, facts, with_data=False) or self._tried(program, facts):
            self._move()

    def _tried(self, program: Program, facts: Mapping[str, Any], *, with_data: bool = True) -> bool:
        shutil.rmtree(self._room / "try", ignore_errors=True)
        try:
            self._write(program, facts, with_data=with_data)
        except Unsayable:
            return False
        fault = self._facts["fault"]
        limit = self._facts["timeout"]
        faults = tried(self._room / "try", limit, factor=self._facts["factor"]).faults
        self._seen = faults.get(fault, "")
        return fault in faults

    def _write(self, program: Program, facts: Mapping[str, Any], *, with_data: bool) -> None:
        names = [str(node.target) for node in placeholders_of(program.gm.graph)]
        weights = {i for i, name in enumerate(names) if name in self._weights}
        told = {**self._facts, "calls": len(program.calls), **facts}
        case = Case.of(program.gm, program.inputs, weights, told, with_data=with_data)
        case.write(self._room / "try", self._texts)

    def _move(self) -> None:
        """Make a step of the program that was tried last, and remove the step before."""
        before = self.best
        is_step = before.parent == self._folder and _is_step(before)
        self.what = self._seen
        self.best = self._folder / f"step-{_number(before) + 1 if is_step else 1}"
        (self._room / "try").rename(self.best)
        if is_step:
            shutil.rmtree(before)
