"""Loads a plan to an engine, and checks that it fits the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from composer.backends.tensorrt.dtypes import require_dtypes
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.log import Lines
from composer.backends.tensorrt.profiles import Profile
from composer.errors import Refusal
from composer.lowering.export.onnx import Output
from composer.records import Reason, Status


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model.

    Attributes:
        inputs: The name of each input, and its index among the arguments.
        outputs: The name of each output, and how its value is returned, in the region's order.
        dtypes: The torch dtype of each, by name.
        profiles: The profiles of the plan, in its order.
        weights_on_device: Bytes of weights that stay on the device; ``None`` for all.
    """

    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, Output], ...]
    dtypes: Mapping[str, torch.dtype]
    profiles: tuple[Profile, ...]
    weights_on_device: int | None = None


def load(library: Library, plan: bytes, lines: Lines) -> tuple[Any, Any]:
    """Return a runtime and the engine of a plan; the runtime must live as long as the engine.

    Raises:
        Refusal: the plan is damaged or of another release, or there is no driver.
    """
    try:
        runtime = library.module.Runtime(library.log)
    except TypeError as error:  # raised where a factory returns null
        raise lines.refusal("TensorRT makes no runtime") from error
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise lines.refusal("TensorRT cannot load the plan")
    return runtime, engine


def require_same(engine: Any, signature: Signature) -> None:
    """Refuse a plan whose tensors are not those of the model.

    Raises:
        Refusal: names of tensors differ (``build_failed``), or their dtypes
            (``unsupported_dtype``).
    """
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {name for name, _ in (*signature.inputs, *signature.outputs)}
    if names != expected:
        message = f"the plan has the tensors {sorted(names)}, the model {sorted(expected)}"
        raise Refusal(Status.FAILED, Reason.BUILD_FAILED, message)
    for kind, group in (("input", signature.inputs), ("output", signature.outputs)):
        pairs = ((n, engine.get_tensor_dtype(n), signature.dtypes[n]) for n, _ in group)
        require_dtypes(kind, pairs)


def stream_weights(engine: Any, budget: int | None, lines: Lines) -> None:
    """Set how many bytes of the weights stay on the device.

    Call it before a context is created.

    Raises:
        Refusal: TensorRT does not accept the number.
    """
    if budget is None:
        return
    engine.weight_streaming_budget_v2 = budget
    if engine.weight_streaming_budget_v2 != budget:
        raise lines.refusal(f"TensorRT does not keep {budget} bytes of weights on the device")


def in_host_memory(
    names: tuple[str, ...], values: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return weights by name, in host memory, where TensorRT's parser can read them."""
    return {names[i]: each.detach().cpu().contiguous() for i, each in values.items()}
