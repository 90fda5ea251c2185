"""Isolation: engines that crash, exit, hang or eat memory do so in a child process."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import engines
import pytest
import rewrites
import torch
from common import compiled, last, thorough
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import composer
from composer import _torch
from composer.backends.base import Backend, Build, BuildFacts, BuildRequest
from composer.chain.sandbox import parcel
from composer.errors import OptionError, Refusal, SandboxRefusal
from composer.policy import Policy, read_policy
from composer.system.subprocesses.asking import START_SECONDS
from composer.testing import FakeBackend

pytestmark = pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")

SLOW = pytest.mark.slow
"""A child takes about five seconds to start."""


class Net(torch.nn.Module):
    """Parameters, buffers, a dtype region, and a branch that the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        y = self.norm(y.float())
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)) * x.shape[0]


def attempt(*chain: Any, function: Any = torch.sin, **options: Any) -> composer.Attempt:
    """The first attempt on a graph compiled under isolation, whose answer is eager's."""
    x = torch.randn(3, 4)
    got = compiled(function, *chain, isolate=True, **options)(x)
    torch.testing.assert_close(got, function(x))
    return last().attempts[0]


def verdict(made: composer.Attempt) -> tuple[str, str | None, str]:
    return made.status, made.reason, made.message


def test_engine_that_crashes_does_not_take_its_caller_along() -> None:
    """The next candidate serves; what the engine printed, and where it ended, are kept."""
    crashed = attempt(engines.aborts_after_a_word, "eager")
    assert verdict(crashed) == ("crashed", "crashed", "a child process was killed by SIGABRT")
    assert "loading the vendor's library" in crashed.traceback
    assert "in aborts_after_a_word" in crashed.traceback
    assert last().chosen == "eager"


@SLOW
def test_path_that_imports_pass_over_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only text counts in ``sys.path``."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("nowhere")])
    assert attempt("aot_eager").accepted


def test_frozen_program_is_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run itself again, and again."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert attempt("aot_eager").reason == "not_isolatable"


def test_exit_is_a_crash_with_its_status() -> None:
    """Of Python; of the C library, see tests/tools/tune/test_tuning.py."""
    said = "a child process exited with status 3"
    assert verdict(attempt(FakeBackend("exits"))) == ("crashed", "crashed", said)


@SLOW
def test_crash_at_the_first_call_is_seen_as_well() -> None:
    """The child runs what it built once."""
    crashed = attempt(FakeBackend("segfaults", at=1))
    assert verdict(crashed) == ("crashed", "crashed", "a child process was killed by SIGSEGV")


@SLOW
def test_hang_is_stopped_at_its_timeout() -> None:
    """Which begins when the child has started; the candidate's own beats the policy's."""
    candidate = {"backend": FakeBackend("hangs"), "timeout": 1.5}
    stopped = attempt(candidate, timeout=1000)
    said = "stopped after 1.5 s in a child process"
    assert verdict(stopped) == ("timed_out", "timeout", said)
    assert stopped.seconds < START_SECONDS


@SLOW
def test_memory_beyond_the_limit_is_out_of_memory() -> None:
    """The child is killed long before it has its 8 GiB."""
    hungry = attempt(FakeBackend("eats_memory"), memory_limit=1000)
    assert (hungry.status, hungry.reason) == ("failed", "out_of_memory")
    assert "memory_limit is 1000 MiB" in hungry.message


@SLOW
def test_exception_in_the_child_is_the_attempts() -> None:
    """Type, text and traceback; the caller does not build. ``strict`` has it as the cause."""
    backend = FakeBackend("raises")
    with pytest.raises(Exception, match="made to raise") as caught:
        attempt(backend, strict=True)
    assert isinstance(caught.value.inner_exception.__cause__, SandboxRefusal)
    failed = last().attempts[0]
    assert verdict(failed) == ("failed", "build_failed", "fake_raises was made to raise")
    assert failed.error_type == "RuntimeError"
    assert "in _raise" in failed.traceback
    assert backend.compiles == 0


@SLOW
def test_refusal_in_the_child_is_the_attempts() -> None:
    """Status and reason cross the pipe."""
    refused = attempt(FakeBackend("returns_none"))
    assert (refused.status, refused.reason) == ("rejected", "returned_original")
    assert refused.error_type == ""


@SLOW
@pytest.mark.parametrize(("name", "dynamic"), [("onnxrt", True), *thorough(("inductor", None))])
def test_real_engine_is_built_again_by_the_caller(name: str, dynamic: bool | None) -> None:
    """Branches, autocast, buffers and dynamic sizes go to the child."""
    net, x = Net().eval(), torch.randn(3, 4)
    f = compiled(net, name, isolate=True, dynamic=dynamic, min_coverage=0.0)
    with torch.no_grad():
        torch.testing.assert_close(f(x), net(x), rtol=1e-2, atol=1e-2)
    assert last().chosen == name, last().attempts[0]
    assert last().attempts[0].engine["isolated"]["seconds"] > 0


@SLOW
def test_training_graph_runs_forward_and_backward_in_the_child() -> None:
    """A backward that raises is found before the caller builds; nothing of the user's changes."""
    net, x = Net(), torch.randn(3, 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    chain = [FakeBackend("fails_in_backward"), "aot_eager"]
    f = compiled(net, *chain, isolate=True)
    random = torch.get_rng_state()
    result = f(x)
    broken, honest = last().attempts
    assert (broken.status, broken.reason) == ("failed", "raised_at_runtime")
    assert "isolated" in honest.engine
    assert torch.equal(random, torch.get_rng_state())
    unchanged = [name for name in before if "norm.running" not in name and "num_b" not in name]
    assert all(torch.equal(before[name], net.state_dict()[name]) for name in unchanged)
    assert net.norm.num_batches_tracked == 1
    result.sum().backward()
    assert net.linear.weight.grad is not None


@SLOW
def test_engine_that_fails_only_in_a_child_is_not_used() -> None:
    """The child's word counts: nobody knows what the caller's build would do."""
    here = {"backend": engines.only_here, "options": {"pid": os.getpid()}}
    assert attempt(here).message == "not in this process"


@SLOW
def test_name_that_only_this_process_knows_is_not_isolatable() -> None:
    """A backend registered by a module that the child does not import."""
    torch._dynamo.register_backend(engines.honest, name="known_here_only")
    declined = attempt("known_here_only")
    assert (declined.status, declined.reason) == ("declined", "not_isolatable")
    assert "'known_here_only'" in declined.message


def test_what_cannot_be_sent_is_not_isolatable() -> None:
    """The sentence names it."""
    declined = attempt(lambda gm, inputs: gm.forward)
    assert (declined.status, declined.reason) == ("declined", "not_isolatable")
    assert "the backend '<lambda>' cannot be sent to another process" in declined.message


def test_options_that_cannot_be_sent_are_named() -> None:
    """Not the backend."""
    declined = attempt({"backend": engines.only_here, "options": {"hook": lambda: None}})
    assert declined.message.startswith("its options cannot be sent")


def test_a_backward_of_compiled_autograd_is_named() -> None:
    """Rather than an object of pybind's that is not pickleable."""
    options = {"chain": ["aot_eager"], "isolate": True}
    compiler = functools.partial(torch.compile, backend="composer", options=options)
    with torch._dynamo.compiled_autograd._enable(compiler):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    (declined,) = last().attempts
    assert (declined.status, declined.reason) == ("declined", "not_isolatable")
    assert declined.message.startswith("the graph cannot be sent to another process: compiled auto")


def test_eager_needs_no_child() -> None:
    """It compiles nothing."""
    chosen = attempt("eager")
    assert chosen.accepted
    assert "isolated" not in chosen.engine


def packed(contents: dict[str, Any]) -> bytes:
    """Without memory that is shared."""
    with parcel.Memory() as memory:
        memory.close()
        return parcel.pack(contents, memory)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system shares no memory")
def test_large_tensors_are_sent_in_shared_memory() -> None:
    """A parcel of a large model is small, and what the other process writes stays its own."""
    weight = torch.nn.Parameter(torch.randn(300, 200).t(), requires_grad=False)
    batch = torch.randn(2, 1000, 9)[:, ::2]
    mask = torch.randn(1, 1, 200, 200).expand(2, 4, 200, 200)
    with parcel.Memory() as memory:
        sent = parcel.pack({"tensors": [weight, batch, weight, mask]}, memory)
        assert len(sent) < 10_000
        mine, others, again, expanded = parcel.unpack(sent)["tensors"]
    assert torch.equal(expanded, mask)
    assert expanded.stride() == mask.stride()
    assert again is mine
    assert isinstance(mine, torch.nn.Parameter)
    assert torch.equal(mine, weight)
    assert torch.equal(others, batch)
    assert (mine.stride(), others.stride()) == (weight.stride(), batch.stride())
    others.zero_()
    assert batch.any()


def test_newer_settings_of_float32_are_sent(newer_precision: None) -> None:
    """Also where there is no word for them."""
    given, wanted = parcel.surroundings(), _torch.modes.float32_precision()
    torch.set_float32_matmul_precision("highest")
    with parcel.within(given):
        assert _torch.modes.float32_precision() == wanted


def test_small_parts_of_large_tensors_are_sent_without_the_rest() -> None:
    """A batch of a data set that lies in memory; the memory that inputs share stays shared."""
    data = torch.empty(1 << 25)
    data[:8] = torch.arange(8.0)
    both = torch.ones(4)
    sent = packed({"inputs": parcel.inputs_to_send([data[1:7:2], both, both[1:]])})
    assert len(sent) < 100_000
    batch, whole, rest = (each.open() for each in parcel.unpack(sent)["inputs"])
    assert torch.equal(batch, torch.tensor([1.0, 3.0, 5.0]))
    assert batch.stride() == (2,)
    assert rest.data_ptr() == whole[1:].data_ptr()


def test_memory_formats_are_sent() -> None:
    """Pickle takes torch's name of one for something within a module, which it cannot send."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    named = {"memory_format": torch.channels_last}
    graph.output(graph.call_method("contiguous", (x,), named))
    sent = packed({"the graph": torch.fx.GraphModule({}, graph)})
    image = torch.randn(1, 2, 3, 4)
    assert parcel.unpack(sent)["the graph"](image).is_contiguous(
        memory_format=named["memory_format"]
    )


def test_functions_that_torch_makes_within_others_are_sent() -> None:
    """Pools of maxima among them, which pickle looks for where they were made."""
    graph = torch.fx.Graph()
    pooled = graph.call_function(torch.nn.functional.max_pool2d, (graph.placeholder("x"), 2))
    graph.output(pooled)
    sent = packed({"the graph": torch.fx.GraphModule({}, graph)})
    image = torch.randn(1, 2, 4, 4)
    pool = torch.nn.MaxPool2d(2)
    assert torch.equal(parcel.unpack(sent)["the graph"](image), pool(image))


def test_sizes_that_data_decide_are_not_sent() -> None:
    """The child could not choose one that the data bear out."""
    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(Refusal, match="only data decide its size") as caught:
        parcel.inputs_to_send([size])
    assert caught.value.reason == "not_isolatable"


def test_what_cannot_be_received_is_named() -> None:
    """An object whose making raises."""
    sent = packed({"the backend 'x'": _Explodes()})
    with pytest.raises(Refusal, match=r"the backend 'x' cannot be received .* no such device"):
        parcel.unpack(sent)


class _Explodes:
    def __reduce__(self) -> Any:
        return functools.partial(_explode), ()


def _explode() -> None:
    raise OSError("no such device")


@SLOW
def test_shared_passes_within_the_candidate_run_in_the_child_too() -> None:
    """They decide what the engine is given."""
    f = compiled(torch.cos, engines.multiplies, isolate=True, passes=[rewrites.Scale(3.0)])
    x = torch.randn(3)
    with torch.no_grad():
        torch.testing.assert_close(f(x), 3 * x.cos())
    assert last().chosen == "multiplies", last().attempts


def test_passes_that_cannot_be_sent_are_named() -> None:
    """A class made within a function has no name to import it by."""
    f = compiled(torch.cos, engines.honest, isolate=True, passes=[rewrites.at("joint")])
    f(torch.ones(2))
    assert last().attempts[0].reason == "not_isolatable"
    assert last().attempts[0].message.startswith("the shared passes cannot be sent")


@SLOW
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed can tell nobody."""
    file = tmp_path / "pid"
    chain = [{"backend": "engines:hangs_and_says_who", "options": {"file": str(file)}}]
    options = {"chain": chain, "isolate": True}
    code = f"import torch\ntorch.compile(torch.sin, backend='composer', options={options})"
    path = os.pathsep.join(map(str, sys.path))
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{code}(torch.ones(2))"], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        _wait_until(lambda: file.exists() and file.read_text())
        child = Path("/proc") / file.read_text()
        assert child.exists()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    _wait_until(lambda: not child.exists())


def _wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_build_that_ends_after_its_timeout_is_not_used() -> None:
    """Without isolation; the message says what would stop it."""
    late = FakeBackend("slow", seconds=0.3)
    f = compiled(torch.sin, {"backend": late, "timeout": 0.2}, "aot_eager", timeout=100)
    f(torch.ones(2))
    assert last().chosen == "aot_eager"
    made = last().attempts[0]
    assert (made.status, made.reason) == ("timed_out", "timeout")
    assert "cannot be interrupted" in made.message
    assert "isolate = true" in made.message


def test_engine_that_asks_for_the_time_is_stopped() -> None:
    """``onnxrt`` does, before each region."""
    f = compiled(torch.sin, "onnxrt", timeout=1e-6)
    with torch.no_grad():
        f(torch.ones(2))
    assert last().attempts[0].message.startswith("was stopped after")


def test_limits_are_part_of_what_a_graph_is_known_by() -> None:
    """They decide what is chosen; without any the key is what it was."""
    keys = {Policy().key, Policy(isolate=True).key, Policy(timeout=1).key}
    keys.add(Policy(chain=[{"backend": "inductor", "timeout": 1}]).key)
    assert len(keys) == 4
    assert Policy(isolate=False).key == Policy().key


@pytest.mark.parametrize("field", ["timeout", "memory_limit"])
def test_limits_are_more_than_nothing(field: str) -> None:
    """Zero would refuse every engine."""
    with pytest.raises(OptionError, match=f"option '{field}' is 0"):
        read_policy({field: 0})


class BuildsApart(Backend):
    """An engine that has a part of its work done by a child of its own."""

    isolates_itself = True

    def build(self, request: BuildRequest) -> Build:
        limits = request.terms.limits_left()
        said = {"isolates": limits.isolate, "timeout": limits.timeout}
        compiled = engines.honest(request.gm, request.example_inputs)
        return Build(compiled, BuildFacts(extra=said))


def test_engine_that_isolates_itself_does_so_unless_told_otherwise() -> None:
    """It is given the limits, with the time that is left, and no child is started for it."""

    def facts(**options: Any) -> dict[str, Any]:
        torch.compiler.reset()
        candidate = {"backend": BuildsApart, "timeout": 100}
        compiled(torch.sin, candidate, **options)(torch.ones(3))
        return dict(last().attempts[0].engine)

    default = facts()
    assert default["isolates"]
    assert 0 < default["timeout"] <= 100
    assert "isolated" not in default
    assert not facts(isolate=False)["isolates"]
    assert facts(isolate=True)["isolates"]
