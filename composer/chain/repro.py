"""Writes a folder for each engine that goes wrong on a graph, by which others can see it.

The policy's ``repro`` names where. ``COMPOSER_DUMP`` has every graph written, also without a fault;
:mod:`composer.tools.repro` makes such a folder of one. A folder is a
:class:`~composer.graphs.case.Case` with the policy and ``run.py``, which compares the engine with
eager mode. It imports composer only for an engine that exists in composer alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from composer.backends import find_backend
from composer.backends.dynamo import CallableBackend, NamedBackend
from composer.chain.candidates import ChainEntry
from composer.errors import error_line
from composer.graphs.case import Case, versions
from composer.passes.debug import dump
from composer.policy import DYNAMO, names_code
from composer.policy.resolution import Resolved
from composer.policy.spelling import spelled
from composer.policy.switches import is_on
from composer.records import Attempt, GraphRequest, Status, plain
from composer.system import control_flow

FAULTS = (Status.FAILED, Status.REJECTED, Status.TIMED_OUT, Status.CRASHED)

FACT = "repro"
"""The key of an attempt's facts that names the folder, or says why there is none."""

_MOST_FOLDERS = 100
_SECONDS = 300.0

_NOT_TOLD = frozenset({"locked", "model", "repro"})
"""Fields of the policy that name places and things of the user. No number depends on them."""

_WORD = re.compile(r"[\w+,-]*|[\w.]+:[\w.]+")
"""Matches texts of a policy that are told: words of composer's and of engines, names of code."""

_TUNING = ("freeze", "passes")
"""Fields of the policy under which an engine runs the graph another way."""

_ALONE: dict[str, Any] = {
    "strict": True,
    "on_runtime_error": "raise",
    "min_coverage": 0.0,
    "locked": False,
    "select": {"by": "first", "background": False},
    "verify": "off",
    "isolate": False,
    "precision": "fp32",
    "passes": [],
}
"""The policy of a program that shows one engine, whatever a policy file beside it says of these."""

_RUN = '''"""{title}

Exit status 1: the fault shows. 0: it does not. 2: eager mode fails on these values.
"""

import sys

sys.dont_write_bytecode = True  # such files name folders

{imports}
from check import Settings, main
from graph import Graph, inputs

{engine}

if __name__ == "__main__":
    torch.set_default_dtype({dtype})
    main(Graph, inputs, engine, Settings({settings}))
'''


@dataclass(frozen=True)
class Kept:
    """One graph that can be written, for the engines that go wrong on it.

    Attributes:
        entries: The candidates.
        dumped: The folder of the graph in ``COMPOSER_DUMP``, or why there is none; empty without.
        case: The graph; ``None`` if nobody asked for it, or it cannot be written.
        trouble: Why it cannot be written.
        root: The folder for the folders of engines; ``None`` if the policy names none.
        key: The graph's key, which makes the names of its folders.
    """

    entries: Sequence[ChainEntry]
    dumped: str = ""
    case: Case | None = None
    trouble: str = ""
    root: Path | None = None
    key: str = ""

    @staticmethod
    def of(request: GraphRequest, resolved: Resolved) -> Kept:
        """Return the graph, if the policy or ``COMPOSER_DUMP`` asks for it. It never raises."""
        named = resolved.policy.repro
        dumps = dump.folder()
        kept = Kept(resolved.entries, key=request.graph_key)
        if named is None and dumps is None:
            return kept
        try:
            root = None if named is None else Path(named).absolute()
            kept = dataclasses.replace(kept, root=root)
            case = Case.of_request(request, with_data=is_on("COMPOSER_DUMP_DATA"))
            precision = resolved.policy.precision
            more: dict[str, Any] = {"policy": told(resolved)}
            if precision.mode != "fp32":
                more["max_error"] = precision.max_error
            case = dataclasses.replace(case, facts={**case.facts, **more})
            dumped = ""
            if dumps is not None:
                folder = dumps.path / f"graph-{request.number}"
                case.write(folder, policy_file(case.facts["policy"]))
                dumped = str(folder)
        except Exception as error:  # noqa: BLE001  # recorded where an engine goes wrong
            control_flow.pass_on(error)
            trouble = f"not written: {error_line(error)}"
            return dataclasses.replace(kept, trouble=trouble, dumped=trouble if dumps else "")
        if root is not None:  # folders that are not asked for one by one never have data
            kept = dataclasses.replace(kept, case=dataclasses.replace(case, data={}))
        return dataclasses.replace(kept, dumped=dumped)

    def noted(self, attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
        """Return the attempts; each that went wrong names its folder, or why there is none."""
        return tuple(map(self._noted, attempts))

    def _noted(self, attempt: Attempt) -> Attempt:
        is_old = FACT in attempt.engine
        if self.root is None or is_old or attempt.status not in FAULTS:
            return attempt
        try:
            told = self.trouble or self._written(attempt)
        except Exception as error:  # noqa: BLE001  # recorded, and never the user's problem
            control_flow.pass_on(error)
            told = f"not written: {error_line(error)}"
        return dataclasses.replace(attempt, engine={**attempt.engine, FACT: told})

    def _written(self, attempt: Attempt) -> str:
        """Write the folder of an attempt, unless an earlier one of this engine has."""
        assert self.root is not None
        assert self.case is not None
        options = hashlib.sha256(repr(sorted(attempt.options.items())).encode()).hexdigest()[:6]
        who = f"{attempt.who} {options}" if attempt.options else attempt.who
        folder = self.root / re.sub(r"\W+", "_", f"{self.key[:12]} {who}")
        if folder.is_dir():
            return str(folder)
        if len([*self.root.glob("*")]) >= _MOST_FOLDERS:
            return f"not written: there are {_MOST_FOLDERS} folders already"
        try:
            write(self.case, folder, self._candidate(attempt), attempt)
        except OSError:
            if not folder.is_dir():  # else another thread or process has written it
                raise
        return str(folder)

    def _candidate(self, attempt: Attempt) -> dict[str, Any]:
        """Return the engine as a policy file spells it, with a time limit if it exceeded one."""

        def unlike(entry: ChainEntry) -> tuple[bool, bool]:
            one = entry.candidate
            return one.name != attempt.backend, plain(one.options) != attempt.options

        entry = min(self.entries, key=unlike)
        candidate = {"backend": spelled(entry.candidate.backend), "options": attempt.options}
        if attempt.status is Status.TIMED_OUT:
            candidate["timeout"] = entry.limits.timeout
        if attempt.precision is not None:
            candidate["precision"] = attempt.precision
        return candidate


def told(resolved: Resolved) -> dict[str, Any]:
    """Return the fields of a policy that a folder may tell: no path, and no name of the user's."""
    policy = resolved.policy
    fields = sorted(policy.model_fields_set - _NOT_TOLD)
    told: dict[str, Any] = _words({name: spelled(getattr(policy, name)) for name in fields})
    return told


def write(
    case: Case, folder: Path, candidate: Mapping[str, Any], attempt: Attempt | None = None
) -> None:
    """Write the folder of an engine that goes wrong on a graph.

    Args:
        case: The graph.
        folder: The folder, which must not be there.
        candidate: The engine, as a policy file spells it.
        attempt: What happened; ``None`` if that is not known.

    Raises:
        OSError: the folder is there, or cannot be written.
    """
    ended = "" if attempt is None else f": {attempt.status} ({attempt.reason})"
    candidate = {**_words(candidate), "backend": candidate["backend"]}
    backend = find_backend(candidate["backend"]) if is_importable(candidate) else None
    packages = () if backend is None else backend.packages
    found = {**case.facts["versions"], **versions(packages)}
    title = f"{candidate['backend']} on a graph{ended}."
    texts = {"run.py": program(case, title, candidate), **policy_file(case.facts["policy"])}
    case.write(folder, texts, candidate=candidate, title=title, versions=found)


def program(case: Case, title: str, candidate: Mapping[str, Any]) -> str:
    """Return ``run.py`` for an engine that ``torch.compile`` calls."""
    imports = "import torch"
    if not is_importable(candidate):
        place = f"put the engine {candidate['backend']} here"
        return script(case, title, imports, f"\nsys.exit({place!r})\n", candidate)
    line = _engine_line(candidate, case.facts)
    for name in ("pkgutil", "composer"):
        if f"{name}." in line:
            imports = f"import {name}\n{imports}"
    function = f"\ndef engine(graph):\n    {line}\n"
    return script(case, title, imports, function, candidate)


def script(case: Case, title: str, imports: str, engine: str, candidate: Mapping[str, Any]) -> str:
    """Return ``run.py``, with lines that define ``engine``."""
    facts = case.facts
    bounds = facts["policy"].get("verify", {})
    pairs = "".join(f"({device!r}, {dtype})," for device, dtype in facts["autocast"])
    seconds = candidate.get("timeout") or _SECONDS
    settings = [f"grad={facts['training']}", f"seconds={seconds}", f"autocast=({pairs})"]
    if _low_precision(candidate, facts):
        settings.append(f"share={facts['max_error']}")
    if isinstance(bounds, Mapping):
        told = {name: bounds.get(name) for name in ("rtol", "atol")}
        settings += [f"{name}={value}" for name, value in told.items() if value is not None]
    return _RUN.format(
        title=title,
        imports=imports,
        engine=engine,
        dtype=facts["default_dtype"],
        settings=", ".join(settings),
    )


def is_importable(candidate: Mapping[str, Any]) -> bool:
    """Return True if another process can find the engine by its name."""
    backend = candidate["backend"]
    if not names_code(backend):
        return True
    module, _, _ = backend.partition(":")
    try:
        found = pkgutil.resolve_name(backend)
    except (ImportError, AttributeError, ValueError):
        return False
    return module != "__main__" and callable(found)


def _engine_line(candidate: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the body of the function that has an engine compile a graph."""
    name = candidate["backend"]
    options = candidate["options"]
    precision = _low_precision(candidate, facts)
    given = {"dynamic": repr(facts["dynamic"] or None)}
    if options:
        given["options"] = repr(options)
    found = None if precision else find_backend(name)  # composer alone lowers the precision
    if found is not None and name == "inductor":
        if facts["mode"] is not None and options:
            of_mode = f"torch._inductor.list_mode_options({facts['mode']!r})"
            given["options"] = f"{{**{of_mode}, **{options!r}}}"
        elif facts["mode"] is not None:
            given["mode"] = repr(facts["mode"])
        backend = repr(name)
    elif isinstance(found, CallableBackend) and names_code(name):
        backend = f"pkgutil.resolve_name({name!r})"
    elif isinstance(found, NamedBackend):
        backend = repr(name.removeprefix(DYNAMO))
    else:
        policy = {"chain": [{"backend": name, "options": options}], **_ALONE}
        policy |= {each: facts["policy"][each] for each in _TUNING if each in facts["policy"]}
        if precision:
            policy["precision"] = precision
        given["options"] = repr(policy)
        backend = "composer.__name__"
    arguments = ", ".join(f"{key}={text}" for key, text in given.items())
    return f"return torch.compile(graph, backend={backend}, {arguments})"


def _low_precision(candidate: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
    """Return the policy's precision in which an engine runs; ``None`` if it is the graph's."""
    if "max_error" not in facts:
        return None
    precision = candidate.get("precision", facts["policy"]["precision"])
    return None if precision == "fp32" else precision


def policy_file(policy: Mapping[str, Any]) -> dict[str, str]:
    """Return the file of a policy, by its name."""
    return {"policy.toml": tomli_w.dumps({"version": 1, "defaults": dict(policy)})}


def _words(value: Any) -> Any:
    """Return a value of a policy as TOML can hold it, with no text but words, and without ``when``.

    Other texts may name a file, a model or a person.
    """
    if isinstance(value, Mapping):
        told = dict(value)
        told.pop("when", None)
        return {key: _words(each) for key, each in told.items() if _is_told(each)}
    if isinstance(value, list | tuple):
        return [*map(_words, filter(_is_told, value))]
    return plain(value)


def _is_told(value: Any) -> bool:
    return bool(_WORD.fullmatch(value)) if isinstance(value, str) else value is not None
