"""The attention of CUDA's kernels, as captured on a GPU, computes what torch computes.

No GPU is needed: fake tensors say what the kernels return, and ONNX Runtime runs the result.
"""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest
import torch
from common import compiled, last
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from composer.lowering.aot import FunctionalGraph, GraphKind
from composer.lowering.decompositions import decompositions
from composer.lowering.export.onnx import to_onnx, why_not
from composer.lowering.partition.regions import split

aten = torch.ops.aten
reference = torch.nn.functional.scaled_dot_product_attention


def efficient(q, k, v, bias=None, causal=False):
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, 0.0, causal)


def cudnn(q, k, v, bias=None, causal=False):
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, False, 0.0, causal)


def flash(q, k, v, bias=None, causal=False):
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)


def run(function, *args: torch.Tensor) -> torch.Tensor:
    """Capture with fake tensors, lower, and run the ONNX model."""
    with torch.no_grad(), FakeTensorMode():
        fakes = [torch.empty_strided(a.shape, a.stride()) for a in args]
        gm = make_fx(function, decompositions({}, False))(*fakes)
    gm.graph.eliminate_dead_code()
    graph = FunctionalGraph(gm, GraphKind.INFERENCE, {}, {}, None, (None,))
    parts = split(graph, why_not)
    assert parts.left == ()
    (region,) = parts.regions.values()
    model = to_onnx(region)
    session = onnxruntime.InferenceSession(model.model.SerializeToString())
    feeds = dict(zip(model.inputs, (a.contiguous().numpy() for a in args), strict=True))
    result = torch.from_numpy(session.run(None, feeds)[0])
    (output,) = model.outputs
    return result if output.order is None else result.permute(output.order)


@pytest.mark.parametrize("kernel", [efficient, cudnn, flash])
@pytest.mark.parametrize("causal", [False, True])
def test_every_kernel_computes_attention(kernel, causal) -> None:
    """With the heads inside or outside, as models lay them out."""
    q, k, v = (torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in range(3))
    found = run(lambda q, k, v: (kernel(q, k, v, causal=causal)[0],), q, k, v)
    torch.testing.assert_close(found, reference(q, k, v, is_causal=causal))


@pytest.mark.parametrize("kernel", [efficient, cudnn])
def test_a_mask_is_added_and_what_sees_nothing_is_zero(kernel) -> None:
    """The padding of a batch sees nothing."""
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    bias = torch.randn(2, 3, 5, 5)
    bias[0, :, 1] = -torch.inf
    found = run(lambda q, k, v, b: (kernel(q, k, v, b)[0],), q, k, v, bias)
    torch.testing.assert_close(found, reference(q, k, v, attn_mask=bias).nan_to_num(0.0))


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("causal", [True, False])
def test_heads_of_the_query_share_those_of_key_and_value(engine, causal) -> None:
    """Grouped heads on the CPU, as a decoder without padding has them, are the engine's."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)

    def grouped(q, k, v):
        return reference(q, k, v, is_causal=causal, enable_gqa=True)

    with torch.no_grad():
        torch.testing.assert_close(compiled(grouped, engine)(q, k, v), grouped(q, k, v))
    assert last().attempts[0].coverage == 1.0


PADDING = torch.tensor([[False, False, False, True, True], [True] * 5])
"""The second of the batch sees nothing."""

FUTURE = torch.nn.Transformer.generate_square_subsequent_mask(5)


def assert_same_as_captured(
    module: torch.nn.Module, engine: str, x: torch.Tensor, **masks: Any
) -> None:
    """The engine takes all of it, and gives what the captured graph gives."""
    with torch.no_grad():
        expected = compiled(module, "eager")(x, **masks)
        found = compiled(module, engine)(x, **masks)
    assert last().chosen == engine, last().attempts[0].message
    assert last().attempts[0].coverage == 1.0
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize(("first", "activation"), [(False, "relu"), (True, "gelu")])
@pytest.mark.parametrize(
    "masks", [{}, {"src_key_padding_mask": PADDING}, {"mask": FUTURE, "is_causal": True}]
)
def test_an_encoder_in_inference_is_the_engines(engine, first, activation, masks) -> None:
    """Torch has one operator for a layer of it; what is masked everywhere is NaN there."""
    layer = torch.nn.TransformerEncoderLayer(
        *(8, 2, 16, 0.0, activation), batch_first=True, norm_first=first
    )
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    assert_same_as_captured(encoder, engine, torch.randn(2, 5, 8), **masks)


class OverItself(torch.nn.MultiheadAttention):
    """Attention of one tensor, with the weights of its heads."""

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        return super().forward(x, x, x, **options)


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("needed", [True, False])
def test_attention_over_itself_in_inference_is_the_engines(engine, average, needed) -> None:
    """Torch has one operator for that as well; the weights are returned if they are wanted."""
    attention = OverItself(8, 2, batch_first=True).eval()
    assert_same_as_captured(
        *(attention, engine, torch.randn(2, 5, 8)),
        key_padding_mask=PADDING[:1].expand(2, -1),
        need_weights=needed,
        average_attn_weights=average,
    )
