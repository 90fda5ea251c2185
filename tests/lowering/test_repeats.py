"""Grouped-query attention at a step of generation: no copy of the cache for each head."""

from __future__ import annotations

import pytest
import torch
from common import compiled, last
from torch.nn import functional

from composer.lowering.export import onnx

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]

ENGINES = ("onnxrt", "openvino")


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """How many elements of each repeated tensor a region still copies, once it is translated."""
    found: list[int] = []
    share = onnx.share_heads

    def sharing(gm):
        share(gm)
        copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default)
        values = ((node.meta["val"], node.args[0].meta["val"]) for node in copies)
        found.extend(int(wide.numel()) for wide, given in values if wide.numel() > given.numel())

    monkeypatch.setattr(onnx, "share_heads", sharing)
    return found


def repeated(x, times):
    """As Hugging Face's models do it."""
    batch, heads, length, size = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, times, length, size)
    return x.reshape(batch, heads * times, length, size)


def masked(q, k, v, mask):
    return functional.scaled_dot_product_attention(
        q, repeated(k, 3), repeated(v, 3), attn_mask=mask
    )


def grouped(q, k, v, mask):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def by_hand(q, k, v, mask):
    scores = q @ repeated(k, 3).transpose(2, 3) * 0.3 + mask
    return torch.softmax(scores, -1) @ repeated(v, 3)


def inputs(rows, places=40):
    q = torch.randn(2, rows, 6, 8).transpose(1, 2)  # as models lay it out
    k, v = torch.randn(2, 2, places, 8), torch.randn(2, 2, places, 8)
    mask = torch.zeros(2, 1, rows, places)
    mask[1, ..., places // 2 :] = -torch.inf
    return q, k, v, mask


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("attention", [masked, grouped, by_hand])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_few_rows_are_multiplied_by_what_is_shared(engine, attention, rows, copied) -> None:
    """Keys and values are read where they are, and the numbers are eager's."""
    given = inputs(rows)
    torch.testing.assert_close(compiled(attention, engine)(*given), attention(*given))
    assert (last().chosen, last().attempts[0].coverage) == (engine, 1.0)
    assert copied == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_that_grows(engine, copied) -> None:
    """The second compile has its length as a symbol."""
    run = compiled(masked, engine)
    for places in (40, 41, 42, 57):
        given = inputs(1, places)
        torch.testing.assert_close(run(*given), masked(*given))
    assert (last().chosen, last().dynamic) == (engine, True)
    assert copied == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_widened_before_they_are_repeated(dtype, monkeypatch) -> None:
    """Four times as much would be cast, else."""
    monkeypatch.setattr("composer._torch.processor.multiplies_bf16", lambda: False)
    given = [each.to(dtype) for each in inputs(1)]
    torch.testing.assert_close(
        compiled(masked, "onnxrt")(*given), masked(*given), rtol=2e-2, atol=2e-2
    )
    assert last().chosen == "onnxrt", last().attempts[0].message


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "other",
    [
        lambda q, k, v, _: q[:, :, :2] @ k.repeat(1, 3, 1, 1).transpose(2, 3),  # the other order
        lambda q, k, v, _: repeated(k, 3).transpose(1, 2) @ repeated(v, 3).transpose(1, 2).mT,
        lambda q, k, v, _: repeated(k, 3) @ repeated(k, 3).transpose(2, 3),
        lambda q, k, v, _: q[0] @ repeated(k, 3).transpose(2, 3),
        lambda q, k, v, _: repeated(q.mT, 2).mT.reshape(2, 12, -1, 8) @ repeated(k, 6).mT,
    ],
)
def test_what_is_no_repetition_of_heads_stays(engine, other) -> None:
    """The numbers are eager's in any case."""
    given = inputs(20)
    torch.testing.assert_close(
        compiled(other, engine, min_coverage=0.0)(*given), other(*given), rtol=1e-4, atol=1e-4
    )


def test_many_rows_are_left_as_they_are(copied) -> None:
    """A prompt: the product takes longer than the copy."""
    given = inputs(17)
    torch.testing.assert_close(compiled(masked, "onnxrt")(*given), masked(*given))
    assert copied
