"""Triton on a machine without a GPU: interpreted, and compiled for a card that is not there.

What only a GPU can show is in tests/end_to_end/test_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from common import ROOT
from forked import Interpreter

triton = pytest.importorskip("triton", reason="needs triton")

pytestmark = pytest.mark.slow

SHARED = ROOT / "tests" / "shared"
INTERPRETED = """
import torch, composer
from kernels import bringing_in, gate, program

x, y = torch.randn(1000), torch.randn(1000)
torch.testing.assert_close(gate(x, y), torch.nn.functional.silu(x) * y)
for engine in ("inductor", "onnxrt", "aot_eager", "eager"):
    torch.compiler.reset()
    options = {"chain": [engine], "passes": [bringing_in("gate")], "on_pass_error": "raise"}
    run = torch.compile(program, backend="composer", options=options)
    torch.testing.assert_close(run(x, y), program(x, y))
    report = composer.reports()[-1]
    left = report.attempts[0].engine.get("left_to_torch", [""])[0]
    print(report.chosen, report.passes[0].matches, left.partition(" at ")[0])
"""


def test_users_kernel_runs_under_every_engine_by_the_interpreter(fresh_python) -> None:
    """A shared pass brings it in; ONNX Runtime leaves it to torch and takes the rest."""
    done = fresh_python(INTERPRETED, env={"TRITON_INTERPRET": "1"}, cwd=SHARED)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == [
        "inductor 1",
        "onnxrt 1 composer_tests.gate.default (no ONNX translation)",
        "aot_eager 1",
        "eager 1",
    ]


def test_operator_that_inductor_sees_into_can_be_brought_in(monkeypatch) -> None:
    """``triton_op`` has fake values without a driver, so the pass keeps its contract."""
    from common import compiled, last
    from kernels import bringing_in, program

    seen = []

    def refuses(gm, example_inputs):
        seen.extend(str(node.target) for node in gm.graph.nodes)
        raise RuntimeError("a kernel needs a driver to run")

    run = compiled(program, refuses, passes=[bringing_in("open_gate")], on_exhausted="raise")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="needs a driver"):
        run(torch.ones(4), torch.ones(4))
    assert "composer_tests.open_gate.default" in seen
    assert (last().passes[0].matches, last().passes[0].error) == (1, "")


def test_users_kernel_compiles_for_a_card_that_is_not_here(monkeypatch, tmp_path) -> None:
    """PTX and machine code for sm_90, by the assembler that Triton brings."""
    from kernels import gate_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp32")
    signature = pointers | {"count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(gate_kernel, signature=signature, constexprs={"BLOCK": 128})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90a" in made.asm["ptx"]
    assert made.asm["cubin"].startswith(b"\x7fELF")


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_composed_graph_lowers_to_triton_for_a_card_that_is_not_here(
    interpreter: Interpreter,
) -> None:
    """One kernel for softmax and what stands before it, the shared pass's bound included."""
    done = interpreter.run([str(SHARED / "lowered_to_triton.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("async_compile.triton(") == 1
    assert "kernels: 1" in done.stdout
    assert "6.5" in done.stdout
    assert "cc=90" in done.stdout
