"""``composer doctor``: tries each engine on two small graphs, and says which it serves here."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import entry_points, metadata
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from composer import _torch, session
from composer.backends import BACKENDS, find_backend, installed_for
from composer.chain.attempt import classify
from composer.chain.candidates import ONLY_TABLES
from composer.cli.usage import Json, fail_on
from composer.errors import ComposerError, OptionError, UnknownNameError, first_line, text_of
from composer.graphs import capture
from composer.policy import Facts, names_code
from composer.policy.resolution import resolve
from composer.records import GraphRequest, Reason, Status
from composer.system import control_flow, distribution, subprocesses
from composer.system.distribution import version_of

_ABSENT = (Reason.NOT_INSTALLED, Reason.NO_DEVICE, Reason.DRIVER_MISSING, Reason.NOT_REGISTERED)
"""The reasons why an engine cannot work on this machine. If the user did not write the chain, they
are not an error."""

_GOOD = Status.SUCCEEDED

_SECONDS = 180.0
"""Seconds that an engine may take for its small graphs."""

Engine = Annotated[str, typer.Argument(help="One engine; by default all of them.")]


@dataclass(frozen=True, slots=True)
class _Row:
    """The result for one engine, a row of the table.

    Attributes:
        engine: The engine's name.
        works: True if it serves a small graph on one of the devices, with eager's numbers.
        serves: The small graphs that it serves: ``inference``, ``training``.
        declines: True if it declines a small graph. It may serve other graphs then.
        in_chain: True if the chain in force has it.
        versions: The versions of its packages, by name.
        devices: The kinds of device on which it works.
        keeps_nan: True if it claims to give NaN wherever eager does; ``None`` if it does not say.
        reason: The code of the reason why it does not serve the first graph that it does not serve.
        message: The reason in words.
        install: The command that installs what it lacks.
    """

    engine: str
    works: bool
    serves: tuple[str, ...]
    declines: bool
    in_chain: bool
    versions: Mapping[str, str]
    devices: tuple[str, ...]
    keeps_nan: bool | None
    reason: str
    message: str
    install: str


def doctor(engine: Engine = "", as_json: Json = False) -> None:
    """Try each engine on two small graphs, and say which it serves and what the others lack.

    The exit status is 1 where an engine of the chain in force neither serves nor declines them.
    """
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    requests = [_request(device) for device in devices]
    chain, is_asked_for = _chain_in_force(requests[0])
    names, expected = list(dict.fromkeys((*BACKENDS.names(), *chain))), chain
    if engine:
        with fail_on(ComposerError):
            find_backend(engine)
        names, expected, is_asked_for = [engine], [engine], True
    rows = [_row(name, requests, in_chain=name in chain) for name in names]
    notes = [*distribution.outside_verified(), *_torch.names.off(look=True)]
    if conflict := distribution.conflict():
        notes.insert(0, conflict)
    broken = [row for row in rows if row.engine in expected and not (row.works or row.declines)]
    if not is_asked_for:
        broken = [row for row in broken if row.reason not in _ABSENT]
    if as_json:
        facts = {"python": platform.python_version(), "torch": torch.__version__, "chain": chain}
        typer.echo(json.dumps({**facts, "engines": [*map(asdict, rows)], "notes": notes}, indent=2))
    else:
        _print(rows, chain, notes)
    if broken:
        raise typer.Exit(1)


def _request(device: str) -> GraphRequest:
    """Return a graph of one operation, with which engines are probed."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.relu, (graph.placeholder("x"),)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    return capture.read_request(gm, [torch.ones(1, device=device)])


def _chain_in_force(request: GraphRequest) -> tuple[list[str], bool]:
    """Return the engines of the policy in force for any model, and True if the user chose them."""
    with fail_on(OptionError, UnknownNameError):
        finders = replace(ONLY_TABLES, installed=partial(installed_for, request))
        configured = session.current().configured
        resolved = resolve(Facts.of(request), finders, configured=configured)
    return [each.name for each in resolved.policy.chain], resolved.names_chain


def _row(name: str, requests: Sequence[GraphRequest], *, in_chain: bool) -> _Row:
    """Try an engine on each device; the reason is that of the first graph it does not serve."""
    tried = {torch.device(each.device).type: _attempts(name, each) for each in requests}
    served = {
        device: [graph for graph, attempt in attempts.items() if attempt["status"] == _GOOD]
        for device, attempts in tried.items()
    }
    first = next(iter(tried.values()))
    serves = dict.fromkeys(itertools.chain.from_iterable(served.values()))
    refused = next((first[graph] for graph in first if graph not in serves), None)
    reason = refused["reason"] if refused else ""
    message = first_line(refused["message"]) if refused else ""
    versions = _versions(name, reason)
    return _Row(
        engine=name,
        works=bool(serves),
        serves=tuple(serves),
        declines=refused is not None and refused["status"] == Status.DECLINED,
        in_chain=in_chain,
        versions=versions,
        devices=tuple(device for device in served if served[device]),
        keeps_nan=first["inference"].get("engine", {}).get("keeps_nan"),
        reason=reason,
        message=message,
        install=_install(name, reason, message, versions),
    )


def _attempts(name: str, request: GraphRequest) -> Mapping[str, Mapping[str, Any]]:
    """Return the engine's attempt on each small graph, made in a child process."""
    payload = json.dumps({"engine": name, "device": torch.device(request.device).type}).encode()
    limits = subprocesses.Limits(isolate=True, timeout=_SECONDS)
    try:
        find_backend(name).probe(request)
        return subprocesses.ask("composer.chain.selftest:in_child", payload, limits)
    except BaseException as error:  # noqa: BLE001  # another package's may raise anything: its row says it
        control_flow.pass_on(error)
        status, reason = classify(error, _packages(name))
        refused = {"status": status, "reason": reason, "message": text_of(error)}
        return {"inference": refused, "training": refused}


def _install(name: str, reason: str, message: str, versions: Mapping[str, str]) -> str:
    """Return the command that installs what an engine lacks; empty if there is none."""
    if "C++ compiler" in message:
        return "install a C++ compiler, such as g++"
    extras = metadata(distribution.NAME).get_all("Provides-Extra") or []
    is_missing = reason == Reason.NOT_INSTALLED or (reason and not versions)
    if is_missing and name in extras:
        return distribution.install(name)
    return ""


def _versions(name: str, reason: str) -> dict[str, str]:
    """Return the versions of an engine's packages, of the one that registers it, or of torch."""
    found = {package: version_of(package) for package in _packages(name)}
    groups = ("composer.backends", "torch_dynamo_backends")
    for entry in itertools.chain.from_iterable(entry_points(group=each) for each in groups):
        if entry.name == name and entry.dist is not None:
            found.setdefault(entry.dist.name, entry.dist.version)
    installed = {package: version for package, version in found.items() if version}
    is_torchs = not installed and reason not in _ABSENT and not names_code(name)
    own = {"torch": torch.__version__} if is_torchs or name == "inductor" else {}
    return own | installed


def _packages(name: str) -> tuple[str, ...]:
    """Return the distributions that an engine says it consists of, besides torch."""
    try:
        return find_backend(name).packages
    except ComposerError:  # two packages claim the name
        return ()


def _print(rows: Sequence[_Row], chain: Sequence[str], notes: Sequence[str]) -> None:
    table = Table(Column("engine", no_wrap=True), "works", "version", "device")
    table.add_column("why not, and what brings it", overflow="fold")
    lines = [f"The chain in force: {', '.join(chain)}."]
    for row in rows:
        remedy = "; ".join(filter(None, (row.message, row.install)))
        works = ", ".join(row.serves) or ("neither graph" if row.declines else "no")
        if not row.reason:
            works = "yes"
        version = " ".join(next(iter(row.versions.items()), ()))
        table.add_row(row.engine, works, version, ", ".join(row.devices), escape(remedy))
        if row.works and row.keeps_nan is False:
            lines.append(f"Note: {row.engine} hides NaN: its option keeps_nan = true keeps it.")
    lines += [f"Note: {note}." for note in notes]
    console = Console()
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
