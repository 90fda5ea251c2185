"""The memory of failures: what crashed, hung or failed dearly is not paid for again."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import textwrap
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from torch._dynamo import lookup_backend
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from typer.testing import CliRunner

import composer
from composer.backends.base import Backend, Build, BuildRequest
from composer.backends.dynamo import CallableBackend
from composer.backends.tensorrt.cache import plans
from composer.chain import candidates
from composer.cli import app
from composer.errors import FallbackWarning
from composer.knowledge import failure
from composer.system import disk, warned
from composer.telemetry import notices
from composer.testing import FakeBackend

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

Run = Callable[..., subprocess.CompletedProcess[str]]


def fails_late(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """An engine whose build fails when it has cost something."""
    time.sleep(failure.WORTH_SECONDS)
    raise RuntimeError("no kernel for this")


def fails_at_once(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    raise RuntimeError("no kernel for this")


def fills_the_disk(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    time.sleep(failure.WORTH_SECONDS)
    raise OSError(28, "No space left on device")


def verdicts() -> list[tuple[str, str | None]]:
    return [(each.status, each.reason) for each in last().attempts]


def again(*chain: Any, **options: Any) -> composer.Attempt:
    """The first attempt when the same graph is compiled anew."""
    torch.compiler.reset()
    x = torch.ones(3)
    torch.testing.assert_close(compiled(torch.sin, *chain, **options)(x), torch.sin(x))
    return last().attempts[0]


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth remembering takes less than in earnest."""
    monkeypatch.setattr(failure, "WORTH_SECONDS", 0.1)


def as_if_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_PROCESS", "another")


def test_failed_build_is_not_paid_for_again() -> None:
    """The second time the candidate is skipped, with what it said the first time."""
    first = again(fails_late)
    assert (first.status, first.reason) == ("failed", "build_failed")
    second = again(fails_late)
    assert (second.status, second.reason) == ("skipped", "known_failure")
    assert "failed (build_failed) less than a minute ago: no kernel for this" in second.message
    assert "`composer cache clear failures`" in second.message
    assert (second.error_type, second.traceback) == ("RuntimeError", first.traceback)
    assert 'raise RuntimeError("no kernel for this")' in second.traceback


def test_quick_failure_is_tried_again() -> None:
    """News are worth more than a moment."""
    assert again(fails_at_once).status == "failed"
    assert again(fails_at_once).status == "failed"


def test_full_disk_is_tried_again() -> None:
    """What the engine is not to blame for may be well the next time."""
    assert again(fills_the_disk).status == "failed"
    assert again(fills_the_disk).status == "failed"


@pytest.mark.parametrize(
    "error",
    [
        RecursionError("maximum recursion depth exceeded"),
        DeprecationWarning("an old name"),
        ModuleNotFoundError("No module named 'kernels'", name="kernels"),
        InductorError(CppCompileError(["g++"], "Python.h: No such file"), None),
        InductorError(InvalidCxxCompiler(), None),
    ],
    ids=lambda error: type(getattr(error, "inner_exception", error)).__name__,
)
def test_what_the_environment_is_to_blame_for_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be mended, and nothing by which a failure is known would tell; also where wrapped."""
    monkeypatch.setattr(failure, "WORTH_SECONDS", 0.0)

    def refuses(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        try:
            raise error
        except type(error):
            raise RuntimeError("no kernel for this")  # noqa: B904  # as engines do

    assert again(refuses).reason == "build_failed"
    assert again(refuses).reason == "build_failed"


def test_known_failure_is_warned_of_with_its_remedy() -> None:
    """Once in a process: else a machine that was mended would serve eager, and nobody knew."""
    again(fails_late)
    with pytest.warns(FallbackWarning, match="`composer cache clear failures` has it tried again"):
        again(fails_late)
    with warnings.catch_warnings(record=True) as told:
        again(fails_late)
    assert told == []


def test_known_failure_of_the_default_chain_is_no_news_where_another_serves(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """As an engine that is not there."""
    again(fails_late, "aot_eager")
    again(fails_late, "aot_eager")
    recwarn.clear()
    warned.forget_warnings()
    notices.warn_of_fallbacks(last(), asked_by_name=False)
    assert list(recwarn) == []


def test_fake_is_tried_again() -> None:
    """Somebody's tests have to pass the second time, too."""
    slow = FakeBackend("slow", seconds=0.2)
    assert again(slow, timeout=0.1).status == "timed_out"
    assert again(slow, timeout=0.1).status == "timed_out"


def test_reset_forgets_what_this_process_remembered() -> None:
    """It is tried again here."""
    again(fails_late)
    composer.reset()
    assert again(fails_late).status == "failed"


def test_failure_of_another_process_outlives_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the disk's to forget."""
    again(fails_late)
    as_if_of_another_process(monkeypatch)
    composer.reset()
    assert again(fails_late).reason == "known_failure"


def test_timeout_is_remembered_for_that_timeout() -> None:
    """More time is another try."""

    def slow(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        time.sleep(0.4)
        return lookup_backend("aot_eager")(gm, example_inputs)

    def attempt(seconds: float) -> composer.Attempt:
        return again({"backend": slow, "timeout": seconds})

    assert attempt(0.1).status == "timed_out"
    assert attempt(0.1).reason == "known_failure"
    assert attempt(0.2).status == "timed_out"


def test_another_graph_is_another_try() -> None:
    """A failure is one of a graph."""
    again(fails_late)
    torch.compiler.reset()
    compiled(torch.cos, fails_late)(torch.ones(3))
    assert verdicts() == [("failed", "build_failed")]


def test_other_version_is_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made anew may be better."""
    again(fails_late)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert again(fails_late).status == "failed"


def test_engine_is_its_packages_versions() -> None:
    """An engine of other packages is another one."""

    class One(Backend):
        packages = ("onnxruntime",)

        def build(self, request: BuildRequest) -> Build:
            raise NotImplementedError

    one = One().identity()
    assert one is not None
    assert one == One().identity()
    One.packages = ("onnx",)
    assert One().identity() != one


def test_engines_that_a_function_made_differ_in_what_it_was_given() -> None:
    """Their source is the same; one that holds what no other process can name has no identity."""

    def made(held: object) -> Backend:
        class Made(Backend):
            def build(self, request: BuildRequest) -> Any:
                return held

        return Made()

    assert made(1).identity() == made(1).identity()
    assert made(1).identity() != made(2).identity()
    assert made(object()).identity() is None


def test_edited_engine_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is its source, and the file that it stands in."""
    monkeypatch.syspath_prepend(tmp_path)
    identities = set()
    for version in "12":
        (tmp_path / f"edited{version}.py").write_text(f"HELP = {version}\ndef build(gm, x): ...\n")
        module = importlib.import_module(f"edited{version}")
        identities.add(CallableBackend(module.build).identity())
    assert len(identities) == 2


@pytest.mark.parametrize("field", [{"strict": True}, {"cache": {"failures": 0}}])
def test_nothing_is_remembered_where_the_policy_says_so(field: dict[str, Any]) -> None:
    """Under ``strict`` and with ``[cache] failures = 0``, neither written nor read."""
    options = {"chain": [fails_late], "strict": "strict" in field}
    composer.configure({"cache": field.get("cache", {})})
    f = torch.compile(torch.sin, backend="composer", options=options)
    if "strict" in field:
        with pytest.raises(Exception, match="no kernel for this"):
            f(torch.ones(3))
    else:
        f(torch.ones(3))
    assert failure.Failure.cache().entries() == []
    composer.configure(None)


def test_failure_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the policy's days it is tried again."""
    again(fails_late)
    later = datetime.now(UTC) + timedelta(days=3)
    monkeypatch.setattr("composer.knowledge.facts.now", lambda: later)
    assert "3 days ago" in again(fails_late).message
    with composer.using({"cache": {"failures": 2.5}}):
        assert again(fails_late).status == "failed"


def test_failure_from_the_future_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was wrong then."""
    again(fails_late)
    earlier = datetime.now(UTC) - timedelta(days=3)
    monkeypatch.setattr("composer.knowledge.facts.now", lambda: earlier)
    assert again(fails_late).status == "failed"


def ends_by_sigterm(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def ends_by_sigkill(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "second"),
    [(ends_by_sigterm, "crashed"), (ends_by_sigkill, "known_failure")],
)
def test_child_that_somebody_ended_is_not_the_engines_failure(engine: Any, second: str) -> None:
    """By ``SIGTERM``, as schedulers do; the system's ``SIGKILL`` is for want of memory, mostly."""
    assert again(engine, isolate=True).reason == "crashed"
    assert again(engine, isolate=True).reason == second


def test_child_that_does_not_start_is_not_the_engines_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine was busy, and the next process tries the engine again."""
    monkeypatch.setattr("composer.system.subprocesses.asking.START_SECONDS", 0.0)
    for _ in range(2):
        attempt = again(fails_late, isolate=True)
        assert attempt.reason == "timeout"
        assert "had not started its work by then" in attempt.message


def test_child_that_cannot_import_composer_is_not_the_engines_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else's interpreter, say."""
    monkeypatch.setattr(
        "composer.system.subprocesses.servers.spawn.get_executable", lambda: "/bin/false"
    )
    for _ in range(2):
        attempt = again(fails_late, isolate=True)
        assert (attempt.status, attempt.reason) == ("crashed", "crashed")
        assert attempt.message.endswith("with status 1 before it had imported composer")


def out_of_memory(text: str) -> Any:
    def engine(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        time.sleep(failure.WORTH_SECONDS)
        if text:
            raise RuntimeError(text)
        torch.empty(1 << 50)

    return engine


@pytest.mark.parametrize(
    "text", ["", "Failed to allocate memory for requested buffer of size 64", "std::bad_alloc"]
)
def test_lack_of_memory_on_the_cpu_is_tried_again(text: str) -> None:
    """Torch and ONNX Runtime have no class of their own for it."""
    engine = out_of_memory(text)
    for _ in range(2):
        assert again(engine).reason == "out_of_memory"


def test_cache_that_cannot_be_used_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everything is tried, and the attempt says that nothing is remembered."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(composer.errors.CacheWarning, match="cannot be (read|written)"):
        first = again(fails_late)
    assert first.status == "failed"
    assert "cannot be" in first.engine["failures"]


CRASH = """
import ctypes, sys, torch, composer

def crashes(gm, example_inputs):
    ctypes.string_at(0)

if __name__ == "__main__":
    chain = ["crashing:crashes", "eager"]
    f = torch.compile(torch.sin, backend="composer", options={"chain": chain, "isolate": True})
    f(torch.ones(3))
    attempt = composer.reports()[-1].attempts[0]
    print(attempt.status, attempt.reason)
"""


@pytest.mark.slow
def test_next_process_does_not_pay_for_a_crash(
    run_python: Run, fresh_python: Run, tmp_path: Path
) -> None:
    """What killed a child process once is not given another."""
    module = tmp_path / "crashing.py"
    module.write_text(textwrap.dedent(CRASH))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code = "import runpy; runpy.run_module('crashing', run_name='__main__')"

    def printed(run: Run) -> list[str]:
        done = run(code, env={"PYTHONPATH": path})
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert printed(run_python) == ["crashed", "crashed"]
    assert printed(fresh_python) == ["skipped", "known_failure"]


def test_cache_list_and_clear() -> None:
    """The command says what is remembered, and has it forgotten."""
    again(fails_late)
    runner = CliRunner()
    listed = runner.invoke(app, ["cache", "list"])
    assert "1 entry" in listed.output
    assert "failures" in listed.output
    (entry,) = json.loads(runner.invoke(app, ["cache", "list", "--json"]).output)["entries"]
    assert entry["facts"]["backend"] == "fails_late"
    assert entry["facts"]["reason"] == "build_failed"
    assert "1 entry removed" in runner.invoke(app, ["cache", "clear", "failures"]).output
    assert "0 entries" in runner.invoke(app, ["cache", "list"]).output
    assert again(fails_late).status == "failed"


def test_cache_list_shows_the_newest_of_each_kind_or_all_of_one() -> None:
    """Thousands of rows are no answer."""
    facts = {"library": ["tensorrt_rtx", "1.6"], "target": {"gpu": "an Ada"}}
    for number in range(12):
        plans().put(f"{number:064x}", facts, b"x" * 1024)
    again(fails_late)
    runner = CliRunner()
    everything = runner.invoke(app, ["cache", "list"]).output
    assert "13 entries" in everything
    assert (everything.count("Ada"), everything.count("fails_late")) == (10, 1)
    assert "plans: 12 entries, 0.0 MiB; `composer cache list plans` lists them all" in everything
    assert runner.invoke(app, ["cache", "list", "plans"]).output.count("Ada") == 12
    (entry,) = json.loads(runner.invoke(app, ["cache", "list", "failures", "--json"]).output)[
        "entries"
    ]
    assert entry["kind"] == "failures"
    wrong = runner.invoke(app, ["cache", "list", "plan"])
    assert wrong.exit_code != 0
    assert "nothing kept is called 'plan'; did you mean 'plans'?" in wrong.output


def test_cache_list_shows_plans() -> None:
    """By the library and the device that they are for."""
    facts = {"library": ["tensorrt_rtx", "1.6"], "target": {"gpu": "an Ada"}}
    plans().put("a" * 64, facts, b"x" * 4096)
    (entry,) = json.loads(CliRunner().invoke(app, ["cache", "list", "--json"]).output)["entries"]
    assert (entry["kind"], entry["what"]) == ("plans", "tensorrt_rtx  1.6  for an Ada")
    assert entry["bytes"] > 4096


def test_cache_clear_names_a_slip() -> None:
    """An unknown kind is an error with the nearest spelling."""
    done = CliRunner().invoke(app, ["cache", "clear", "failure"])
    assert done.exit_code == 2
    assert "nothing kept is called 'failure'; did you mean 'failures'?" in done.output


def test_cache_list_says_once_that_the_folder_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line; there are five kinds of what is kept."""
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / "a_file"))
    with warnings.catch_warnings(record=True) as given:
        done = CliRunner().invoke(app, ["cache", "list"])
    assert (done.stderr.count("\n"), given) == (1, [])
    assert done.stderr.startswith(f"composer: the cache '{tmp_path}/a_file/failures' ")


def test_cache_clear_says_what_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder that is not the user's own is left alone."""
    again(fails_late)
    failure.Failure.cache().path.chmod(0o777)
    with pytest.warns(composer.errors.CacheWarning):
        done = CliRunner().invoke(app, ["cache", "clear"])
    assert done.exit_code == 1
    assert "others may write to" in done.output


def test_failure_that_cannot_be_kept_leaves_the_attempt_that_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record is frozen: a changed one is another."""
    made: list[composer.Attempt] = []

    def fails(self: disk.DiskCache, key: str, facts: object) -> bool:
        self.trouble = "cannot be written"
        return False

    def expensive(attempt: composer.Attempt, error: BaseException) -> bool:
        made.append(attempt)
        return True

    monkeypatch.setattr(disk.DiskCache, "put", fails)
    monkeypatch.setattr(candidates, "is_expensive", expensive)
    assert again(fails_at_once).engine == {"failures": "cannot be written"}
    assert made[0].engine == {}
