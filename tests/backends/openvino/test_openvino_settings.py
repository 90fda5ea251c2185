"""Options of ``openvino`` and its probe: nothing is compiled here."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

import pytest
import torch

from composer.backends import find_backend
from composer.backends.openvino import OpenVinoEngine
from composer.errors import OptionError, Refusal
from composer.graphs import capture
from composer.system.distribution import install

WRONG = {
    "unknown option": ({"thread": 2}, "did you mean 'threads'"),
    "no threads": ({"threads": 0}, "'threads' is 0: Input should be greater than 0"),
    "unknown precision": ({"precision": "fp8"}, "'precision' is 'fp8'"),
    "unknown device": ({"device": "CPUU"}, "unknown device; did you mean 'CPU'"),
    "an index that is none": ({"device": "GPU.x"}, "unknown device"),
    "a property that composer sets": (
        {"config": {"INFERENCE_PRECISION_HINT": "bf16"}},
        "composer sets INFERENCE_PRECISION_HINT \\(set 'precision'\\)",
    ),
}

JUDGED = {
    "a slip": ({"NUM_STREAM": "1"}, "CPU has no property 'NUM_STREAM'; did you mean 'NUM_STREAMS'"),
    "what is read only": ({"FULL_DEVICE_NAME": "x"}, "CPU has no property 'FULL_DEVICE_NAME'"),
    "a wrong value": ({"PERFORMANCE_HINT": "FAST"}, "PERFORMANCE_HINT = 'FAST': Wrong value"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_raise(options, message) -> None:
    """Installed or not."""
    with pytest.raises(OptionError, match=message):
        OpenVinoEngine().settings(options)


@pytest.mark.parametrize(("config", "message"), JUDGED.values(), ids=JUDGED)
def test_wrong_properties_raise(config, message) -> None:
    """Asked of OpenVINO's own device."""
    pytest.importorskip("openvino", reason="it judges its properties")
    with pytest.raises(OptionError, match=message):
        OpenVinoEngine().settings({"config": config})


def test_properties_of_a_device_that_is_not_here_are_not_judged() -> None:
    """A policy may be written for another machine."""
    assert (
        OpenVinoEngine().settings({"device": "NPU", "config": {"NPU_TURBO": "YES"}}).device == "NPU"
    )


def probe(device: str) -> Refusal | None:
    """What the engine says of a graph that is on this device."""
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    request = capture.read_request(gm, [torch.ones(1)])
    try:
        find_backend("openvino").probe(dataclasses.replace(request, device=device))
    except Refusal as refusal:
        return refusal
    return None


@pytest.mark.parametrize("missing", ["openvino", "onnx", "onnxscript"])
def test_a_missing_package_is_unavailable(missing, monkeypatch) -> None:
    """With the command that installs it, and nothing imported."""
    find = importlib.util.find_spec
    absent = {missing: None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    monkeypatch.delitem(sys.modules, missing, raising=False)
    loaded = set(sys.modules)
    refusal = probe("cpu")
    assert refusal is not None
    assert refusal.reason == "not_installed"
    assert str(refusal) == f"{missing} not installed; {install('openvino')}"
    assert set(sys.modules) == loaded


def test_graphs_on_another_device_are_not_for_it() -> None:
    """OpenVINO reads torch's memory of the CPU."""
    pytest.importorskip("openvino", reason="its probe asks for the package first")
    refusal = probe("cuda:0")
    assert refusal is not None
    assert refusal.reason == "no_device"
