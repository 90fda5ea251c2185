"""Print the Triton code that Inductor makes of a composed graph for sm_90, where there is no GPU.

Run as a script, in a process of its own, with a torch without CUDA: it stands in for the device's
interface and for Triton's driver. All names here are private to torch and Triton, and belong to
this file alone. Nothing is run on a device.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._dynamo import device_interface, lookup_backend
from torch._inductor import metrics
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _triton
from triton.backends.compiler import GPUTarget

from composer.passes import PatternPass

aten = torch.ops.aten
PROPERTIES = SimpleNamespace(
    **{"name": "sm_90", "type": "cuda", "index": 0, "major": 9, "minor": 0, "warp_size": 32},
    gcnArchName="",
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    total_memory=2**36,
)


class Card(device_interface.CudaInterface):
    """A card that is only described."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_compute_capability(device: Any = None) -> int:
        return 90

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return PROPERTIES

    class Worker(device_interface.CudaInterface.Worker):
        @staticmethod
        def get_device_properties(device: Any = None) -> SimpleNamespace:
            return PROPERTIES


class Driver:
    """A driver for which kernels are compiled, and that runs none."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ w) * 2, -1)


def composed() -> torch.fx.GraphModule:
    """The program's graph as composer hands it to a candidate, behind a shared pass."""
    left: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        left.append(gm)
        return lookup_backend("aot_eager")(gm, example_inputs)

    bounded = PatternPass(
        pattern=lambda x: aten.relu.default(x),
        replacement=lambda x: aten.hardtanh.default(x, 0.0, 6.5),
        name="bounded",
    )
    options = {"chain": [keep], "passes": [bounded], "on_pass_error": "raise", "strict": True}
    torch.compile(program, backend="composer", options=options)(torch.ones(64, 64), torch.eye(64))
    return left[0]


@contextlib.contextmanager
def card_described() -> Any:
    """Torch and Triton believe in the card."""
    device_interface.get_interface_for_device("cpu")  # or it would replace what is registered now
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, Card)
    triton.runtime.driver.set_active(Driver())
    _triton.has_triton.cache_clear()
    said = {"is_available": True, "current_device": 0, "device_count": 1}
    said |= {"get_device_properties": PROPERTIES, "get_device_capability": (9, 0)}
    with contextlib.ExitStack() as stack:
        for name, answer in said.items():
            patched = mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
            stack.enter_context(patched)
        yield


def lowered(gm: torch.fx.GraphModule) -> str:
    """Inductor's code for the graph, with inputs on the card."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        inputs = [torch.empty(64, 64, device="cuda:0") for _ in range(2)]
        flat = make_fx(lambda *args: tuple(gm(*args)), select_decomp_table())(*inputs)
    graph = GraphLowering(flat, shape_env=mode.shape_env)
    with contextlib.ExitStack() as stack:
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(V.set_graph_handler(graph))
        stack.enter_context(V.set_extern_kernel_nodes([]))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        graph.run(*inputs)
        return graph.codegen()[0].value


if __name__ == "__main__":
    gm = composed()
    with card_described():
        sys.stdout.write(lowered(gm))
        sys.stdout.write(f"\nkernels: {metrics.generated_kernel_count}\n")
