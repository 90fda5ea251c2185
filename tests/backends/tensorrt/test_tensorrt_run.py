"""Composer's own TensorRT engine run end to end: only the execution is faked.

The parser and the builder are those of TensorRT for RTX; ``fake_tensorrt`` runs on the CPU what a
GPU would run.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import compiled, last
from torch._dynamo.backends import registry

import composer
from composer.backends import tensorrt
from composer.backends.tensorrt import apart, library, probe
from composer.backends.tensorrt.cache import plans

pytest.importorskip("tensorrt_rtx", reason="its parser and builder run on a CPU")

from facts import FACTS
from fake_tensorrt import ERROR, Fake, FakePlace

from composer.build import BuildTerms
from composer.chain import repro
from composer.errors import CacheWarning
from composer.graphs import capture
from composer.graphs.case import Case
from composer.tools import regions

CHAIN = ("tensorrt",)


@pytest.fixture
def place() -> FakePlace:
    return FakePlace()


@pytest.fixture
def fake(place, monkeypatch, tmp_path):
    """A library whose plans run on the CPU, in the process that built them, as if on a GPU."""
    made = Fake(library._load("tensorrt_rtx"))
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "require_device", lambda device: None)
    monkeypatch.setattr(tensorrt.TensorRTEngine, "devices", ("cpu",))
    monkeypatch.setattr(tensorrt, "load_library", lambda: made.library)
    monkeypatch.setattr(tensorrt, "place_on", lambda device: place)
    with torch.no_grad(), composer.using(isolate=False):
        yield made
    for table in (registry._BACKENDS, registry._COMPILER_FNS):
        table.pop("tensorrt", None)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def same(function: Any, *args: Any, **options: Any) -> Any:
    """Compile and call; the numbers are eager's. Returns the compiled function."""
    run = compiled(function, *CHAIN, **options)
    torch.testing.assert_close(run(*args), function(*args))
    return run


def test_a_model_is_taken_whole_and_runs(fake: Fake) -> None:
    """With what the record says of it."""
    same(Net(), torch.randn(2, 4))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.coverage) == ("succeeded", 1.0)
    facts = {name: attempt.engine[name] for name in ("library", "gpu", "precision", "regions")}
    assert facts == {
        "library": "tensorrt_rtx",
        "gpu": "pretended",
        "precision": "fp32",
        "regions": 1,
    }


def test_plans_are_built_apart_unless_the_policy_says_otherwise(fake: Fake, monkeypatch) -> None:
    """Those for weights that changed at a later call, too."""
    asked: list[bool] = []
    here = apart.build

    def build(library: Any, recipe: Any, terms: BuildTerms) -> bytes:
        asked.append(terms.limits.isolate)
        return here(library, recipe, BuildTerms())

    monkeypatch.setattr(apart, "build", build)
    for isolate in (True, False):
        model, x = Net(), torch.randn(2, 4)
        torch.compiler.reset()
        chain = {"backend": "tensorrt", "isolate": isolate, "options": {"plan_cache": False}}
        run = compiled(model, chain)
        run(x)
        model.first.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
    assert asked == [True, True, False, False]


def test_inputs_and_outputs_keep_their_order_types_and_layout(fake: Fake) -> None:
    """Several of each, of several types, one laid out in columns, one number of no dimensions."""

    def function(a, b, flag, index):
        columns = (a @ b).T.contiguous().T
        return index + 1, torch.where(flag, a, -a), columns, a.half() * 2, (a > 0).sum(1), a.sum()

    a, b = torch.randn(4, 5), torch.randn(5, 3)
    flag, index = torch.rand(4, 5) > 0.5, torch.arange(6, dtype=torch.int32)
    run = same(function, a, b, flag, index)
    assert run(a, b, flag, index)[2].stride() == function(a, b, flag, index)[2].stride()


def test_gaps_offsets_and_nothing_at_all_are_taken(fake: Fake) -> None:
    """Inputs that are no aligned rows; a batch of no rows."""
    run = same(lambda x: torch.sin(x) * 2, torch.randn(6, 8)[1:, 1::2])
    assert run(torch.randn(5, 8)[:, ::2]).shape == (5, 4)
    same(lambda x: torch.cos(x), torch.randn(0, 4))


def test_the_caller_waits_and_is_waited_for_on_its_own_stream(fake: Fake, place) -> None:
    """Each call is launched on the stream of its thread, in a context of that stream."""
    run, x = same(Net(), torch.randn(2, 4)), torch.randn(2, 4)

    def call(gate: threading.Barrier) -> torch.Tensor:
        gate.wait()
        result = run(x)
        gate.wait()
        return result

    with ThreadPoolExecutor(4) as pool:
        gate = threading.Barrier(4)
        jobs = [pool.submit(torch.no_grad()(call), gate) for _ in range(4)]
        assert all(job.result().shape == (2, 3) for job in jobs)
    used = [context for context in fake.contexts if context.streams]
    assert len(used) == 5
    assert all(len(context.streams) == 1 for context in used)
    assert set().union(*(context.streams for context in used)) == set(place.launched)


def test_calls_in_turn_share_one_context(fake: Fake) -> None:
    """No context is made where one is free; its profile is set once."""
    run, x = same(Net(), torch.randn(2, 4)), torch.randn(2, 4)
    for _ in range(5):
        run(x)
    (context,) = fake.contexts
    assert context.profiles_set == [0]


def test_reduce_overhead_records_a_graph_and_replays_it(fake: Fake, place) -> None:
    """On memory of its own: neither later inputs nor earlier results are touched."""
    model, xs = Net(), [torch.randn(2, 4) for _ in range(4)]
    run = torch.compile(model, backend="composer", mode="reduce-overhead", options=None)
    with composer.using(chain=["tensorrt"]):
        results = [run(x) for x in xs]
    torch.testing.assert_close(results, [model(x) for x in xs])
    assert (place.recorded, place.launched) == (1, [])
    assert last().attempts[0].engine["cuda_graphs"] == 1


def test_dynamic_sizes_are_not_recorded(fake: Fake, place) -> None:
    """A graph would have to be recorded for each."""
    with composer.using(chain=["tensorrt"]):
        torch.compile(Net(), backend="composer", mode="reduce-overhead", dynamic=True)(
            torch.randn(6, 4)
        )
    assert place.recorded == 0
    assert last().attempts[0].engine["cuda_graphs"] == 0


def test_sizes_within_the_profile_run_without_a_build(fake: Fake) -> None:
    """Four times the first is within."""
    run = same(Net(), torch.randn(6, 4), dynamic=True)
    built = fake.built
    for rows in (2, 24, 3):
        assert run(torch.randn(rows, 4)).shape == (rows, 3)
    assert fake.built == built
    (ranges,) = last().attempts[0].engine["ranges"][0]
    assert next(iter(ranges.values())) == (2, 6, 24)


def test_a_size_beyond_the_profile_widens_it(fake: Fake) -> None:
    """One build more, and none for the sizes in between."""
    model = Net()
    run = same(model, torch.randn(6, 4), dynamic=True)
    built, large = fake.built, torch.randn(100, 4)
    torch.testing.assert_close(run(large), model(large))
    for rows in (2, 300):
        run(torch.randn(rows, 4))
    assert fake.built == built + 1
    assert last().runtime.fallbacks == 0


def test_the_profile_is_chosen_by_the_sizes(fake: Fake) -> None:
    """The first that holds them; it is set when it is another than before."""
    profiles = [{"*": [2, 5, 8]}, {"*": [9, 16, 32]}]
    chain = [{"backend": "tensorrt", "options": {"profiles": profiles}}]
    run = compiled(Net(), *chain, dynamic=True)
    for rows in (5, 16, 20, 8):
        assert run(torch.randn(rows, 4)).shape == (rows, 3)
    (context,) = fake.contexts
    assert context.profiles_set == [0, 1, 0]


def test_sizes_computed_with_come_from_the_shapes(fake: Fake) -> None:
    """No size is an input of its own, which would have to be in the host's memory."""

    def function(x, y):
        rows, columns = x.shape
        return (x @ y).reshape(rows * 2, -1) * columns, x.sum(0)

    run = same(function, torch.randn(6, 4), torch.randn(4, 8), dynamic=True)
    x, y = torch.randn(9, 5), torch.randn(5, 4)
    torch.testing.assert_close(run(x, y), function(x, y))


def test_what_only_the_engine_knows_the_size_of_is_given_memory(fake: Fake) -> None:
    """By the allocator, which lives as long as the call."""
    fake.hidden = {"relu"}
    same(lambda x: torch.relu(x), torch.randn(3, 4))
    assert set(fake.asked) == {"relu"}


def test_a_result_in_the_hosts_memory_is_waited_for(fake: Fake, place) -> None:
    """As TensorRT leaves sizes that it computed."""
    fake.on_host = {"relu"}
    same(lambda x: torch.relu(x), torch.randn(3, 4))
    assert place.waited == 2


def test_an_operator_without_onnx_is_left_to_torch(fake: Fake) -> None:
    """Two regions around it."""

    def function(x):
        return torch.sin(torch.special.bessel_j0(torch.relu(x) + 1)) * 2

    same(function, torch.randn(3, 4))
    (attempt,) = last().attempts
    assert (attempt.coverage, attempt.engine["regions"]) == (4 / 5, 2)
    assert "bessel_j0" in attempt.engine["left_to_torch"][0]


def test_changed_weights_are_seen(fake: Fake) -> None:
    """Built anew twice, then passed as inputs."""
    model, x = Net(), torch.randn(2, 4)
    run = same(model, x)
    for _ in range(4):
        model.first.weight.mul_(1.5)
        torch.testing.assert_close(run(x), model(x))
    assert fake.built == 3


def test_a_refittable_plan_takes_new_weights_without_a_build(fake: Fake) -> None:
    """However often they change; another module of its kind finds it on disk."""
    chain = {"backend": "tensorrt", "options": {"refittable": True}}
    x = torch.randn(2, 4)
    for _ in range(2):
        torch.compiler.reset()
        model = Net()
        run = compiled(model, chain)
        for _ in range(4):
            torch.testing.assert_close(run(x), model(x))
            model.first.weight.mul_(1.5)
    assert (fake.built, fake.refitted) == (1, 7)
    assert len(plans().entries()) == 1


@pytest.mark.parametrize("fault", [None, "budget"])
def test_weights_are_streamed_within_a_budget(fake: Fake, fault) -> None:
    """Or the engine says that it does not."""
    fake.faults |= {fault} - {None}
    streamed = {"backend": "tensorrt", "options": {"weight_streaming_mib": 1}}
    model, x = Net(), torch.randn(2, 4)
    torch.testing.assert_close(compiled(model, streamed, "eager")(x), model(x))
    assert last().chosen == ("eager" if fault else "tensorrt")
    if fault:
        assert "does not keep 1048576 bytes of weights" in last().attempts[0].message


def test_a_plan_that_does_not_take_the_weights_is_built_anew(fake: Fake) -> None:
    """As one that does not load."""
    chain = {"backend": "tensorrt", "options": {"refittable": True}}
    model, x = Net(), torch.randn(2, 4)
    run = compiled(model, chain)
    run(x)
    fake.faults.add("refit")
    model.first.weight.mul_(1.5)
    torch.testing.assert_close(run(x), model(x))
    assert (fake.built, fake.refitted) == (2, 0)


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("builder", "build_failed", "TensorRT makes no builder"),
        ("plan", "build_failed", "TensorRT builds no plan"),
        ("runtime", "build_failed", "TensorRT makes no runtime"),
        ("engine", "build_failed", "TensorRT cannot load the plan"),
        ("context", "out_of_memory", "TensorRT makes no execution context"),
        ("address", "build_failed", "TensorRT takes no address for"),
        ("execute", "build_failed", "the engine fails"),
    ],
)
def test_a_failure_is_told_by_the_first_error_of_the_log(fake: Fake, fault, reason, words) -> None:
    """None, False or a TypeError; the message quotes the log, and the next candidate serves."""
    fake.faults.add(fault)
    compiled(Net(), "tensorrt", "eager")(torch.randn(2, 4))
    attempt = last().attempts[0]
    assert (attempt.status, attempt.reason) == ("failed", reason)
    assert words in attempt.message
    assert ERROR in attempt.message


@pytest.mark.parametrize("fault", ["plan", "engine", "context", "execute"])
def test_want_of_memory_is_out_of_memory_wherever_it_strikes(fake: Fake, fault) -> None:
    """By the words of the log."""
    fake.faults |= {fault, "no memory"}
    compiled(Net(), "tensorrt", "eager")(torch.randn(2, 4))
    attempt = last().attempts[0]
    assert attempt.reason == "out_of_memory"
    assert "Requested 80 GiB" in attempt.message


def test_a_shape_that_nothing_sets_is_named(fake: Fake) -> None:
    """By the name that TensorRT gives."""
    fake.faults.add("infer")
    compiled(Net(), "tensorrt", "eager")(torch.randn(2, 4))
    assert "shapes depend on a_shape_tensor, which nothing sets" in last().attempts[0].message


def test_a_call_that_fails_later_is_answered_by_eager(fake: Fake) -> None:
    """And the record says so."""
    model, x = Net(), torch.randn(2, 4)
    run = same(model, x)
    fake.faults.add("execute")
    torch.testing.assert_close(run(x), model(x))
    attempt = last().attempts[0]
    assert (attempt.status, attempt.reason) == ("failed", "raised_at_runtime")
    assert ERROR in attempt.message


def test_a_plan_is_built_once_for_all_processes(fake: Fake) -> None:
    """Found on disk the next time, under a key that does not depend on the plan."""
    model, x = Net(), torch.randn(2, 4)
    same(model, x)
    torch.compiler.reset()
    same(model, x)
    assert (fake.built, fake.loaded) == (1, 2)
    assert last().attempts[0].engine["found_on_disk"] == 1
    (entry,) = plans().entries()
    assert entry.facts["target"] == {"gpu": "pretended", "capability": [8, 9], "driver": "0"}


@pytest.mark.parametrize("how", ["garbage", "truncated", "foreign"])
def test_a_plan_that_cannot_be_used_is_built_anew(fake: Fake, how) -> None:
    """Damaged on disk, or whole and not the model's."""
    model, x = Net(), torch.randn(2, 4)
    same(model, x)
    (file,) = plans().path.glob("*.entry")
    if how == "foreign":
        plans().put(file.stem, {}, b"whole, and no plan")
    else:
        file.write_bytes(file.read_bytes()[:-1] if how == "truncated" else b"garbage" * 99)
    torch.compiler.reset()
    told = pytest.warns(CacheWarning, match="not what was written")
    with nullcontext() if how == "foreign" else told:
        same(model, x)
    assert (fake.built, fake.loaded) == (2, 2)
    torch.compiler.reset()
    same(model, x)
    assert (fake.built, fake.loaded) == (2, 3)


def test_other_weights_are_another_plan(fake: Fake) -> None:
    """Their values are part of the key; an option switches the cache off."""
    same(Net(), torch.randn(2, 4))
    torch.compiler.reset()
    same(Net(), torch.randn(2, 4))
    assert fake.built == 2
    off = {"backend": "tensorrt", "options": {"plan_cache": False}}
    torch.compiler.reset()
    compiled(Net(), off)(torch.randn(2, 4))
    assert len(plans().entries()) == 2


@pytest.mark.parametrize(("said", "tf32"), [("highest", False), ("high", True)])
def test_tf32_is_as_torch_says(fake: Fake, said, tf32) -> None:
    """By either of torch's ways to say it; it is part of the plan's key."""
    torch.set_float32_matmul_precision(said)
    same(Net(), torch.randn(2, 4))
    (entry,) = plans().entries()
    assert entry.facts["tf32"] is tf32


HOPPER = (9, 0)
"""A compute capability that TensorRT for RTX has no name for."""


@pytest.mark.parametrize(
    ("said", "precision", "accepted"),
    [("highest", "fp32", False), ("high", "fp32", True), ("highest", "fp16", True)],
)
def test_products_in_tf32_are_declined_unless_torch_allows_them(
    fake: Fake, place: FakePlace, said: str, precision: str, accepted: bool
) -> None:
    """On a GPU for which RTX (1.6.1) computes them so whatever it is told (seen on an H200)."""
    place.target = dataclasses.replace(place.target, capability=HOPPER)
    torch.set_float32_matmul_precision(said)
    candidate = {"backend": "tensorrt", "options": {"precision": precision}}
    compiled(Net(), candidate, "eager")(torch.randn(2, 4))
    (attempt, *_) = last().attempts
    assert attempt.accepted == accepted
    if not accepted:
        assert (attempt.status, attempt.reason) == ("declined", "unsupported_dtype")
        assert "aten::addmm of float32 in TF32 on this GPU (pretended)" in attempt.message


def test_what_multiplies_nothing_is_taken_on_any_gpu(fake: Fake, place: FakePlace) -> None:
    """TF32 is a matter of products."""
    place.target = dataclasses.replace(place.target, capability=HOPPER)
    same(lambda x: torch.sin(x) + 1, torch.randn(2, 4))
    assert last().chosen == "tensorrt"


def test_training_is_declined(fake: Fake) -> None:
    """There is no backward in TensorRT."""
    with torch.enable_grad():
        compiled(Net(), "tensorrt", "eager")(torch.randn(2, 4))
    attempt = last().attempts[0]
    assert (attempt.status, attempt.reason) == ("declined", "training_graph")


def test_float64_is_left_to_torch(fake: Fake) -> None:
    """TensorRT would compute float32 and say nothing."""
    compiled(lambda x: torch.sin(x), "tensorrt", "eager")(torch.randn(3, dtype=torch.float64))
    attempt = last().attempts[0]
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_op")
    assert "TensorRT does not compute with float64" in attempt.message


def test_the_name_can_be_looked_up_once_the_engine_was_needed(fake: Fake) -> None:
    """As torch.compile(backend="tensorrt"), without composer's chain."""
    model, x = Net(), torch.randn(2, 4)
    same(model, x)
    torch.testing.assert_close(torch.compile(model, backend="tensorrt")(x), model(x))
    assert registry.lookup_backend("tensorrt") is tensorrt.tensorrt


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_folder_of_a_part_has_a_program_of_tensorrt_alone(
    fake: Fake, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real parser and builder take what it says. Composer is in none of its lines."""
    net, found = Net().eval(), list[Case]()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        request = capture.read_request(gm, inputs)
        found.append(Case.of(gm, inputs, request.weights, {**FACTS, "dynamic": dynamic}))
        return gm.forward

    torch.compile(net, backend=backend, dynamic=dynamic)(torch.randn(5, 4))
    torch.compiler.reset()
    options = {"optimization_level": 1, "workspace_mib": 64}
    repro.write(found[0], tmp_path / "whole", {"backend": "tensorrt", "options": options})
    regions.write_regions(tmp_path / "whole", tmp_path / "parts")
    (folder,) = (tmp_path / "parts").iterdir()
    text = (folder / "run.py").read_text()
    assert "composer" not in text
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake.library.module)
    stream = SimpleNamespace(cuda_stream=1, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("check", "comparison", "graph"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    program = runpy.run_path(str(folder / "run.py"))
    graph = program["Graph"]()
    inputs = program["inputs"]()
    for got, expected in zip(program["engine"](graph)(*inputs), graph(*inputs), strict=True):
        torch.testing.assert_close(got, expected)
    for name in ("check", "comparison", "graph"):
        monkeypatch.delitem(sys.modules, name, raising=False)
