"""Gives a refittable plan new weights, and writes such a plan without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.log import Lines
from composer.backends.tensorrt.network import load_by_address, weights_of
from composer.lowering.export.onnx import OnnxGraph


def refit(
    library: Library,
    engine: Any,
    graph: OnnxGraph,
    weights: Mapping[str, torch.Tensor],
    lines: Lines,
) -> None:
    """Give an engine the values of its weights; none of its contexts may be running.

    The weights are contiguous tensors in host memory, by name. The library's log is being recorded.

    Raises:
        Refusal: ``failed`` with ``build_failed`` if TensorRT does not accept the weights.
    """
    trt = library.module
    try:
        refitter = trt.Refitter(engine, library.log)
        reader = trt.OnnxParserRefitter(refitter, library.log)
    except TypeError as error:  # raised where a factory returns null
        raise lines.refusal("TensorRT makes no refitter") from error
    model = graph.with_weights(weights)
    loaded = load_by_address(reader, model, weights_of(model, weights))
    if not (loaded and reader.refit_model_proto() and refitter.refit_cuda_engine()):
        raise lines.refusal("TensorRT does not take the weights")


def without_weights(library: Library, engine: Any, lines: Lines) -> bytes:
    """Return the plan of a refittable engine without its weights.

    Such a plan is small, and can take any weights.

    Raises:
        Refusal: ``failed`` with ``build_failed`` if TensorRT does not write it.
    """
    serialization = engine.create_serialization_config()
    serialization.set_flag(library.module.SerializationFlag.EXCLUDE_WEIGHTS)
    plan = engine.serialize_with_config(serialization)
    if plan is None:
        raise lines.refusal("TensorRT does not write the plan")
    return bytes(plan)
