"""Make inference sessions with exactly the requested providers, or refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from composer.backends.arrays import array_over
from composer.backends.onnx_engine import ModelRefused
from composer.backends.onnxrt.library import errors, onnxruntime
from composer.backends.onnxrt.native import native_value, why_not_native
from composer.backends.onnxrt.norms import fuse_norms
from composer.backends.onnxrt.optimizers import optimizers_to_disable
from composer.backends.onnxrt.products import read_weights_as_they_lie
from composer.backends.onnxrt.quantized import (
    compute_softmax_in_floats,
    counted_products,
    dequantize_for_each_reader,
    give_zero_points,
    multiply_in_integers,
    name_for_each_reader,
    quantize_once,
)
from composer.backends.onnxrt.settings import CPU, CUDA, Level, Settings
from composer.backends.onnxrt.values import drop_unread
from composer.backends.tf32 import allows_both
from composer.errors import refuse
from composer.lowering.export.onnx import OnnxGraph
from composer.records import Reason, Status
from composer.system.forks import never_freed_in_forks

if TYPE_CHECKING:
    import onnx

_SPINNING = {"session.force_spinning_stop": "1"}
"""Threads wait actively for work during a call, and stop at its end, since torch's own threads run
next. bench/onnxrt.py measures this."""

_QUANTIZING = {
    "session.disable_double_qdq_remover": "1",
    "session.x64quantprecision": "1",
}
"""Without the first, ONNX Runtime (1.32) would leave out the second of two successive roundings to
integers, even if it has larger steps. Without the second, sums of products of uint8 and int8 would
saturate on processors with AVX2 or AVX-512 and without VNNI (``test_onnxrt_quantized.py``)."""

_KEEPING = frozenset(
    {"Conv", "ConvTranspose", "FusedMatMul", "Gather", "Gemm", "MatMul", "Reshape"}
)
"""Operators of several operands whose weights ONNX Runtime 1.32 never transposes."""

_LEVELS: dict[Level, str] = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
"""ONNX Runtime's name for each optimization level."""


def make_session(
    graph: OnnxGraph,
    weights: Mapping[str, torch.Tensor],
    settings: Settings,
    device: torch.device,
) -> tuple[Any, tuple[Any, ...], int | None]:
    """Make a session that reads the weights in place, without copies where that is possible.

    The weights are contiguous tensors on the device, by the names of the model's inputs.

    Returns:
        The session, the values of the weights, and the number of products that it computes in eight
        bits; ``None`` if that is not known. The values must live as long as the session.

    Raises:
        ModelRefused: ``declined`` if there is no kernel; ``failed`` with ``build_failed`` if the
            model is refused for another reason.
        Refusal: ``failed`` with ``wrong_provider`` if the session lacks a requested provider.
    """
    package = onnxruntime()
    providers = _providers(settings, device)
    _require_built_in(providers, package.get_available_providers(), settings)
    model, weights = prepared(graph, weights, providers)
    on_cpu = _values_on_cpu(model, weights)
    in_place = _values_in_place(on_cpu, weights, device)
    options = session_options(settings)
    # The first call lets the optimizer see the values. It needs them on the CPU: the address of a
    # GPU's memory ends the process. The second call makes the kernels read the values in place.
    # With the first call alone, ONNX Runtime 1.31 copies every value.
    options.add_external_initializers(list(on_cpu), list(on_cpu.values()))
    for name in in_place.keys() - _may_be_transposed(model):
        options.add_initializer(name, in_place[name])
    size = sum(each.nbytes for each in weights.values())
    try:
        with counted_products(model, size, options) as products:
            session = package.InferenceSession(
                model.SerializeToString(),
                options,
                providers=list(providers.items()),
                disabled_optimizers=[*optimizers_to_disable(model)],
                enable_fallback=0,
            )
    except errors("NotImplemented") as error:
        raise ModelRefused(Status.DECLINED, Reason.UNSUPPORTED_OP, str(error)) from error
    except errors("Fail", "InvalidGraph", "RuntimeException") as error:
        raise ModelRefused(Status.FAILED, Reason.BUILD_FAILED, str(error)) from error
    never_freed_in_forks(session).disable_fallback()
    _require_requested(providers, session.get_providers())
    return session, tuple(in_place.values()), next(iter(products), None)


def prepared(
    graph: OnnxGraph,
    weights: Mapping[str, torch.Tensor],
    providers: Mapping[str, object],
) -> tuple[onnx.ModelProto, Mapping[str, torch.Tensor]]:
    """Return the model as a session gets it, and the weights by the names that it reads."""
    model = graph.with_weights(weights)
    _use_own_operators(model, providers)
    if providers.keys() == {CPU}:
        names = name_for_each_reader(model)
        weights = {**weights, **{name: weights[of] for name, of in names.items()}}
    return model, weights


def _use_own_operators(model: onnx.ModelProto, providers: Mapping[str, object]) -> None:
    """Use ONNX Runtime's own operators in a model, as far as all of these providers have them."""
    if any(each.HasField("g") for node in model.graph.node for each in node.attribute):
        return  # a subgraph may read any value
    if providers.keys() == {CPU}:
        quantize_once(model)
        multiply_in_integers(model)
        dequantize_for_each_reader(model)
        give_zero_points(model)
        read_weights_as_they_lie(model)
        compute_softmax_in_floats(model)
    if providers.keys() <= {CPU, CUDA}:
        fuse_norms(model)
        drop_unread(model)


def _values_on_cpu(model: onnx.ModelProto, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """``OrtValue`` objects over the weights that a model reads, or over copies from a GPU.

    They must live until the session is made.
    """
    from_numpy = onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type
    read = [each for each in model.graph.initializer if each.name in weights]
    arrays = {each.name: array_over(weights[each.name].cpu()) for each in read}
    return {each.name: from_numpy(arrays[each.name], each.data_type) for each in read}


def _values_in_place(
    on_cpu: dict[str, Any], weights: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, Any]:
    """``OrtValue`` objects over the weights themselves, by the same names as those on the CPU.

    Empty for a GPU where the native way does not work; ONNX Runtime then copies the weights.
    """
    if device.type == "cpu":
        return on_cpu
    if why_not_native(device.type):
        return {}
    return {name: onnxruntime().OrtValue(native_value(weights[name])) for name in on_cpu}


def _may_be_transposed(model: onnx.ModelProto) -> set[str]:
    """Names of values that the optimizer may replace by their transpose, under the same name.

    The optimizer moves a transposition of one operand behind an operator, and transposes the other
    operands. If another operand is a weight that was given by address, the kernel would still read
    the weight untransposed (``test_such_a_weight_is_still_transposed_under_its_name``).
    """
    names: set[str] = set()
    for node in model.graph.node:
        if len(node.input) > 1 and node.op_type not in _KEEPING:
            names.update(node.input)
    return names


def nodes_by_provider(session: Any) -> dict[str, int]:
    """The number of nodes that each provider took; empty if ONNX Runtime does not tell."""
    taken: Counter[str] = Counter()
    try:
        for part in session.get_provider_graph_assignment_info():
            taken[part.ep_name] += len(part.get_nodes())
    except (AttributeError, TypeError):  # the function is new; only the record needs it
        return {}
    return dict(taken)


def _providers(settings: Settings, device: torch.device) -> dict[str, dict[str, str]]:
    """The providers to request, by name, with their options.

    On a GPU the CUDA provider works in torch's current stream.
    """
    default = (CUDA, CPU) if device.type == "cuda" else (CPU,)
    names = settings.providers or default
    options = {name: settings.provider_options.get(name, {}) for name in names}
    if CUDA in options and device.type == "cuda":
        options[CUDA] = _on_torchs_stream(device) | options[CUDA]
    return options


def _on_torchs_stream(device: torch.device) -> dict[str, str]:
    """Options that give the CUDA provider torch's device, current stream and TF32 setting."""
    options = {
        "user_compute_stream": str(torch.cuda.current_stream(device).cuda_stream),
        "use_tf32": str(int(allows_both())),
    }
    if device.index:  # with a device number, ONNX Runtime 1.31 prints that it is not a plug-in
        options["device_id"] = str(device.index)
    return options


def _require_built_in(
    providers: Mapping[str, object], available: list[str], settings: Settings
) -> None:
    """Refuse if ONNX Runtime was not built with a provider: it would only warn, and go without."""
    missing = [name for name in providers if name not in available]
    if not missing:
        return
    built_in = ", ".join(available)
    message = f"this build of onnxruntime has no {', '.join(missing)} (it has {built_in})"
    if settings.providers:
        refuse(Status.FAILED, Reason.WRONG_PROVIDER, message)
    refuse(Status.UNAVAILABLE, Reason.NOT_INSTALLED, message)


def _require_requested(providers: Mapping[str, object], actual: list[str]) -> None:
    """Refuse if a session lacks a provider that was requested for it."""
    missing = [name for name in providers if name not in actual]
    if missing:
        message = f"asked for {', '.join(missing)}, got {', '.join(actual)}"
        refuse(Status.FAILED, Reason.WRONG_PROVIDER, message)


def level_of(settings: Settings) -> str:
    """ONNX Runtime's name for the level of graph optimization."""
    return _LEVELS[settings.graph_optimization_level]


def config_entries(settings: Settings) -> dict[str, str]:
    """The entries of a session's configuration that change how it computes."""
    return _SPINNING | _QUANTIZING | settings.session_config


def session_options(settings: Settings) -> Any:
    """The options of a session. The user's own entries come last, so they win."""
    package = onnxruntime()
    options = package.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.log_severity_level = 4  # no lines on stderr: errors come as exceptions
    level = level_of(settings)
    options.graph_optimization_level = getattr(package.GraphOptimizationLevel, level)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in config_entries(settings).items():
        options.add_session_config_entry(key, value)
    return options
