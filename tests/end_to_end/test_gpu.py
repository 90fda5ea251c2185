"""What only an NVIDIA GPU can show; skipped where there is none."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from common import ROOT, compiled, in_child, last
from engines import honest
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache, run_and_get_code

import composer
from composer import _torch
from composer.records import Status
from composer.testing import FakeBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Inductor warns of what cards could do (TF32), Triton of what it replaces.
    pytest.mark.filterwarnings("default"),
]

CUDA = "cuda"
GIB = 2**30
OPERATORS = ("gate", "open_gate")


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    layers = (torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128))
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 64)).to(CUDA, dtype).eval()


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(32, 64, device=CUDA, dtype=dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture
def onnxrt() -> str:
    """The engine, where its package is built for CUDA."""
    package = pytest.importorskip("onnxruntime", reason="needs onnxruntime-gpu")
    if "CUDAExecutionProvider" not in package.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    return "onnxrt"


@pytest.fixture
def tensorrt() -> str:
    """The engine, where a library for it is installed."""
    if not any(map(importlib.util.find_spec, ("tensorrt", "tensorrt_rtx"))):
        pytest.skip("needs tensorrt or tensorrt-rtx")
    torch.set_float32_matmul_precision("high")  # RTX declines float32 on some GPUs else
    return "tensorrt"


@pytest.fixture(params=["inductor", "onnxrt", "tensorrt"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine for a card, where it is installed."""
    name: str = request.param
    return name if name == "inductor" else request.getfixturevalue(name)


def late(source: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """A copy that the stream makes only when it has slept for some milliseconds."""
    made = torch.zeros_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        made.copy_(source)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_engine_serves_and_is_verified(engine, dtype) -> None:
    """On the card, in every precision of serving."""
    if (engine, dtype) == ("tensorrt", torch.float32):
        pytest.skip("has a test of its own")
    net, x = model(dtype), batch(dtype)
    with torch.no_grad():
        run = compiled(net, engine, verify="compile")
        torch.testing.assert_close(run(x), net(x), rtol=2e-2, atol=2e-2)
    assert (last().chosen, last().runtime.fallbacks) == (engine, 0)
    assert last().attempts[0].engine["verified"]["values"] > 0


def test_engine_waits_for_the_callers_work(engine) -> None:
    """On the default stream and on another, and the caller's next work waits for the engine."""
    net = model()
    run = compiled(net, engine)
    with torch.no_grad():
        run(batch())
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            for _ in range(5):
                source = batch()
                expected, given = net(source), late(source, stream)
                with torch.cuda.stream(stream):
                    got = run(given) * 1
                stream.synchronize()
                close(got, expected)
    assert last().chosen == engine


def test_engine_sees_changed_weights(engine) -> None:
    """Loaded, replaced and written in place."""
    net, other, x = model(), model(), batch()
    run = compiled(net, engine)
    with torch.no_grad():
        close(run(x), net(x))
        net.load_state_dict(other.state_dict())
        close(run(x), other(x))
        net[0].weight.data = torch.zeros_like(net[0].weight)
        close(run(x), net(x))
        net[3].weight.mul_(2)
        close(run(x), net(x))
    assert (last().chosen, last().runtime.fallbacks) == (engine, 0)


def test_engine_takes_dynamic_shapes(engine) -> None:
    """One graph for batches of several sizes."""
    net = model()
    run = compiled(net, engine, dynamic=True)
    with torch.no_grad():
        for rows in (4, 8, 3, 17):
            x = torch.randn(rows, 64, device=CUDA)
            close(run(x), net(x))
    assert {each.chosen for each in composer.reports()} == {engine}


@pytest.mark.parametrize("engine", ["inductor", "onnxrt"])
def test_engine_trains(engine, request) -> None:
    """Gradients included."""
    if engine != "inductor":
        request.getfixturevalue(engine)
    net, x = model().train(), batch()
    expected = torch.autograd.grad(net(x).sum(), [*net.parameters()])
    run = compiled(net, engine, verify="compile")
    for got, wanted in zip(
        torch.autograd.grad(run(x).sum(), [*net.parameters()]), expected, strict=True
    ):
        close(got, wanted)
    assert (last().chosen, last().training) == (engine, True)


def test_onnxrt_multiplies_as_exactly_as_torch(onnxrt) -> None:
    """No TF32, which is that provider's own default, unless torch may use it."""
    net, x = torch.nn.Linear(512, 512).to(CUDA), torch.randn(64, 512, device=CUDA)
    errors = {}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        torch.compiler.reset()
        with torch.no_grad():
            got = compiled(net, onnxrt)(x)
            exact = net.double()(x.double())
            net.float()
        errors[precision] = (got - exact).abs().max().item()
        assert last().chosen == onnxrt
    assert errors["highest"] < 1e-5 < errors["high"]


def test_onnxrt_reads_weights_where_they_lie(onnxrt) -> None:
    """The card holds them once."""
    net = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).to(CUDA)
    x = torch.randn(8, 4096, device=CUDA)
    weights = sum(each.nbytes for each in net.parameters())
    run = compiled(net, onnxrt)
    with torch.no_grad():
        net(x)
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        close(run(x), net(x))
        torch.cuda.synchronize()
    assert last().chosen == onnxrt
    assert free - torch.cuda.mem_get_info()[0] < weights


def test_onnxrt_says_nothing_on_stderr(onnxrt, capfd) -> None:
    """Not even that its provider is no plug-in."""
    with torch.no_grad():
        compiled(model(), onnxrt)(batch())
    assert last().chosen == onnxrt
    assert capfd.readouterr().err == ""


def test_tensorrt_multiplies_as_exactly_as_torch_or_declines(tensorrt) -> None:
    """TensorRT for RTX knows no exact products on GPUs that it has no name for (1.6.1, H200)."""
    torch.set_float32_matmul_precision("highest")
    net, x = torch.nn.Linear(512, 512).to(CUDA), torch.randn(64, 512, device=CUDA)
    with torch.no_grad():
        got = compiled(net, tensorrt, "eager")(x)
        exact = net.double()(x.double())
    assert (got - exact).abs().max().item() < 1e-5
    first = last().attempts[0]
    assert first.accepted or (first.status, first.reason) == ("declined", "unsupported_dtype")


def test_tensorrt_replays_a_cuda_graph(tensorrt) -> None:
    """``mode="reduce-overhead"``: each answer is its input's."""
    net = model()
    run = torch.compile(net, backend="composer", mode="reduce-overhead")
    with torch.no_grad(), composer.using(chain=[tensorrt]):
        for _ in range(4):
            x = batch()
            close(run(x), net(x))
    assert last().chosen == tensorrt
    assert last().attempts[0].engine["cuda_graphs"] == 1


@pytest.mark.parametrize("verify", ["off", "sample"])
@pytest.mark.parametrize("engine", ["inductor", "onnxrt"])
def test_program_may_record_a_cuda_graph_of_its_own(engine, verify, request) -> None:
    """Of many calls; what the policy wants compared is compared at a later one."""
    if engine != "inductor":
        request.getfixturevalue(engine)
    net, x = model(), batch()
    run = compiled(net, engine, verify={"when": verify, "every": 3})
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(x)
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            for _ in range(20):
                got = run(x)
        assert last().runtime.verified == 0
        for _ in range(3):
            x.copy_(batch())
            recorded.replay()
            close(got, net(x))
        run(x)
    assert (last().chosen, last().runtime.fallbacks) == (engine, 0)
    assert last().runtime.verified == (verify == "sample")


@pytest.mark.parametrize("verify", ["compile", "sample"])
def test_random_numbers_of_an_engines_own_are_no_mismatch(verify) -> None:
    """Inductor's dropout moves the card's generator on by as much as eager's."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).to(CUDA).train()
    run = compiled(net, "inductor", verify={"when": verify, "every": 2})
    for _ in range(6):
        run(batch()).sum().backward()
    assert (last().chosen, last().runtime.fallbacks) == ("inductor", 0)
    assert last().attempts[-1].status is Status.SUCCEEDED


def test_inductor_generates_triton_kernels_for_a_composed_graph() -> None:
    """Counted by Inductor, and there in its code; the report names the card."""
    net, x = model(), batch()
    before = metrics.generated_kernel_count
    with fresh_cache(), torch.no_grad():
        got, (code, *_) = run_and_get_code(compiled(net, "inductor"), x)
        close(got, net(x))
    assert metrics.generated_kernel_count > before
    assert "@triton.jit" in code
    assert (last().chosen, last().device) == ("inductor", f"{CUDA}:0")


def test_default_chain_serves_a_graph_on_the_card() -> None:
    """By TensorRT where it is, else by Inductor; never by the eager fallback."""
    net, x = model(), batch()
    with torch.no_grad():
        close(torch.compile(net, backend="composer")(x), net(x))
    assert last().chosen in ("tensorrt", "inductor")
    assert last().runtime.fallbacks == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_users_triton_kernel_runs_under_inductor(operator) -> None:
    """A shared pass brings it in; Inductor sees into a ``triton_op`` and calls a ``custom_op``."""
    pytest.importorskip("triton", reason="needs triton")
    from kernels import bringing_in, program

    x, y = batch(), batch()
    run = compiled(program, "inductor", passes=[bringing_in(operator)], on_pass_error="raise")
    with fresh_cache():
        got, (code, *_) = run_and_get_code(run, x, y)
    close(got, program(x, y))
    assert (last().chosen, last().passes[0].matches) == ("inductor", 1)
    assert ("gate_kernel" in code) == (operator == "open_gate")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("engine", ["onnxrt", "aot_eager", "eager"])
def test_users_triton_kernel_answers_elsewhere(engine, operator) -> None:
    """Engines that cannot say it leave it to torch, or decline the graph: the numbers stay."""
    pytest.importorskip("triton", reason="needs triton")
    from kernels import bringing_in, program

    x, y = batch(), batch()
    run = compiled(program, engine, passes=[bringing_in(operator)], on_pass_error="raise")
    close(run(x, y), program(x, y))
    assert last().passes[0].matches == 1
    assert last().chosen in (engine, "eager")
    if last().chosen == "onnxrt":
        assert last().attempts[0].coverage < 1.0


def test_wrong_numbers_on_the_card_are_found() -> None:
    """The next candidate serves."""
    net, x = model(), batch()
    with torch.no_grad():
        close(compiled(net, FakeBackend("wrong_value"), "inductor", verify="compile")(x), net(x))
    assert last().attempts[0].reason == "numeric_mismatch"
    assert last().chosen == "inductor"


def test_verification_leaves_the_cards_random_numbers_alone() -> None:
    """A dropout of the first call draws what it would draw unverified."""
    x, drawn = batch(), []
    for verify in ("off", "compile"):
        torch.compiler.reset()
        torch.manual_seed(3)
        run = compiled(torch.nn.functional.dropout, "aot_eager", verify=verify)
        drawn.append(run(x))
        assert last().chosen == "aot_eager"
    assert torch.equal(*drawn)


@pytest.mark.parametrize("verify", ["off", "compile"])
def test_cuda_graphs_are_replayed_and_read_new_inputs(verify) -> None:
    """``mode="reduce-overhead"``: the profiler sees the launch, and each answer is its input's."""
    net = model()
    run = torch.compile(net, backend="composer", mode="reduce-overhead")
    with torch.no_grad(), composer.using(chain=["inductor"], verify=verify):
        for _ in range(5):
            x = batch()
            close(run(x).clone(), net(x))
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiled:
            run(batch())
            torch.cuda.synchronize()
    assert last().chosen == "inductor"
    assert last().runtime.fallbacks == 0
    assert any("cudaGraphLaunch" in event.key for event in profiled.key_averages())


def hungry(tries: list[str]):
    """An engine that wants a GiB at each call."""

    def backend(gm, example_inputs):
        served = honest(gm, example_inputs)

        def run(*args):
            tries.append("call")
            torch.empty(GIB, dtype=torch.uint8, device=CUDA)
            return served(*args)

        return run

    return backend


@pytest.fixture
def two_gib():
    """The process may have 2 GiB of the card, and the collector waits."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2 * GIB / total)
    gc.disable()
    yield
    gc.enable()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Loop:
    """Holds memory of the card until the collector finds it."""

    def __init__(self) -> None:
        self.itself = self
        self.memory = torch.empty(GIB + GIB // 2, dtype=torch.uint8, device=CUDA)


def test_engine_out_of_memory_is_called_again_once_there_is_some(two_gib) -> None:
    """What only the collector could free is freed, and the engine answers."""
    x, tries = batch(), []
    run = compiled(torch.sin, hungry(tries))
    close(run(x), torch.sin(x))
    Loop()
    close(run(x), torch.sin(x))
    assert len(tries) == 3
    assert (last().chosen, last().runtime.fallbacks) == ("backend", 0)


def test_engine_that_never_has_the_memory_is_given_up(two_gib) -> None:
    """The eager fallback answers three times, then the next candidate serves."""
    x, tries, held = batch(), [], Loop()
    run = compiled(torch.sin, hungry(tries), "aot_eager")
    for _ in range(4):
        close(run(x), torch.sin(x))
    assert held.memory.numel() > GIB
    assert (last().chosen, last().runtime.fallbacks) == ("aot_eager", 3)
    assert last().runtime.last_error.startswith("OutOfMemoryError")


@pytest.mark.slow
def test_the_bench_runs_on_the_card(tmp_path) -> None:
    """One model, all variants: Inductor's have figures, the others figures or a reason."""
    root, figures = ROOT, tmp_path / "gpu.json"
    asked = ("--tiny", "--models", "plain_encoder", "--dtypes", "bf16", "--json", str(figures))
    done = subprocess.run(
        [sys.executable, "bench/gpu.py", *asked], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(figures.read_text())
    assert record["card"]["card"]
    rows = {row["variant"]: row for row in record["results"]}
    for variant in ("inductor", "composer[inductor]", "composer[inductor], graphs"):
        assert rows[variant]["kernels"] > 0
        assert rows[variant]["series"]
        assert rows[variant]["relative_error"] < 0.1
    assert all(row["series"] or row["left_out"] for row in rows.values())


def test_children_of_one_server_use_the_card() -> None:
    """``isolate``: what forks them has not touched it, or each child is an interpreter afresh."""
    x = batch()
    for _ in range(2):
        torch.compiler.reset()
        net = model()
        with torch.no_grad():
            close(compiled(net, "inductor", isolate=True)(x), net(x))
        assert last().chosen == "inductor", last().attempts[0]
        assert last().attempts[0].engine["isolated"]["seconds"] > 0


def test_fork_of_a_process_that_used_the_card_is_a_bad_one() -> None:
    """By torch's own word."""
    torch.zeros(1, device=CUDA)
    assert not _torch.compiles.is_in_bad_fork()

    def says_so() -> None:
        assert _torch.compiles.is_in_bad_fork()

    assert in_child(says_so) == 0
