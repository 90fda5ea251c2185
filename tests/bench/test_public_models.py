"""The public models whole: what is left to torch costs time long before it costs numbers."""

from __future__ import annotations

import pytest
import torch
import zoo
from common import compiled, thorough

import composer

pytestmark = pytest.mark.thorough

QUICK = ("bert", "llama", "resnet")
OTHERS = [name for name in zoo.MODELS if name not in QUICK]


def attempt_on(name: str, engine: str, *, dynamic: bool) -> composer.Attempt:
    """The engine's, once the model has answered as in eager."""
    model, inputs = zoo.build(name, tiny=True)
    run = compiled(model, engine, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(run(**inputs), model(**inputs), rtol=1e-4, atol=1e-5)
    (report,) = composer.reports()
    (attempt,) = report.attempts
    assert report.chosen == engine, attempt.message
    return attempt


@pytest.mark.parametrize("name", [*QUICK, "t5", *thorough(*sorted({*OTHERS} - {"t5"}))])
def test_onnx_runtime_takes_a_public_model_whole(name: str) -> None:
    """One region, and no node of it is torch's."""
    attempt = attempt_on(name, "onnxrt", dynamic=False)
    assert (attempt.coverage, attempt.engine.get("left_to_torch")) == (1.0, None)


# Torch itself traces these in seconds; Swin takes a minute and a half.
@pytest.mark.parametrize("name", ["bert", *thorough("llama", "resnet")])
def test_onnx_runtime_takes_a_public_model_whole_with_dynamic_sizes(name: str) -> None:
    """Sizes that are symbols cost no node either."""
    attempt = attempt_on(name, "onnxrt", dynamic=True)
    assert (attempt.coverage, attempt.engine.get("left_to_torch")) == (1.0, None)


@pytest.mark.parametrize("name", [*QUICK, *thorough(*OTHERS)])
def test_openvino_takes_all_of_a_public_model_but_its_integers(name: str) -> None:
    """Indices and masks have 64 bits, which OpenVINO does not compute with."""
    pytest.importorskip("openvino", reason="the engine itself")
    left = attempt_on(name, "openvino", dynamic=False).engine.get("left_to_torch", ())
    assert [line for line in left if "OpenVINO computes int64 otherwise" not in line] == []
