"""The machine's best matrix product: what the operations of a model a second are a share of.

A square product of torch, ONNX Runtime and, where it is here, OpenVINO, in float32 and bfloat16.
Best is the quickest of the calls, of all libraries, in each precision. None of the three is the
machine's limit; a model may even beat them, where its engine has a quicker kernel.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator

import torch
from compiles import first_line
from timing import VariantError, measure

from composer.backends.onnxrt.library import onnxruntime

log = logging.getLogger("bench.products")

SIDE, SECONDS = 1024, 0.5
Call = Callable[[], object]


def products(side: int = SIDE) -> dict[str, dict[str, float]]:
    """GFLOP/s of the quickest call within half a second, by precision and library.

    One that raised has none.
    """
    found: dict[str, dict[str, float]] = {"fp32": {}, "bf16": {}}
    for precision, library, call in _calls(side):
        try:
            quickest = _quickest(library, call)
        except VariantError as error:
            log.debug("%s: %s", library, first_line(error.__cause__ or error))
        else:
            found[precision][library] = 2 * side**3 / quickest / 1e6
    return found


def _quickest(library: str, call: Call) -> float:
    """Milliseconds of the quickest call; a processor without bfloat16 takes seconds for one."""
    first = measure({library: call}, 1, warmup=1, settle=0)[library].minimum
    rounds = max(1, min(20, int(SECONDS * 1e3 / first)))
    return min(first, measure({library: call}, rounds, warmup=0, settle=0)[library].minimum)


def best(found: dict[str, dict[str, float]], precision: str) -> float | None:
    """The most GFLOP/s of any library; ``None`` where none was measured."""
    return max(found.get(precision, {}).values(), default=None)


def _calls(side: int) -> Iterator[tuple[str, str, Call]]:
    a, b = (torch.randn(side, side) for _ in range(2))
    yield "fp32", "torch", functools.partial(torch.mm, a, b)
    yield "bf16", "torch", functools.partial(torch.mm, a.bfloat16(), b.bfloat16())
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return
    model = _model(side, b)
    yield "fp32", "onnxruntime", _onnxruntime(model, a)
    if importlib.util.find_spec("openvino") is not None:
        yield "fp32", "openvino", _openvino(model, a, "f32")
        yield "bf16", "openvino", _openvino(model, a, "bf16")


def _model(side: int, weight: torch.Tensor) -> bytes:
    """A product with a constant, as the weights of a model are."""
    from onnx import TensorProto, helper, numpy_helper

    shape = [side, side]
    given, made = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("a", "c"))
    held = numpy_helper.from_array(weight.numpy(), "b")
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([node], "product", [given], [made], [held])
    opset = helper.make_opsetid("", 18)
    return bytes(helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString())


def _onnxruntime(model: bytes, a: torch.Tensor) -> Call:
    package = onnxruntime()
    options = package.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = package.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return functools.partial(session.run, None, {"a": a.numpy()})


def _openvino(model: bytes, a: torch.Tensor, precision: str) -> Call:
    import openvino

    threads = torch.get_num_threads()
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    core = openvino.Core()
    request = core.compile_model(core.read_model(model), "CPU", settings).create_infer_request()
    return functools.partial(request.infer, [a.numpy()], share_inputs=True, share_outputs=True)
