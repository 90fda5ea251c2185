"""What only an NVIDIA GPU can show; skipped where there is none."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import compiled, last
from engines import honest
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache, run_and_get_code

import composer
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
    """By TensorRT where it is, else by Inductor; never by the floor."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inductor_is_verified_on_the_card(dtype) -> None:
    """In every precision of serving, with what was compared in the record."""
    net, x = model(dtype), batch(dtype)
    with torch.no_grad():
        compiled(net, "inductor", verify="compile")(x)
    assert last().chosen == "inductor"
    assert last().attempts[0].engine["verified"]["values"] > 0


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


def test_training_on_the_card_is_verified_gradients_included() -> None:
    """Forward and backward by Inductor."""
    net, x = model().train(), batch()
    expected = torch.autograd.grad(net(x).sum(), [*net.parameters()])
    run = compiled(net, "inductor", verify="compile")
    for got, wanted in zip(
        torch.autograd.grad(run(x).sum(), [*net.parameters()]), expected, strict=True
    ):
        close(got, wanted)
    assert (last().chosen, last().training) == ("inductor", True)


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
    """The floor answers three times, then the next candidate serves."""
    x, tries, held = batch(), [], Loop()
    run = compiled(torch.sin, hungry(tries), "aot_eager")
    for _ in range(4):
        close(run(x), torch.sin(x))
    assert held.memory.numel() > GIB
    assert (last().chosen, last().runtime.fallbacks) == ("aot_eager", 3)
    assert last().runtime.last_error.startswith("OutOfMemoryError")


@pytest.mark.parametrize("engine", ["inductor", "aot_eager"])
def test_work_goes_to_the_callers_stream(engine) -> None:
    """Compiled on one stream, called on another, right on both."""
    net, x = model(), batch()
    run, side = compiled(net, engine), torch.cuda.Stream()
    with torch.no_grad():
        expected = net(x)
        close(run(x), expected)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10**7)
            got = run(x * 1)
        side.synchronize()
        close(got, expected)
    assert last().runtime.calls == 2


@pytest.mark.slow
def test_the_bench_runs_on_the_card(tmp_path) -> None:
    """One model, all variants: Inductor's have figures, the others figures or a reason."""
    root, figures = Path(__file__).parents[1], tmp_path / "gpu.json"
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
