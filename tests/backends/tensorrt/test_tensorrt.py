"""The name ``tensorrt``: what it means, and the reasons for which it cannot be here.

No GPU is needed: ``torch_tensorrt`` is a stand-in that registers its backends on import, as the
real one does. What only a GPU shows is not tested here.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch
from common import compiled, last
from engines import honest
from torch._dynamo.backends import registry

from composer.backends import tensorrt
from composer.backends.tensorrt import probe
from composer.backends.torch_tensorrt import TorchTensorRTBackend
from composer.errors import Refusal

STAND_IN = """
import torch
from torch._dynamo import register_backend
asked = []

class TorchTensorRTModule(torch.nn.Module):
    def __init__(self, gm):
        super().__init__()
        self.gm = gm

    def forward(self, *args):
        return self.gm(*args)

def with_an_engine(gm):
    graph = torch.fx.Graph()
    names = [node.target for node in gm.graph.find_nodes(op="placeholder")]
    inputs = tuple(graph.placeholder(name) for name in names)
    graph.output(graph.call_module("engine", inputs))
    return torch.fx.GraphModule({"engine": TorchTensorRTModule(gm)}, graph)

@register_backend(name="tensorrt")
def tensorrt(gm, example_inputs, *, options=None):
    asked.append(options)
    return with_an_engine(gm)

__version__ = "0.0.stand-in"
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put a torch_tensorrt on the path and pretend that the graph may run on a GPU."""

    def install(source: str = STAND_IN) -> None:
        (tmp_path / "torch_tensorrt.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(TorchTensorRTBackend, "probe", lambda self, request: None)

    yield install
    sys.modules.pop("torch_tensorrt", None)
    for table in (registry._BACKENDS, registry._COMPILER_FNS):
        table.pop("tensorrt", None)


def test_without_gpu_it_is_unavailable_for_want_of_a_device() -> None:
    """On this machine, whatever is installed."""
    compiled(torch.sin, "tensorrt", "eager")(torch.ones(2))
    (attempt, _) = last().attempts
    assert (attempt.status, attempt.reason) == ("unavailable", "no_device")
    assert "torch_tensorrt" not in sys.modules


@pytest.mark.parametrize(
    ("cuda", "card", "driver", "reason"),
    [
        (None, False, False, "no_device"),
        ("13.0", False, False, "no_device"),
        ("13.0", True, False, "driver_missing"),
        ("13.0", True, True, "no_device"),
    ],
)
def test_the_true_reason_is_named(monkeypatch, cuda, card, driver, reason) -> None:
    """A torch without CUDA, no card, a card without driver, a card that torch cannot use."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(probe, "_has_nvidia_card", lambda: card)
    monkeypatch.setattr(probe, "_has_driver", lambda: driver)
    compiled(torch.sin, "tensorrt", "eager")(torch.ones(2))
    assert last().attempts[0].reason == reason


def test_with_a_gpu_a_graph_on_the_cpu_has_no_device(monkeypatch) -> None:
    """TensorRT runs graphs on CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Refusal, match="the graph is on cpu") as caught:
        tensorrt.TensorRTEngine().probe(types.SimpleNamespace(device="cpu"))
    assert caught.value.reason == "no_device"


def test_with_a_gpu_and_no_package_it_is_not_installed(monkeypatch) -> None:
    """Found out without importing anything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in probe.LIBRARIES:  # another test may have imported one
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(Refusal) as caught:
        tensorrt.TensorRTEngine().probe(types.SimpleNamespace(device="cuda:0"))
    assert caught.value.reason == "not_installed"


def test_the_backend_that_torch_tensorrt_registers_is_used_and_asked_for_the_truth(
    installed,
) -> None:
    """Build failures must be raised, not swallowed."""
    installed()
    x = torch.randn(3)
    options = {"backend": "tensorrt", "options": {"min_block_size": 1}}
    torch.testing.assert_close(compiled(torch.sin, options)(x), torch.sin(x))
    assert last().chosen == "tensorrt"
    assert last().attempts[0].engine == {
        "options": {"min_block_size": 1},
        "torch_tensorrt": "0.0.stand-in",
    }
    asked = sys.modules["torch_tensorrt"].asked
    assert asked == [{"pass_through_build_failures": True, "min_block_size": 1}]


@pytest.mark.parametrize("first", ["torch_tensorrt", "composer"])
def test_torch_tensorrt_may_be_imported_before_or_after(installed, first) -> None:
    """Dynamo's registry refuses duplicates; there are none in either order."""
    installed()
    if first == "torch_tensorrt":
        importlib.import_module("torch_tensorrt")
    compiled(torch.sin, "tensorrt")(torch.ones(2))
    if first == "composer":
        sys.modules.pop("torch_tensorrt")
        for table in (registry._BACKENDS, registry._COMPILER_FNS):
            table.pop("tensorrt")
        importlib.import_module("torch_tensorrt")
    assert last().chosen == "tensorrt"


def test_a_backend_that_the_program_registered_is_what_the_name_means() -> None:
    """As for ``torch.compile(backend="tensorrt")``; it may run on the CPU."""
    torch._dynamo.register_backend(honest, name="tensorrt")
    try:
        x = torch.randn(3)
        torch.testing.assert_close(compiled(torch.sin, "tensorrt")(x), torch.sin(x))
        assert (last().chosen, last().attempts[0].engine) == ("tensorrt", {})
    finally:
        for table in (registry._BACKENDS, registry._COMPILER_FNS):
            del table["tensorrt"]


def test_composer_never_registers_the_name(run_python) -> None:
    """A later ``import torch_tensorrt`` finds it free, also after composer tried it."""
    done = run_python(
        "import torch, composer\n"
        "f = torch.compile(torch.sin, backend='composer',"
        " options={'chain': ['tensorrt', 'eager']})\n"
        "f(torch.ones(2))\n"
        "torch._dynamo.register_backend(lambda gm, x: gm.forward, name='tensorrt')\n"
        "print('free')"
    )
    assert done.stdout.strip() == "free", done.stderr


@pytest.mark.parametrize(
    "source", ["raise Exception('no libnvinfer')", "assert False, 'no CUDA'", "print('x'); 1 / 0"]
)
def test_an_import_that_raises_anything_is_contained(installed, capsys, source) -> None:
    """The real one raises bare exceptions and assertion errors, and prints."""
    installed(source)
    x = torch.ones(2)
    torch.testing.assert_close(compiled(torch.sin, "tensorrt", honest)(x), torch.sin(x))
    (attempt, _) = last().attempts
    assert (attempt.status, attempt.reason) == ("unavailable", "not_installed")
    assert attempt.error_type in ("Exception", "AssertionError", "ZeroDivisionError")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["TorchTensorRTModule", "Sequential"])
def test_a_graph_must_have_an_engine_inside(installed, kind) -> None:
    """Below its smallest block torch_tensorrt returns a graph of its own making, and no engine."""
    installed(
        "import torch\nfrom torch._dynamo import register_backend\n"
        "class TorchTensorRTModule(torch.nn.Sequential): pass\n"
        "Sequential = torch.nn.Sequential\n"
        '@register_backend(name="tensorrt")\n'
        "def tensorrt(gm, example_inputs, *, options=None):\n"
        "    graph = torch.fx.Graph()\n"
        "    x = graph.placeholder('x')\n"
        "    graph.output((graph.call_module('block', (graph.call_function(torch.sin, (x,)),)),))\n"
        f"    return torch.fx.GraphModule({{'block': {kind}()}}, graph)\n"
    )
    x = torch.ones(2)
    torch.testing.assert_close(compiled(torch.sin, "tensorrt", "eager")(x), torch.sin(x))
    assert last().chosen == ("eager" if kind == "Sequential" else "tensorrt")
    if kind == "Sequential":
        assert last().attempts[0].reason == "returned_original"


def test_a_package_that_registers_nothing_is_not_registered(installed) -> None:
    """Imported, and still no backend of that name."""
    installed("__version__ = '0'")
    compiled(torch.sin, "tensorrt", "eager")(torch.ones(2))
    assert last().attempts[0].reason == "not_registered"


def test_a_module_without_a_spec_counts_as_installed(monkeypatch) -> None:
    """As a stub put into ``sys.modules`` has none."""
    from composer.backends.base import is_installed

    monkeypatch.setitem(sys.modules, "torch_tensorrt", types.ModuleType("torch_tensorrt"))
    assert is_installed("torch_tensorrt")


def test_a_backend_that_hands_the_graph_back_is_rejected(installed) -> None:
    """torch_tensorrt does so below its smallest block size."""
    installed(STAND_IN.replace("return with_an_engine(gm)", "return gm"))
    compiled(torch.sin, "tensorrt", "eager")(torch.ones(2))
    assert last().attempts[0].reason == "returned_original"
