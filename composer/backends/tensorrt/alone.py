"""Writes one ONNX model to a file, with a program that runs it by TensorRT alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from composer.backends.onnx_engine import OnnxBuild
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.network import INLINE, creation_flags, inlined, weights_of
from composer.backends.tensorrt.profiles import profile_of
from composer.backends.tensorrt.regions import Read
from composer.backends.tensorrt.settings import Settings
from composer.backends.tf32 import allows_both

_PROGRAM = """import pathlib

import {library} as trt
import torch


def engine(graph):
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network({creation_flags})
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(pathlib.Path(__file__).with_name("model.onnx"))):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise RuntimeError("TensorRT's parser refuses the model: " + "; ".join(errors))
    config = builder.create_builder_config()
    for name, is_set in {flags}.items():
        flag = getattr(trt.BuilderFlag, name)
        config.set_flag(flag) if is_set else config.clear_flag(flag)
    of_config = {{"optimization_level": "builder_optimization_level"}}
    for name, value in {settings}.items():
        setattr(config, of_config.get(name, name), value)
    for mib in {workspace}:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, mib << 20)
    for shapes in {profiles}:
        profile = builder.create_optimization_profile()
        for name, sizes in shapes.items():
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("TensorRT builds no plan")
    runtime = trt.Runtime(logger)
    context = runtime.deserialize_cuda_engine(plan).create_execution_context()

    def run(*args):
        held = [runtime]  # which has to live as long as its engine
        stream = torch.cuda.current_stream("{device}")
        context.set_optimization_profile_async(0, stream.cuda_stream)
        for name, (position, dtype) in {inputs}.items():
            given = torch.as_tensor(args[position], dtype=dtype, device="{device}").contiguous()
            context.set_input_shape(name, tuple(given.shape))
            context.set_tensor_address(name, given.data_ptr())
            held.append(given)
        outputs = []
        for name, dtype in {outputs}.items():
            shape = tuple(context.get_tensor_shape(name))
            outputs.append(torch.empty(shape, dtype=dtype, device="{device}"))
            context.set_tensor_address(name, outputs[-1].data_ptr())
        if not context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError("the engine fails")
        stream.synchronize()
        return outputs

    return run
"""


def write_alone(
    folder: Path,
    library: Library,
    read: Read,
    weights: Mapping[str, torch.Tensor],
    build: OnnxBuild[Settings],
) -> str:
    """Write the model to ``model.onnx``; return the program, or an empty text where there is none.

    There is none for weights of more than 1 GiB. The program keeps all weights on the device, and
    fails at an output whose size depends on values.
    """
    graph, settings = read.graph, build.settings
    held = {name: each.cpu() for name, each in weights.items()}
    model = graph.with_weights(held)
    read_by_it = weights_of(model, held)
    if sum(each.nbytes for each in read_by_it.values()) > INLINE:
        return ""
    (folder / "model.onnx").write_bytes(inlined(model, read_by_it))
    given = [name for name in graph.inputs if name not in held]
    places = {name: i for i, name in enumerate(given)}
    inputs = [each.name for each in model.graph.input if each.name in places]
    return _PROGRAM.format(
        library=library.name,
        creation_flags=creation_flags(library.module),
        flags={"TF32": allows_both(), "REFIT": settings.refittable},
        settings=_said(settings, "optimization_level", "max_aux_streams"),
        workspace=[*_said(settings, "workspace_mib").values()],
        profiles=[profile_of(read.shapes, each) for each in read.ranges],
        device=build.device,
        inputs={name: (places[name], read.dtypes[name]) for name in inputs},
        outputs={each.name: read.dtypes[each.name] for each in model.graph.output},
    )


def _said(settings: Settings, *names: str) -> dict[str, int]:
    """Return the options that are not left to TensorRT."""
    return settings.model_dump(include={*names}, exclude_none=True)
