"""Writes one model to files in OpenVINO's form, with a program that runs it by OpenVINO alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from composer.backends.onnx_engine import OnnxBuild, OnnxRegion
from composer.backends.openvino import library
from composer.backends.openvino.compiled import with_weights_taken_in
from composer.backends.openvino.settings import Settings

_PROGRAM = """import pathlib

import openvino
import torch


def engine(graph):
    core = openvino.Core()
    model = core.read_model(pathlib.Path(__file__).with_name("model.xml"))
    compiled = core.compile_model(model, {device!r}, {config})

    def run(*args):
        given = [torch.as_tensor(args[i]).numpy(force=True) for i in {positions}]
        results = compiled(given)
        return [torch.as_tensor(results[port]) for port in compiled.outputs]

    return run
"""


def write_alone(
    folder: Path,
    region: OnnxRegion,
    weights: Mapping[str, torch.Tensor],
    build: OnnxBuild[Settings],
) -> str:
    """Write ``model.xml`` and ``model.bin``; return the program.

    It is an empty text for inputs and outputs of dtypes that NumPy does not have.
    """
    returned = [output.dtype for output in region.graph.outputs]
    if torch.bfloat16 in (*region.dtypes, *returned) or None in returned:
        return ""
    made, config, taken_in = with_weights_taken_in(region, weights, build)
    if taken_in.keys() != weights.keys():  # it is an input of the model, and none of the program
        return ""
    library.openvino().serialize(made, str(folder / "model.xml"))
    names = [name for name in region.graph.inputs if name not in weights]
    positions = [names.index(each.friendly_name) for each in made.get_parameters()]
    return _PROGRAM.format(device=build.settings.device, config=config, positions=positions)
