"""Writes one ONNX model to a file, with a program that runs it by ONNX Runtime alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from composer.backends.arrays import array_over
from composer.backends.onnx_engine import OnnxBuild, OnnxRegion
from composer.backends.onnxrt.optimizers import optimizers_to_disable
from composer.backends.onnxrt.session import config_entries, level_of, prepared
from composer.backends.onnxrt.settings import CPU, Settings

_LARGE = 1 << 30
"""From so many bytes on, weights get a file of their own: a protobuf has at most 2 GiB."""

_UNKNOWN_TO_NUMPY = (torch.bfloat16, None)

_PROGRAM = """import pathlib

import onnxruntime
import torch


def engine(graph):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = {threads}
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}
    for key, value in {entries}.items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(
        str(pathlib.Path(__file__).with_name("model.onnx")),
        options,
        providers={providers},
        disabled_optimizers={disabled},
    )
    read = [each.name for each in session.get_inputs()]

    def run(*args):
        given = dict(zip({names}, args))
        feeds = {{name: torch.as_tensor(given[name]).numpy(force=True) for name in read}}
        return [torch.as_tensor(each) for each in session.run(None, feeds)]

    return run
"""


def write_alone(
    folder: Path,
    region: OnnxRegion,
    weights: Mapping[str, torch.Tensor],
    build: OnnxBuild[Settings],
) -> str:
    """Write the model to ``model.onnx``; return the program, or an empty text where there is none.

    There is none for a GPU, and for inputs and outputs of dtypes that NumPy does not have.
    """
    settings = build.settings
    dtypes = [region.dtypes[i] for i, name in enumerate(region.graph.inputs) if name not in weights]
    dtypes = [each for each in dtypes if each is not None]  # an integer is given as int64
    returned = [output.dtype for output in region.graph.outputs]
    names_cpu = settings.providers in ((), (CPU,))
    if build.device.type != "cpu" or not names_cpu:
        return ""
    if any(each in _UNKNOWN_TO_NUMPY for each in (*dtypes, *returned)):
        return ""
    import onnx

    model, named = prepared(region.graph, weights, {CPU: {}})
    disabled = [*optimizers_to_disable(model)]
    for each in model.graph.initializer:
        if each.name in named:
            each.ClearField("external_data")
            each.ClearField("data_location")
            each.raw_data = array_over(named[each.name]).tobytes()
    is_large = sum(each.nbytes for each in named.values()) > _LARGE
    onnx.save_model(
        model, str(folder / "model.onnx"), save_as_external_data=is_large, location="model.data"
    )
    return _PROGRAM.format(
        threads=settings.threads,
        level=level_of(settings),
        entries=config_entries(settings),
        providers=[CPU],
        disabled=disabled,
        names=[name for name in region.graph.inputs if name not in weights],
    )
