"""Tests on small graphs that an engine works with the installed versions.

:func:`require` runs them before an engine's first use, once for these versions of the engine, torch
and Python on this machine, and keeps the outcome on disk. An engine that fails is refused with one
reason, rather than with another error for each graph. ``composer doctor`` runs them each time
(:func:`run_all`).
"""

from __future__ import annotations

import contextvars
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it

from composer import _torch, session
from composer.chain.attempt import try_candidate
from composer.chain.candidates import ChainEntry, entries_of
from composer.chain.select.choice import Tried
from composer.errors import causes, first_line, refuse
from composer.graphs import capture
from composer.knowledge.fingerprint import Fingerprint
from composer.knowledge.self_test import SelfTest
from composer.passes.within_aotautograd import LatePasses
from composer.policy import Cache, Candidate, Policy, Verify
from composer.records import Attempt, Reason, Status, plain
from composer.system import distribution
from composer.system.distribution import version_of

_INCOMPATIBLE = (Status.FAILED, Status.REJECTED, Status.UNAVAILABLE)
"""The statuses that show that an engine does not work. Declining a graph is not one of them."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A graph that an engine is tried on.

    Attributes:
        name: The name of the feature that it tests.
        function: The program.
        inputs: Its arguments on a device.
        training: True if the backward is compiled and compared as well.
    """

    name: str
    function: Callable[..., tuple[torch.Tensor, ...]]
    inputs: Callable[[torch.device], list[torch.Tensor]]
    training: bool


def _infer(
    x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Has a dynamic size, a weight, bools, integers, and a function that ONNX cannot express."""
    rows = torch.relu(F.linear(x, weight))
    return rows, ~mask, index + 1, torch.special.i0(rows).sin()


def _train(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.relu(F.linear(x, weight)),)


def _rows(device: torch.device) -> torch.Tensor:
    return torch.linspace(-2, 2, 20, dtype=torch.float32, device=device).reshape(5, 4)


def _weight(device: torch.device) -> torch.Tensor:
    values = torch.linspace(-1, 1, 12, dtype=torch.float32, device=device)
    return torch.nn.Parameter(values.reshape(3, 4))


def _inference_inputs(device: torch.device) -> list[torch.Tensor]:
    mask = torch.tensor([True, False], device=device)
    index = torch.tensor([3, -7], dtype=torch.int64, device=device)
    return [_rows(device), _weight(device), mask, index]


_CASES = (
    _Case("inference", _infer, _inference_inputs, training=False),
    _Case("training", _train, lambda device: [_rows(device), _weight(device)], training=True),
)


def require(entry: ChainEntry, fingerprint: Fingerprint) -> None:
    """Refuse an engine that does not work with the installed versions.

    Args:
        entry: The candidate that is about to be built.
        fingerprint: Its fingerprint for the graph, on whose device the engine is tried.

    Raises:
        Refusal: ``unavailable`` with ``engine_incompatible``.
    """
    if not entry.backend.has_self_test:
        return
    known = session.current().knowledge.recall(SelfTest, fingerprint, entry.cache)
    # The outcome holds for every policy, so the options of one chain are not part of it.
    bare = Candidate(backend=entry.candidate.backend)
    outcome = known.fact or _learnt(entry, fingerprint, run_all(bare, fingerprint.request.device))
    if outcome.why:
        refuse(Status.UNAVAILABLE, Reason.ENGINE_INCOMPATIBLE, outcome.why)


def _learnt(entry: ChainEntry, fingerprint: Fingerprint, tried: Mapping[str, Tried]) -> SelfTest:
    """Remember and return the outcome of the attempts on the small graphs."""
    failed = [each for each in tried.values() if each.attempt.status in _INCOMPATIBLE]
    is_passing = any(map(_says_nothing_of_versions, failed))
    why = _message(entry, failed[0].attempt) if failed and not is_passing else ""
    outcome = SelfTest(backend=entry.candidate.name, why=why)
    session.current().knowledge.learn(outcome, fingerprint, entry.cache, only_here=is_passing)
    return outcome


def _says_nothing_of_versions(failed: Tried) -> bool:
    """Return True for a lack of memory, and for an error of the system, such as a full disk.

    A library that cannot be loaded, or lacks a file, may well be of the wrong version.
    """
    if failed.attempt.reason is Reason.OUT_OF_MEMORY:
        return True
    found = causes(failed.error) if failed.error is not None else ()
    of_system = (each for each in found if isinstance(each, OSError) and each.errno)
    return any(not isinstance(each, FileNotFoundError) for each in of_system)


def in_child(payload: bytes, ready: Callable[[], None]) -> dict[str, Any]:
    """Make the attempts on the small graphs in a child process, for ``composer doctor``.

    The outcome replaces the one that is kept on disk.
    """
    arguments = json.loads(payload)
    ready()
    candidate = Candidate(backend=arguments["engine"])
    tried = run_all(candidate, arguments["device"])
    (entry,) = entries_of(Policy(chain=(candidate,)))
    if entry.backend.has_self_test:
        first = _CASES[0]
        gm = torch.fx.symbolic_trace(first.function)
        request = capture.read_request(gm, first.inputs(torch.device(arguments["device"])))
        _learnt(entry, Fingerprint(request, (entry.parts,)), tried)
    return {name: plain(each.attempt) for name, each in tried.items()}


def run_all(candidate: Candidate, device: str) -> dict[str, Tried]:
    """Return the result of trying the engine on each small graph, by the graph's name.

    They do not depend on the passes and settings of the current compile, or on the program's modes.

    Args:
        candidate: The engine.
        device: The kind of device: ``"cpu"``, ``"cuda"``.
    """
    nothing_set = contextvars.Context()
    return {
        case.name: nothing_set.run(_try, candidate, case, torch.device(device)) for case in _CASES
    }


def _try(candidate: Candidate, case: _Case, device: torch.device) -> Tried:
    """Make one attempt, compared with eager.

    It runs in this thread: in a forked child with torch 2.11, another thread would end the process.
    """
    policy = Policy(
        chain=(candidate,),
        min_coverage=0.0,
        verify=Verify(when="compile"),
    )
    (entry,) = entries_of(policy, Cache(failures=0.0, artefacts=0.0))
    no_autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.set_grad_enabled(case.training), no_autocast:
        inputs: list[Any] = case.inputs(device)
        gm = torch.fx.symbolic_trace(case.function)
        fakes = _torch.fakes.fakes_of(inputs, dynamic=() if case.training else (0,))
        for node, fake in zip(gm.graph.find_nodes(op="placeholder"), fakes, strict=True):
            node.meta["example_value"] = fake
        with _torch.compiles.captured_with(fakes, inputs):
            return try_candidate(capture.read_request(gm, inputs), entry, LatePasses())


def _message(entry: ChainEntry, failed: Attempt) -> str:
    """Return the record's message: the versions that do not work together, and what to do."""
    versions = {name: version_of(name) for name in entry.backend.packages}
    engine = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    around = f"torch {torch.__version__} and Python {platform.python_version()}"
    message = f"{engine} with {around} fails composer's own test: {first_line(failed.message)}"
    remedy = f"`composer doctor {entry.candidate.name}` tries it again"
    return "; ".join((message, *distribution.outside_verified(), remedy))
