"""ONNX Runtime: the shared ONNX lowering, run by an inference session.

``torch.compile(model, backend="onnxrt")`` works by itself, as it did until torch removed its own
backend of that name (pytorch/pytorch#158258), and as a member of composer's chain.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # no __all__

from composer import _torch
from composer.backends.base import Backend, check_known, note, require_installed
from composer.errors import OptionError, Refusal, refuse
from composer.lowering.aot import FunctionalGraph, compile_inference
from composer.lowering.onnx import OnnxGraph, Output, to_onnx
from composer.lowering.weights import BoundWeights
from composer.records import GraphRequest, Reason, Status

_PROVIDER = "CPUExecutionProvider"
_RESTLESS = 2
"""After so many changes a weight is no longer taken in but passed as an input at every call."""


class OnnxRuntimeBackend(Backend):
    """Inference graphs on the CPU, whole or not at all.

    Option ``threads``: threads of one operator, by default ``torch.get_num_threads()``.
    """

    reads_example_inputs = False

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Only ``threads``, a positive integer."""
        _settings(options)

    def probe(self, request: GraphRequest) -> None:
        """Packages and device; a training graph is declined before anything is imported."""
        _require(request.device)
        if request.training:
            what = "the graph needs a backward; under torch.no_grad() it would not"
            refuse(Status.DECLINED, Reason.TRAINING_GRAPH, what)

    def build(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None,
        options: Mapping[str, Any],
    ) -> object:
        """Look ``onnxrt`` up, as any other Dynamo backend."""
        return _torch.lookup_backend("onnxrt")(gm, example_inputs, options=options)  # type: ignore[call-arg]  # Dynamo's protocol names two arguments; onnxrt takes more


def onnxrt(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend ``onnxrt``: compile a graph for ONNX Runtime or say why not.

    Args:
        gm: The captured graph.
        example_inputs: Tensors and symbols, in the order of the placeholders.
        mode: ``torch.compile``'s mode; ONNX Runtime has nothing to choose by it.
        options: ``threads``.

    Raises:
        OptionError: an option is unknown or malformed.
        Refusal: the graph needs a backward, or holds something ONNX Runtime cannot run.
    """
    build = functools.partial(_build_engine, settings=_settings(options or {}))
    _require(*{str(each.device) for each in example_inputs if isinstance(each, torch.Tensor)})
    return compile_inference(gm, example_inputs, build)


def _require(*devices: str) -> None:
    """Refuse without the packages, or for a graph that is not on the CPU alone."""
    require_installed(("onnxruntime", "onnx", "onnxscript"), "pip install 'torch-composer[onnxrt]'")
    elsewhere = [device for device in devices if device != "cpu"]
    if elsewhere:
        what = f"the graph is on {', '.join(elsewhere)}; onnxrt runs graphs on the CPU"
        refuse(Status.UNAVAILABLE, Reason.NO_DEVICE, what)


@dataclass(frozen=True, slots=True)
class Settings:
    """How sessions are made; ``threads`` is the number of threads within one operator."""

    threads: int


def _settings(options: Mapping[str, Any]) -> Settings:
    check_known(options, ("threads",), "onnxrt")
    threads = options.get("threads", torch.get_num_threads())
    if type(threads) is not int or threads < 1:
        raise OptionError(f"backend 'onnxrt': threads is a positive integer, not {threads!r}")
    return Settings(threads)


def _build_engine(graph: FunctionalGraph, settings: Settings) -> Callable[..., Any]:
    engine = OnnxRuntimeEngine(to_onnx(graph), graph.weights, graph.witnesses, settings)
    if graph.example_args:
        _try_once(engine, graph)
    note(coverage=1.0, **engine.facts())
    return engine


def _try_once(engine: OnnxRuntimeEngine, graph: FunctionalGraph) -> None:
    """Run the first call's inputs: what only shows at run time shows before it matters.

    Raises:
        Refusal: the session fails, or an output has not the shape or dtype of eager's.
    """
    try:
        results = engine(*graph.example_args)
    except Exception as error:
        what = f"the session fails on the first inputs: {error}"
        raise Refusal(Status.FAILED, Reason.BUILD_FAILED, what) from error
    for index, (got, expected) in enumerate(zip(results, graph.expected, strict=True)):
        if expected is not None and (tuple(got.shape), got.dtype) != expected:
            what = f"output {index} is {got.dtype} {tuple(got.shape)}, not {expected}"
            refuse(Status.REJECTED, Reason.OUTPUT_MISMATCH, what)


@dataclass(frozen=True, slots=True)
class Bound:
    """A session and the weights it took in; replaced whole when a weight changes."""

    session: Any
    weights: BoundWeights
    feeds: tuple[tuple[str, int], ...]
    keep_alive: tuple[Any, ...]


class OnnxRuntimeEngine:
    """One ONNX model in a session, called with the functional graph's inputs.

    Args:
        graph: The model.
        weights: Tensors to take in by address, by position among the inputs.
        witnesses: Tensors that tell of a change of the weight at their position.
        settings: How to make sessions.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        weights: Mapping[int, torch.Tensor],
        witnesses: Mapping[int, torch.Tensor],
        settings: Settings,
    ) -> None:
        self._graph = graph
        self._witnesses = witnesses
        self._settings = settings
        self._lock = threading.Lock()
        self._to_ort = _ort_converter()
        self._changes: Counter[int] = Counter()
        self._bound = self._bind(weights)
        self._output_names = [each.name for each in graph.model.graph.output]

    def facts(self) -> dict[str, Any]:
        """What the engine says of itself, for the record."""
        import onnxruntime

        session = self._bound.session
        return {
            "onnxruntime": onnxruntime.__version__,
            "providers": list(session.get_providers()),
            "threads": self._settings.threads,
        }

    def __call__(self, *args: Any) -> list[Any]:
        """Run the session on torch's memory; outputs are ONNX Runtime's, handed over by DLPack."""
        bound = self._bound
        if not bound.weights.unchanged(args):
            bound = self._rebind(args)
        to_ort = self._to_ort
        feeds = {name: to_ort(args[position]) for name, position in bound.feeds}
        results = bound.session.run_with_ort_values(feeds, self._output_names, None)
        # By index: iterating over the vector costs 30 us (onnxruntime 1.31).
        tensors = [from_dlpack(results.dlpack_at(i)) for i in range(len(results))]
        return [_finish(plan, tensors, args) for plan in self._graph.outputs]

    def _rebind(self, args: Sequence[Any]) -> Bound:
        """A session with the weights as they are now. The model is not exported again."""
        with self._lock:
            weights = self._bound.weights
            changed = weights.changed(args)
            self._changes.update(changed)
            if changed:
                calm = (i for i in weights.positions if self._changes[i] < _RESTLESS)
                self._bound = self._bind({i: args[i] for i in calm})
            return self._bound

    def _bind(self, weights: Mapping[int, torch.Tensor]) -> Bound:
        names = self._graph.inputs
        taken = {names[i]: tensor for i, tensor in weights.items()} | self._graph.constants
        values = {name: self._to_ort(tensor) for name, tensor in taken.items()}
        session = _make_session(self._graph, values, self._settings)
        asked = {each.name for each in session.get_inputs()}
        feeds = tuple((name, i) for i, name in enumerate(names) if name in asked)
        bound = BoundWeights(weights, self._witnesses)
        return Bound(session._sess, bound, feeds, tuple(values.values()))


def _make_session(graph: OnnxGraph, values: Mapping[str, Any], settings: Settings) -> Any:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.log_severity_level = 4  # no lines on stderr: errors come as exceptions
    model = graph.with_weights(values)
    used = {each.name for each in model.graph.initializer}
    given = {name: onnxruntime.OrtValue(v) for name, v in values.items() if name in used}
    if given:
        # The first lets the optimizer see the values, the second has the kernels read them where
        # they lie: with the first alone ONNX Runtime (1.31) copies every one.
        options.add_external_initializers(list(given), list(given.values()))
        for name, value in given.items():
            options.add_initializer(name, value)
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[_PROVIDER]
        )
    except NoKernel as error:
        raise Refusal(Status.DECLINED, Reason.UNSUPPORTED_OP, str(error)) from error
    if session.get_providers()[:1] != [_PROVIDER]:
        what = f"asked for {_PROVIDER}, got {session.get_providers()}"
        refuse(Status.FAILED, Reason.WRONG_PROVIDER, what)
    return session


def _ort_converter() -> Callable[[Any], Any]:
    """What makes an ONNX Runtime value over a tensor's memory, or a copy where it has to."""
    from onnxruntime.capi._pybind_state import OrtValue

    wrap = OrtValue.from_dlpack

    def convert(value: Any) -> Any:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if tensor.dtype is torch.bool:  # ONNX Runtime wants booleans as bytes, and to be told
            return wrap(to_dlpack(tensor.view(torch.uint8)), True)
        return wrap(to_dlpack(tensor), False)

    return convert


def _finish(plan: Output, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
    """One output of the graph, as its plan says."""
    if plan.kind == "constant":
        return plan.value
    tensor = args[plan.index] if plan.kind == "input" else tensors[plan.index]
    if plan.is_symbol:
        return tensor.item()
    if plan.is_bool and plan.kind == "engine":
        tensor = tensor.view(torch.bool)
    if plan.view is not None:
        size, stride, offset = plan.view
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
    if plan.strides is not None:
        laid_out = torch.empty_strided(tensor.shape, plan.strides, dtype=tensor.dtype)
        return laid_out.copy_(tensor)
    if plan.order is not None:
        inverse = [plan.order.index(dim) for dim in range(len(plan.order))]
        return tensor.permute(plan.order).contiguous().permute(inverse)
    if plan.repeated:
        return _repeat(tensor, plan.repeated)
    return tensor


def _repeat(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The same values with a stride of zero along ``dims``."""
    size = tensor.shape
    for dim in dims:
        tensor = tensor.narrow(dim, 0, min(1, size[dim]))
    return tensor.contiguous().expand(size)
