"""What ``select = "fastest"`` found is remembered: the winner serves, all else is left alone."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from common import compiled, last
from fsspec.implementations.memory import MemoryFileSystem
from naps import NAP, short_nap
from typer.testing import CliRunner

import composer
from composer.backends import dynamo, find_backend
from composer.backends.dynamo import NamedBackend
from composer.chain import walk
from composer.chain.candidates import ONLY_TABLES
from composer.chain.select import choice, lengths
from composer.cli import app
from composer.errors import CacheWarning, OptionError, SandboxRefusal
from composer.knowledge import facts, shared_store
from composer.knowledge.verdict import Verdict
from composer.passes import digests
from composer.policy import Facts
from composer.policy.resolution import resolve
from composer.records import Reason, Status
from composer.system import disk, hardware, warned
from composer.testing import FakeBackend

pytestmark = [
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    pytest.mark.usefixtures("simulated_time"),
]


def double(x: torch.Tensor) -> torch.Tensor:
    return short_nap(x) * 2


class Engine:
    """Doubles its input, after a sleep of so many seconds; it can say what it is made of."""

    def __init__(self, name: str, seconds: float = 0.0, identity: str = "1") -> None:
        self.__name__ = name
        self.seconds = seconds
        self.identity = identity
        self.raises: Exception | None = None
        self.factor = 2
        self.writes = False
        self.builds = 0

    def uuid(self) -> str:
        return f"{self.__name__} {self.identity}"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.builds += 1
        if self.raises:
            raise self.raises

        def run(x: torch.Tensor) -> list[torch.Tensor]:
            time.sleep(self.seconds)
            if self.writes:
                x.add_(1)
            if self.factor == 0:
                raise RuntimeError(f"{self.__name__} was made to raise")
            return [x * self.factor]

        return run


class Chain:
    """A slow engine, a quick one, and one between them that is quicker than eager."""

    def __init__(self) -> None:
        self.slow, self.quick = Engine("slow", NAP * 2), Engine("quick")
        self.second = Engine("second", NAP / 8)
        self.engines = [self.slow, self.quick, self.second]

    def compile(
        self, cache: dict[str, Any] | None = None, **options: Any
    ) -> composer.CompileReport:
        """Compile the same graph anew, and call it once."""
        torch.compiler.reset()
        select = {"by": "fastest", "seconds": 2.0} | options.pop("select", {})
        x = torch.ones(3)
        chain = options.pop("chain", self.engines)
        self.compiled = compiled(double, *chain, select=select, **options)
        with composer.using({"cache": cache or {}}):
            assert torch.equal(self.compiled(x), x * 2)
        return last()

    @property
    def builds(self) -> list[int]:
        return [each.builds for each in self.engines]


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Chain:
    """Its engines have no threads to wait for, are far apart, and hold no memory; no load."""
    monkeypatch.setattr(hardware, "seconds_without_a_core", lambda: 0.0)
    monkeypatch.setattr(walk, "free_memory", lambda: None)  # most of these tests' time
    monkeypatch.setattr(lengths, "_LEAD", 0.0)
    monkeypatch.setattr(lengths, "_FIRST", 0.001)
    return Chain()


def as_if_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_PROCESS", "another")


def kept() -> list[dict[str, Any]]:
    return [entry.facts for entry in Verdict.cache().entries()]


def is_remembered(report: composer.CompileReport) -> bool:
    return any("remembered_in" in a.engine.get("timing", {}) for a in report.attempts)


def test_winner_is_remembered(chain: Chain) -> None:
    """The second time it alone is built; the others are skipped, with their times and the date."""
    first, second = chain.compile(), chain.compile()
    assert first.chosen == second.chosen == "quick"
    assert chain.builds == [1, 2, 1]
    slow, quick, _ = second.attempts
    assert [(a.status, a.reason) for a in second.attempts] == [
        ("not_chosen", "slower"),
        ("succeeded", None),
        ("not_chosen", "slower"),
    ]
    ms = first.attempts[0].engine["timing"]["ms"]
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    assert slow.message.startswith(f"{ms:.3g} ms a call; quick takes ")
    assert f"ms, as measured on {today}" in slow.message
    timing = quick.engine["timing"]
    assert timing["ms"] == first.attempts[1].engine["timing"]["ms"]
    assert timing["measured"].startswith(today)
    assert timing["remembered_in"] == str(Verdict.cache().path)
    assert timing["seconds"] == 0.0


def test_verdict_can_be_read_by_a_person(chain: Chain) -> None:
    """Who won on what, when, with which versions, everyone's times."""
    chain.compile()
    (facts,) = kept()
    assert (facts["chosen"], facts["ranking"]) == ("quick", [1, 2])
    assert facts["model"] == "test_verdict.double"
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["machine"] == list(hardware.describe("cpu"))
    assert facts["threads"] == torch.get_num_threads()
    assert [each["backend"] for each in facts["candidates"]] == ["slow", "quick", "second"]
    assert facts["candidates"][0]["timing"]["ms"] > NAP * 1000


def test_eager_that_won_is_remembered(chain: Chain) -> None:
    """Nothing is tried then."""
    chain.engines = [chain.slow]
    chain.compile()
    again = chain.compile()
    assert (again.chosen, chain.builds) == ("eager", [1])
    assert (again.attempts[0].status, again.attempts[0].reason) == ("not_chosen", "slower")
    assert "eager takes" in again.attempts[0].message


def test_eager_in_the_chain_is_remembered(chain: Chain) -> None:
    """It ends the chain then, too."""
    for _ in range(2):
        report = chain.compile(chain=[chain.slow, "eager", chain.quick])
        assert [a.backend for a in report.attempts] == ["slow", "eager"]
        assert report.chosen == "eager"
    assert chain.builds == [1, 0, 0]


def test_reset_forgets_what_this_process_measured(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process measured is the disk's to forget."""
    chain.compile()
    composer.reset()
    assert not is_remembered(chain.compile())
    as_if_of_another_process(monkeypatch)
    composer.reset()
    assert is_remembered(chain.compile())


def test_forked_process_is_another(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server's workers the first measures."""
    chain.compile()
    composer.reset()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert is_remembered(chain.compile())


def test_verdict_is_on_the_settings_of_before_the_benchmark(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may set the number of threads while it is built or called."""
    usual = choice.fastest
    with monkeypatch.context() as during:

        def fastest(*args: Any) -> Any:
            outcome = usual(*args)
            during.setattr(torch, "get_num_threads", lambda: 77)
            return outcome

        during.setattr(choice, "fastest", fastest)
        chain.compile()
    assert is_remembered(chain.compile())


def test_model_of_any_name_is_remembered(chain: Chain) -> None:
    """Also of one that cannot be printed, or written, or is very long."""
    for name in ("two\nlines", "\udcff", "m" * 1200):
        chain.compile(model=name)
        assert is_remembered(chain.compile(model=name))


def test_winner_that_is_refused_is_forgotten(chain: Chain) -> None:
    """The others are measured; it is not tried twice; what they come to is remembered."""
    chain.compile(verify="compile")
    chain.quick.factor = 3
    report = chain.compile(verify="compile")
    assert report.chosen == "second"
    assert chain.builds == [2, 2, 2]
    assert [a.reason for a in report.attempts] == ["slower", "numeric_mismatch", None]
    assert report.attempts[0].status == "not_chosen"
    again = chain.compile(verify="compile")
    assert (again.chosen, chain.builds) == ("second", [2, 2, 3])
    refused = again.attempts[1]
    assert (refused.status, refused.reason) == ("skipped", "numeric_mismatch")
    assert refused.message.startswith("rejected (numeric_mismatch) when it was tried on ")


def test_winner_that_raises_is_forgotten(chain: Chain) -> None:
    """As one that is refused."""
    chain.compile()
    chain.quick.raises = RuntimeError("no such kernel")
    report = chain.compile()
    assert (report.chosen, chain.builds) == ("second", [2, 2, 2])
    assert report.attempts[1].reason == "build_failed"


def test_winner_that_fails_at_a_call_is_followed_by_the_next_fastest(chain: Chain) -> None:
    """As it was measured; the one slower than eager is not tried."""
    chain.compile()
    report = chain.compile()
    chain.quick.factor = 0
    x = torch.ones(3)
    assert torch.equal(chain.compiled(x), x * 2)
    assert torch.equal(chain.compiled(x), x * 2)
    assert (report.chosen, last().chosen) == ("quick", "second")
    assert chain.builds == [1, 2, 2]


def test_engine_in_quarantine_is_not_recalled(chain: Chain) -> None:
    """It failed in this process: the others are measured, which nobody remembers."""
    chain.compile()
    (before,) = kept()
    f = chain.quick
    f.factor = 0
    chain.compiled(torch.ones(3))
    f.factor = 2
    report = chain.compile()
    assert (report.chosen, report.attempts[1].reason) == ("second", "quarantined")
    assert kept() == [before]
    assert chain.builds == [2, 1, 2]


@pytest.mark.parametrize("options", [{"strict": True}, {"cache": {"verdicts": 0}}])
def test_nothing_is_remembered_where_the_policy_says_so(
    chain: Chain, options: dict[str, Any]
) -> None:
    """Under ``strict`` and with ``[cache] verdicts = 0``, neither written nor read."""
    for _ in range(2):
        assert not is_remembered(chain.compile(**options))
    assert kept() == []


def test_first_of_the_chain_needs_no_verdict(chain: Chain) -> None:
    """Where nothing is measured nothing is looked for, and nothing is made."""
    chain.compile(select={"by": "first"})
    assert not Verdict.cache().path.exists()


def test_engine_that_nobody_can_name_is_measured_again(chain: Chain) -> None:
    """As a fake is: somebody's tests have to pass the second time, too."""
    chain.engines.append(FakeBackend())  # type: ignore[arg-type]
    chain.compile()
    assert kept() == []


def test_slip_in_an_engines_identity_is_told_of(chain: Chain) -> None:
    """Its graph is compiled all the same."""

    class Broken(Engine):
        def uuid(self) -> str:
            raise RuntimeError("who am I?")

    with pytest.warns(
        CacheWarning, match="nobody knows what the engines are: RuntimeError: who am I"
    ):
        report = chain.compile(chain=[Broken("broken"), chain.slow], cache={"failures": 0})
    assert report.chosen == "broken"
    assert kept() == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("80 GiB"),
        OSError(28, "No space left"),
        SandboxRefusal(Status.TIMED_OUT, Reason.TIMEOUT, "did not start", by_others=True),
    ],
)
def test_benchmark_without_one_that_may_be_well_later_is_not_remembered(
    chain: Chain, error: Exception
) -> None:
    """Memory that was short, a disk that was full, a child that a busy machine did not start."""
    chain.second.raises = error
    assert chain.compile().chosen == "quick"
    assert kept() == []


def test_benchmark_with_a_failure_is_remembered_as_long_as_failures(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven days, where others are remembered for thirty."""
    chain.second.raises = FileNotFoundError("no C++ compiler")
    chain.compile()
    assert is_remembered(chain.compile())
    assert last().attempts[2].reason == "build_failed"
    assert not is_remembered(chain.compile(cache={"failures": 0}))
    move_clock(monkeypatch, days=8)
    assert not is_remembered(chain.compile())


def test_engine_that_seems_to_write_to_its_inputs_has_another_chance(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been the program: the verdict holds as long as failures do."""
    chain.second.writes = True
    chain.compile(verify="compile")
    assert last().attempts[2].reason == "mutated_inputs"
    assert is_remembered(chain.compile(verify="compile"))
    move_clock(monkeypatch, days=8)
    assert not is_remembered(chain.compile(verify="compile"))


@pytest.mark.parametrize(("days", "holds"), [(29, True), (31, False), (-2, False)])
def test_verdict_expires(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, days: float, holds: bool
) -> None:
    """After the policy's days; one from the future does not count."""
    chain.compile()
    move_clock(monkeypatch, days)
    assert is_remembered(chain.compile()) is holds


def test_verdict_under_a_load_is_measured_anew_by_a_later_process_without_one(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quieter machine may well have another winner. In the background it serves until then."""
    others = itertools.count(step=1000.0)
    monkeypatch.setattr(hardware, "seconds_without_a_core", lambda: next(others))
    assert loads(chain.compile()) == [True, True, True]
    assert [a.message.endswith("; measured under a load") for a in losers()] == [True, True]
    as_if_of_another_process(monkeypatch)
    composer.reset()
    assert is_remembered(chain.compile())
    assert loads(last()) == [True, True, True]
    assert [a.message.endswith("; measured under a load") for a in losers()] == [True, True]
    monkeypatch.setattr(hardware, "seconds_without_a_core", lambda: 0.0)
    assert is_remembered(chain.compile(select={"background": True}))
    assert loads(chain.compile()) == [None, None, None]
    assert not is_remembered(last())
    assert is_remembered(chain.compile())


def test_verdict_under_a_load_serves_the_process_that_has_measured_it(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the foreground no engine changes once it was chosen."""
    others = itertools.count(step=1000.0)
    monkeypatch.setattr(hardware, "seconds_without_a_core", lambda: next(others))
    chain.compile()
    monkeypatch.setattr(hardware, "seconds_without_a_core", lambda: 0.0)
    assert is_remembered(chain.compile())


class Warming(Engine):
    """Quick from its third call on."""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        run, calls = super().__call__(gm, example_inputs), itertools.count()

        def warming(x: torch.Tensor) -> list[torch.Tensor]:
            time.sleep(NAP * 0.8 if next(calls) < 2 else 0.0)
            return run(x)

        return warming


def test_verdict_of_too_few_rounds_is_not_used_where_there_is_more_time(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of two calls each. One of the engines needs those; ``verify`` would make another."""
    chain.engines = [Warming("warming"), Engine("steady", NAP * 0.6)]
    with monkeypatch.context() as patched:
        patched.setattr(lengths, "MOST_ROUNDS", 0)
        assert chain.compile(verify="off", select={"seconds": 2}).chosen == "steady"
        assert [a.engine["timing"]["rounds"] for a in last().attempts] == [0, 0]
        assert is_remembered(chain.compile(verify="off", select={"seconds": 2}))
        assert is_remembered(chain.compile(verify="off", select={"seconds": 1}))
        move_clock(monkeypatch, days=1.1)
        assert not is_remembered(chain.compile(verify="off", select={"seconds": 2}))
    assert chain.compile(verify="off", select={"seconds": 3}).chosen == "warming"
    assert is_remembered(chain.compile(verify="off", select={"seconds": 4}))
    move_clock(monkeypatch, days=3)
    assert is_remembered(chain.compile(verify="off", select={"seconds": 4}))


class Configured(Engine):
    """An engine that takes options."""

    def __call__(self, gm: Any, example_inputs: list[Any], *, options: Any = None) -> Any:
        return super().__call__(gm, example_inputs)


def test_remembered_losers_have_their_options(chain: Chain) -> None:
    """As they had when they were measured: a chain may have one engine twice."""
    slow = Configured("slow", NAP * 2)
    candidates = [{"backend": slow, "options": {"level": n}} for n in (1, 2)]
    for _ in range(2):
        report = chain.compile(chain=[*candidates, chain.quick])
        assert [each.options for each in report.attempts] == [{"level": 1}, {"level": 2}, {}]
    assert is_remembered(report)


def test_verdict_without_a_load_says_nothing_of_one(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it is reached nor when it is remembered."""
    for _ in range(2):
        assert loads(chain.compile()) == [None, None, None]
        assert not any("under a load" in a.message for a in losers())


def loads(report: composer.CompileReport) -> list[bool | None]:
    return [a.engine["timing"].get("under_load") for a in report.attempts]


def losers() -> list[composer.Attempt]:
    return [a for a in last().attempts if a.reason == "slower"]


def move_clock(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    now = facts.now
    monkeypatch.setattr(facts, "now", lambda: now() + timedelta(days=days))


def change_threads(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)


def change_torch(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")


def change_processor(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_processor", lambda: ("another",))


def change_engine(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    chain.slow.identity = "2"


def change_chain(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    chain.engines.reverse()


def change_float32(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"


CHANGES = [change_threads, change_torch, change_processor, change_float32]


@pytest.mark.parametrize("change", [*CHANGES, change_engine, change_chain])
def test_what_speed_depends_on_is_measured_again(
    chain: Chain,
    monkeypatch: pytest.MonkeyPatch,
    newer_precision: None,
    change: Callable[..., None],
) -> None:
    """Other threads, versions, processors, settings and engines, the losers included."""
    chain.compile()
    change(chain, monkeypatch)
    assert not is_remembered(chain.compile())
    assert len(kept()) == 2


def test_objective_is_told_of(chain: Chain) -> None:
    """A build that counted then is said to have counted."""
    select = {"objective": "amortised", "calls": 10}
    for _ in range(2):
        report = chain.compile(select=select)
    assert "ms a call, its build counted; quick takes" in report.attempts[0].message


def test_cache_that_cannot_be_used_is_no_error(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was measured is known until a reset."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="cannot be"):
        assert chain.compile().chosen == "quick"
    assert is_remembered(chain.compile())
    composer.reset()
    assert not is_remembered(chain.compile())


# --- shared by machines -------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file", "path"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that is not there yet."""
    fsspec.filesystem("memory").store.clear()
    folder = tmp_path / "team" / "verdicts"
    return {"memory": "memory://team/verdicts", "file": folder.as_uri(), "path": str(folder)}[
        request.param
    ]


def files_of(url: str) -> list[str]:
    files, folder = fsspec.core.url_to_fs(url)
    return [Path(each).name for each in files.find(folder)]


def test_verdict_is_shared(chain: Chain, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one machine measured, another of its kind takes over, and keeps."""
    chain.compile({"store": store})
    (name,) = files_of(store)
    (entry,) = Verdict.cache().entries()
    assert name == f"{entry.key}.json"
    Verdict.cache().clear()
    as_if_of_another_process(monkeypatch)
    shared = chain.compile({"store": store})
    assert shared.attempts[1].engine["timing"]["remembered_in"] == store
    assert kept() == [entry.facts]
    own = chain.compile({"store": store})
    assert own.attempts[1].engine["timing"]["remembered_in"] == str(Verdict.cache().path)
    assert chain.builds == [1, 3, 1]


def spoil(**fields: Any) -> Callable[[dict[str, Any]], str]:
    return lambda facts: json.dumps(facts | fields)


def rename_engine(facts: dict[str, Any]) -> str:
    facts["candidates"][1]["backend"] = facts["chosen"] = "os:system"
    return json.dumps(facts)


def lose_times(facts: dict[str, Any]) -> str:
    facts["candidates"][1]["timing"] = None
    return json.dumps(facts)


def be_slower_unmeasured(facts: dict[str, Any]) -> str:
    facts["candidates"][0] |= {"status": "not_chosen", "reason": "slower", "timing": None}
    return json.dumps(facts | {"ranking": [1]})


def escape_terminal(facts: dict[str, Any]) -> str:
    facts["candidates"][0]["message"] = "\x1b[2J"
    return json.dumps(facts)


DAMAGES: list[Callable[[dict[str, Any]], str]] = [
    spoil(ranking=[7]),
    spoil(ranking=[-1]),
    spoil(ranking=[1, 1]),
    spoil(ranking=[]),
    spoil(chosen="eager"),
    spoil(key="b" * 64),
    spoil(learnt="yesterday"),
    spoil(candidates=[]),
    rename_engine,
    lose_times,
    be_slower_unmeasured,
    escape_terminal,
    lambda facts: "",
    lambda facts: "[" * 50_000,
    lambda facts: json.dumps(facts)[:-40],
    lambda facts: " " * shared_store.LIMIT + json.dumps(facts),
    lambda facts: json.dumps(facts).replace('"ms": ', '"ms": -'),
    lambda facts: json.dumps(facts).replace('"ms": ', '"ms": NaN, "x": '),
    lambda facts: json.dumps(facts).replace('"ms": ', f'"ms": {10**400}, "x": '),
]


def test_what_is_no_verdict_is_not_used(chain: Chain) -> None:
    """Others can write to a shared folder: they choose among the chain's own, or nothing."""
    url = "memory://damaged"
    chain.compile({"store": url})
    (facts,) = kept()
    for damage in DAMAGES:
        text = damage(json.loads(json.dumps(facts)))
        fsspec.filesystem("memory").pipe_file(f"/damaged/{facts['key']}.json", text.encode())
        Verdict.cache().clear()
        warned.forget_warnings()
        with pytest.warns(CacheWarning, match="'memory://damaged' holds .* it is not used"):
            report = chain.compile({"store": url})
        assert report.chosen == "quick"
        assert not is_remembered(report)
    assert is_remembered(chain.compile({"store": url}))


def test_no_more_is_read_of_a_file_than_a_verdict_can_have(chain: Chain, tmp_path: Path) -> None:
    """Whoever can write to a shared folder can leave a file larger than any memory."""
    store = tmp_path / "store"
    chain.compile({"store": str(store)})
    (file,) = store.iterdir()
    os.truncate(file, 1 << 36)
    Verdict.cache().clear()
    with pytest.warns(CacheWarning, match="holds what is no verdict"):
        assert not is_remembered(chain.compile({"store": str(store)}))


class Troubled(MemoryFileSystem):
    """A file system that is off line, or does not answer."""

    protocol = "troubled"
    url = "troubled://me:secret@there/verdicts?token=hush&x=1#hash"
    store: ClassVar[dict[str, Any]] = {}
    hangs = False
    asked = 0

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        Troubled.asked += 1
        if self.hangs:
            time.sleep(30)
        raise PermissionError(f"no credentials for {self.url}")


@pytest.mark.usefixtures("real_time")
@pytest.mark.parametrize("hangs", [False, True])
def test_store_in_trouble_is_left_alone(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """One warning, which gives no password or token away, then it is not asked again."""
    fsspec.register_implementation("troubled", Troubled, clobber=True)
    monkeypatch.setattr(Troubled, "hangs", hangs)
    monkeypatch.setattr(Troubled, "asked", 0)
    monkeypatch.setattr(shared_store, "PATIENCE", 0.2 if hangs else 5.0)
    url = Troubled.url
    with pytest.warns(CacheWarning) as told:
        assert chain.compile({"store": url}).chosen == "quick"
    (warning,) = told
    what = "PermissionError: no credentials for troubled://there/verdicts"
    what = "TimeoutError: no answer within 0.2 s" if hangs else what
    assert str(warning.message) == (
        "the verdict store 'troubled://there/verdicts' is not used any more in this process: "
        f"{what}"
    )
    assert is_remembered(chain.compile({"store": url}))
    told_to_all = f"{[each.to_dict() for each in composer.reports()]} {composer.report()}"
    assert "secret" not in told_to_all
    assert "hush" not in told_to_all
    composer.reset()
    torch.compiler.reset()
    assert Troubled.asked == 1


@pytest.mark.parametrize("url", ["nosuch://place", "http://[", "/proc/no/such"])
def test_store_that_cannot_be_is_no_error(chain: Chain, url: str) -> None:
    """A protocol that nobody knows, no URL, a folder that cannot be made."""
    with pytest.warns(CacheWarning, match="is not used any more in this process"):
        assert chain.compile({"store": url}).chosen == "quick"


def test_store_is_the_environments_to_say(
    chain: Chain, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COMPOSER_VERDICT_STORE, over all that the program says."""
    monkeypatch.setenv("COMPOSER_VERDICT_STORE", store)
    chain.compile({"store": "memory://elsewhere"})
    assert len(files_of(store)) == 1


def test_strangers_folder_names_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file found only because it lies in the working directory has nothing sent anywhere."""
    (tmp_path / "composer.toml").write_text('version = 1\n[cache]\nstore = "s3://theirs"\n')
    graph = Facts("Net", "cpu", "float32", training=False, dynamic=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"may not say where verdicts are sent: \[cache\] store"):
        resolve(graph, ONLY_TABLES)
    monkeypatch.setenv("COMPOSER_CONFIG", "composer.toml")
    assert resolve(graph, ONLY_TABLES).cache.store == "s3://theirs"


# --- other processes, other packages ------------------------------------------------------------

ENGINES = """
import time, torch

@torch.library.custom_op("composer_tests::nap_in_a_module", mutates_args=())
def nap(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return x.clone()

nap.register_fake(torch.empty_like)

def double(x):
    return nap(x) * 2

def slow(gm, example_inputs):
    import heavy_engine_of_a_test
    return lambda x: [nap(x) * 2]

def quick(gm, example_inputs):
    return lambda x: [x * 2]

def serve():
    import composer
    chain = ["engines_of_a_test:slow", "engines_of_a_test:quick"]
    options = {"chain": chain, "select": "fastest"}
    f = torch.compile(double, backend="composer", options=options)
    assert torch.equal(f(torch.ones(3)), torch.full((3,), 2.0))
    return composer.reports()[-1]
"""

SECOND = """
import sys
import engines_of_a_test
report = engines_of_a_test.serve()
engines = {"heavy_engine_of_a_test", "onnxruntime", "openvino", "fsspec"}
print(report.chosen, [str(a.status) for a in report.attempts], sorted(engines & set(sys.modules)))
"""


def test_second_process_imports_nothing_but_the_winner(
    run_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the engines that lost, nor what only a shared store needs."""
    (tmp_path / "engines_of_a_test.py").write_text(ENGINES)
    (tmp_path / "heavy_engine_of_a_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    first = importlib.import_module("engines_of_a_test").serve()
    assert first.chosen == "engines_of_a_test:quick"
    assert "heavy_engine_of_a_test" not in sys.modules  # a sandbox has measured it
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_python(SECOND, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    statuses = "['not_chosen', 'succeeded']"
    assert done.stdout.strip() == f"engines_of_a_test:quick {statuses} []"


KILL = """
import json, os, signal, sys, time
from composer.knowledge.shared_store import SharedStore

store = SharedStore(sys.argv[1])

def write():
    for n in range(1_000_000):
        assert store.put(str(n % 7), json.dumps({"n": n, "rest": "x" * (n % 5000)}))

def started():
    pid = os.fork()
    if not pid:
        write()
    return pid

read = 0
for kill in range(12):
    writers = [started(), started()]
    until = time.time() + 0.02 + 0.01 * kill
    while time.time() < until:
        for n in range(7):
            text = store.get(str(n))
            if text is not None:
                read += 1
                assert len(json.loads(text)["rest"]) == json.loads(text)["n"] % 5000
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
assert not store.trouble
assert read
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")
def test_killed_writers_leave_what_was_written(run_python: Any, tmp_path: Path) -> None:
    """Killed at any moment, two at a time: what is got is what was put, and more can be put."""
    done = run_python(KILL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    shared_store.SharedStore(str(tmp_path)).put("more", "{}")
    assert shared_store.SharedStore(str(tmp_path)).get("more") == "{}"


def test_engine_of_another_package_is_identified_without_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the entry point, the package's version and the file; it need not even work."""
    inside = tmp_path / "engine_of_a_test" / "backends"
    about = tmp_path / "engine_of_a_test-1.dist-info"
    inside.mkdir(parents=True)
    about.mkdir()
    (inside.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (about / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\nof_a_test = engine_of_a_test.backends.one:build\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    identities = []
    for version, source in (("1", "a = 1"), ("2", "a = 1"), ("2", "a = 23")):
        (about / "METADATA").write_text(f"Name: engine-of-a-test\nVersion: {version}\n")
        (inside / "one.py").write_text(source)
        digests._hash_of_file.cache_clear()
        dynamo._entry_points.cache_clear()
        identities += [NamedBackend("of_a_test").identity() for _ in range(2)]
    dynamo._entry_points.cache_clear()
    assert len(set(identities)) == 3
    assert identities[0::2] == identities[1::2]
    assert not [name for name in sys.modules if name.startswith("engine_of_a_test")]


@pytest.mark.parametrize(
    "name", ["tensorrt", "inductor", "onnxrt", "eager", "aot_eager", "cudagraphs", "openvino"]
)
def test_known_engines_say_what_they_are_made_of(name: str) -> None:
    """A benchmark among them can be remembered."""
    before = set(sys.modules)
    assert find_backend(name).identity()
    engines = {"tensorrt", "onnxruntime", "onnx", "openvino"} & (set(sys.modules) - before)
    assert not engines


def test_name_that_nobody_registers_is_part_of_the_key(chain: Chain) -> None:
    """One policy serves many machines; where the name is known, there is another benchmark."""
    engines = [*chain.engines, "nobody_registers_this"]
    chain.compile(chain=engines)
    again = chain.compile(chain=engines)
    assert is_remembered(again)
    assert (again.attempts[3].status, again.attempts[3].reason) == ("skipped", "not_registered")
    assert again.attempts[3].message.startswith(
        "unavailable (not_registered) when it was tried on "
    )


def test_cache_list_and_clear(chain: Chain) -> None:
    """The command says who won, and has it forgotten."""
    chain.compile()
    runner = CliRunner()
    (entry,) = json.loads(runner.invoke(app, ["cache", "list", "--json"]).output)["entries"]
    assert entry["kind"] == "verdicts"
    assert entry["what"].startswith("quick  test_verdict.double  cpu  of slow ")
    assert entry["facts"]["chosen"] == "quick"
    assert "1 entry removed" in runner.invoke(app, ["cache", "clear", "verdicts"]).output
    assert not is_remembered(chain.compile())
