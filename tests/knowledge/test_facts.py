"""A fact is forgotten when a part of the fingerprint changes that it depends on, and only then."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from composer.backends.base import Backend
from composer.knowledge import facts, fingerprint
from composer.knowledge.chosen import Chosen, for_lock
from composer.knowledge.facts import Fact, Knowledge
from composer.knowledge.failure import Failure
from composer.knowledge.fingerprint import CandidateParts, Fingerprint
from composer.knowledge.part import Part
from composer.knowledge.quarantine import Quarantined
from composer.knowledge.self_test import SelfTest
from composer.knowledge.verdict import Verdict
from composer.passes.resolve import SharedPasses
from composer.policy import Cache, Policy
from composer.records import Attempt, End, GraphRequest, Outcome, Reason, Status
from composer.system.disk import this_process

CACHE = Cache()
KINDS: list[type[Fact]] = [Failure, Verdict, SelfTest, Quarantined, Chosen, Part]


class Engine(Backend):
    """An engine that says what it is."""

    def __init__(self, identity: str | None = "engine 1") -> None:
        self._identity = identity

    def identity(self) -> str | None:
        return self._identity

    def build(self, request: Any) -> Any:
        raise NotImplementedError


ENGINE = Engine()


def request() -> GraphRequest:
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    return GraphRequest(
        gm=gm,
        example_inputs=(),
        weights=frozenset(),
        graph_id="0/0",
        graph_key="a" * 64,
        graph_digest="b" * 64,
        model="Net",
        device="cpu",
        dtype="float32",
        training=False,
        dynamic=False,
        nodes=1,
        inputs=(),
    )


def made(
    candidate: dict[str, Any] | None = None, graph: dict[str, Any] | None = None, code: str = ""
) -> Any:
    """Return the fingerprint of one candidate for one graph."""
    usual = CandidateParts(
        name="engine",
        backend=ENGINE,
        in_chain="engine",
        options="[]",
        precision="",
        limits="120 s",
        build="auto 0.5",
        terms="0.5",
    )
    asked = dataclasses.replace(request(), **(graph or {}))
    parts = {"operations": code}
    return Fingerprint(asked, (dataclasses.replace(usual, **(candidate or {})),), parts)


def fact(kind: type[Fact], of: Fingerprint) -> Fact:
    """Return a fact of a kind that was learnt about these candidates."""
    if kind is Quarantined:
        return Quarantined(in_chain="engine")
    if kind is Part:
        return Part(backend="engine", wide=(0, 2))
    if kind is SelfTest:
        return SelfTest(backend="engine", why="")
    if kind is Chosen:
        graph = Chosen.of(of.request, for_lock(of.request, Policy(), SharedPasses(), {}))
        return graph.model_copy(update={"engine": "engine", "parts": of.named_parts})
    if kind is Failure:
        crash = Attempt("engine", Status.CRASHED, Reason.CRASHED, "signal 11", 1.0)
        return Failure.of(of.request, crash)
    timing = {"ms": 1.0, "eager_ms": 2.0, "rounds": 9, "seconds": 1.0}
    won = Attempt("engine", Status.SUCCEEDED, None, "", 1.0, timing=timing)
    outcome = Outcome(
        ends=(End(won, None),), chosen="engine", compiled=print, passes=(), ranking=(0,)
    )
    return Verdict.of(of, outcome, 1.0)


CHANGES: dict[str, tuple[Any, ...]] = {
    "graph": ({}, {"graph_digest": "c" * 64}),
    "compile": ({}, {"graph_key": "c" * 64}),
    "candidate": ({"in_chain": print}, {}),
    "engine": ({"backend": Engine("engine 2")}, {}),
    "options": ({"options": "[('threads', 2)]"}, {}),
    "mode": ({}, {"mode": "max-autotune"}),
    "precision": ({"precision": "bf16"}, {}),
    "limits": ({"limits": "121 s"}, {}),
    "build": ({"build": "auto 0.0"}, {}),
    "terms": ({"terms": "0.6"}, {}),
    "device": ({}, {"device": "meta"}),
    "named_parts": ({}, {}, "sin"),
}
"""Changes of one part each."""

DEPENDS = {
    "mode": {"options"},
    "engine": {"engine", "identity"},
    "options": {"options", "candidate"},
}
"""The parts that a change concerns, where its name is none of them."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_forgets_the_facts_that_depend_on_it(kind: type[Fact], change: str) -> None:
    """And no others: a limit forgets no verdict, an option no test of an engine."""
    knowledge = Knowledge()
    knowledge.learn(fact(kind, made()), made(), CACHE)
    assert knowledge.recall(kind, made(), CACHE).fact is not None
    is_concerned = not DEPENDS.get(change, {change}).isdisjoint(kind.depends_on)
    found = knowledge.recall(kind, made(*CHANGES[change]), CACHE).fact
    assert (found is None) == is_concerned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["versions", "machine", "settings"])
def test_a_change_of_the_machine_forgets_what_depends_on_it(
    kind: type[Fact], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions, the processor, the number of threads."""
    knowledge = Knowledge()
    knowledge.learn(fact(kind, made()), made(), CACHE)
    if part == "versions":
        monkeypatch.setattr(fingerprint, "version_of", lambda name: "0.0")
    elif part == "machine":
        monkeypatch.setattr(fingerprint.hardware, "describe", lambda device: ("another",))
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found = knowledge.recall(kind, made(), CACHE).fact
    assert (found is None) == (part in kind.depends_on)


def test_settings_are_those_of_when_the_fingerprint_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that sets the number of threads does not change what a benchmark is about."""
    before = made()
    key = before.key(Verdict.depends_on)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert before.key(Verdict.depends_on) == key
    assert made().key(Verdict.depends_on) != key


def test_the_oldest_facts_are_forgotten_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that compiles without end does not fill the memory with them."""
    monkeypatch.setattr(facts, "KEPT_FACTS", 2)
    knowledge = Knowledge()
    prints = [made(graph={"graph_key": digit * 64}) for digit in "123"]
    for each in prints:
        knowledge.learn(Quarantined(in_chain="engine"), each, CACHE)
    found = [knowledge.recall(Quarantined, each, CACHE).fact for each in prints]
    assert [each is not None for each in found] == [False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_forgets_what_this_process_learnt(
    kind: type[Fact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of an engine stays, and so does what another process has left on disk."""
    knowledge = Knowledge()
    learnt = fact(kind, made())
    knowledge.learn(learnt, made(), CACHE)
    after = knowledge.successor()
    assert (after.recall(kind, made(), CACHE).fact is None) != kind.outlives_reset
    monkeypatch.setattr("composer.knowledge.facts.this_process", lambda: "another")
    another = Knowledge().recall(kind, made(), CACHE).fact
    assert (another is not None) == (kind.limit > 0)


@pytest.mark.parametrize("kind", [Failure, Verdict])
def test_an_engine_without_identity_leaves_nothing(kind: type[Fact]) -> None:
    """Nobody could tell later if it is the same engine."""
    unknown = made({"backend": Engine(None)})
    knowledge = Knowledge()
    assert knowledge.learn(fact(kind, made()), unknown, CACHE)
    assert knowledge.recall(kind, unknown, CACHE).fact is None
    assert kind.cache().entries() == []


def test_a_verdict_with_a_failure_depends_on_the_limits() -> None:
    """The candidate that failed may be accepted under another limit."""
    verdict = fact(Verdict, made())
    assert isinstance(verdict, Verdict)
    timed_out = {"status": Status.TIMED_OUT, "reason": Reason.TIMEOUT}
    failed = verdict.candidates[0].model_copy(
        update={"backend": "slow", "timing": None} | timed_out
    )
    both = verdict.model_copy(update={"candidates": (*verdict.candidates, failed)})
    assert both.fits(made())
    assert not both.fits(made({"limits": "1200 s"}))
    assert verdict.fits(made({"limits": "1200 s"}))


def verdict_at(size: int, process: str) -> Verdict:
    """Return the verdict of a process at a size."""
    verdict = fact(Verdict, made())
    assert isinstance(verdict, Verdict)
    (timed,) = verdict.candidates
    sized = timed.model_copy(update={"timing": {**timed.figures, "size": size}})
    return verdict.model_copy(update={"candidates": (sized,), "process": process})


@pytest.mark.parametrize("on", ["the same disk", "a store"])
def test_processes_that_measure_other_sizes_keep_the_verdicts_of_each_other(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of them has in its memory is not all that there is by now."""
    settings = Cache(store=str(tmp_path / "store") if on == "a store" else None)
    first, second, third = Knowledge(), Knowledge(), Knowledge()
    for knowledge, process, size in ((first, "1", 4), (second, "2", 64), (first, "1", 1024)):
        if settings.store:
            monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / process))
        verdict = verdict_at(size, process)
        knowledge.learn(verdict, made(), settings, join=Verdict.and_at)
    if settings.store:
        monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / "3"))
    found = third.recall(Verdict, made(), settings).fact
    assert found is not None
    assert {each.size for each in found.at_all_sizes} == {4, 64, 1024}


@pytest.mark.parametrize("kind", KINDS)
def test_the_lock_alone_is_asked_where_it_is_given(kind: type[Fact]) -> None:
    """Nothing that this process has learnt, and nothing on disk, is found then."""
    knowledge = Knowledge()
    knowledge.learn(fact(kind, made()), made(), CACHE)
    assert knowledge.recall(kind, made(), CACHE, only=()).fact is None
    others = [fact(each, made()) for each in KINDS if each is not kind]
    assert knowledge.recall(kind, made(), CACHE, only=others).fact is None


@pytest.mark.parametrize("change", CHANGES)
def test_an_entry_of_the_lock_is_found_by_the_named_parts(change: str) -> None:
    """They alone say if it is the same graph under the same policy and passes."""
    entry = fact(Chosen, made())
    only = [*(fact(each, made()) for each in KINDS if each is not Chosen), entry]
    assert Knowledge().recall(Chosen, made(), CACHE, only=only).fact == entry
    found = Knowledge().recall(Chosen, made(*CHANGES[change]), CACHE, only=only).fact
    assert (found is None) == (change == "named_parts")


def test_every_kind_of_fact_is_tested_here() -> None:
    """A kind that is added gets its line in the list above."""
    ours = [each for each in Fact.__subclasses__() if each.__module__.startswith("composer.")]
    assert set(ours) == set(KINDS)


class Slow(Fact):
    """A kind of fact that a test adds."""

    kind: ClassVar[str] = "slow"
    depends_on: ClassVar[tuple[str, ...]] = ("graph", "engine", "versions")
    limit: ClassVar[int] = 1 << 20

    milliseconds: float


def test_a_kind_of_fact_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept in memory and on disk, expires, and depends on its parts."""
    knowledge = Knowledge()
    assert knowledge.learn(Slow(milliseconds=3.0), made(), CACHE) == ""
    known = knowledge.recall(Slow, made(), CACHE)
    assert known.fact is not None
    assert known.fact.milliseconds == 3.0
    assert known.fact.process == this_process()
    assert knowledge.recall(Slow, made({"limits": "1 s"}), CACHE).fact is not None
    assert knowledge.recall(Slow, made(graph={"graph_digest": "c" * 64}), CACHE).fact is None
    knowledge.forget(Slow, made())
    assert knowledge.recall(Slow, made(), CACHE).fact is None


def test_nothing_else_makes_a_key() -> None:
    """The digest that keys are made by is taken by the fingerprint and by caches of artefacts."""
    package = Path(fingerprint.__file__).parents[1]
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\bdigest_of\(", path.read_text())
    }
    assert users == {
        "system/disk.py",
        "knowledge/fingerprint.py",
        "backends/tensorrt/regions.py",
        "backends/tensorrt/plan.py",
    }
