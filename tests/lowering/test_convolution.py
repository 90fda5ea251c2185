"""The written-out backward of convolutions against torch's own, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from composer.lowering.operators import convolution, pool_gradients, pools
from composer.lowering.operators.convolution import Geometry, convolution_backward

pytestmark = pytest.mark.slow

CHANNELS = ((1, 4, 6), (2, 4, 6), (4, 4, 4), (4, 4, 8))
MOVES = ((1, 1, 0, 1), (3, 1, 1, 1), (3, 2, 1, 2), (2, 2, 0, 1), (4, 2, 1, 1), (1, 2, 0, 1))
CASES = list(itertools.product((1, 2, 3), CHANNELS, MOVES, (False, True)))


def sample(dims, channels, moves, transposed):
    """The arguments of one call of ``convolution_backward``."""
    (groups, inner, outer), (kernel, *rest) = channels, moves
    stride, padding, dilation = ([each] * dims for each in rest)
    x = torch.randn(2, inner, *[9, 10, 8][:dims], dtype=torch.float64)
    features = (inner, outer // groups) if transposed else (outer, inner // groups)
    weight = torch.randn(*features, *[kernel] * dims, dtype=torch.float64)
    extra = [int(transposed and stride[0] > 1 and dilation[0] == 1)] * dims
    geometry = (stride, padding, dilation, transposed, extra, groups)
    grad = torch.randn_like(torch.convolution(x, weight, None, *geometry))
    return grad, x, weight, [outer], *geometry, [True] * 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_backward_is_torchs(case) -> None:
    """Gradients of input, weight and bias, grouped, strided, dilated, transposed."""
    args = sample(*case)
    expected = torch.ops.aten.convolution_backward(*args)
    torch.testing.assert_close(convolution_backward(*args), expected, check_stride=True)


PLAIN = [case for case in CASES if not case[-1]]
WAYS = [
    *(("_by_taps", case) for case in PLAIN[::5]),
    *(("_by_convolution", case) for case in PLAIN[::5]),
    *(("_by_overlapping_patches", case) for case in PLAIN[::2] if case[1][0] == 1),
]


@pytest.mark.parametrize(("way", "case"), WAYS, ids=str)
def test_ways_to_the_weights_gradient_agree(way, case) -> None:
    """Whichever is chosen by the shapes."""
    grad, x, weight, _, stride, padding, dilation, _, _, groups, _ = args = sample(*case)
    found = getattr(convolution, way)(x, grad, weight, Geometry(stride, padding, dilation, groups))
    torch.testing.assert_close(found, torch.ops.aten.convolution_backward(*args)[1])


def test_what_was_not_asked_for_is_none() -> None:
    """As autograd asks where an input needs no gradient."""
    args = sample(2, CHANNELS[0], MOVES[1], False)
    grad_x, grad_weight, grad_bias = convolution_backward(*args[:-1], [False, True, False])
    assert grad_x is None
    assert grad_weight is not None
    assert grad_bias is None


def of_image(channels: int, kernel: int):
    """The arguments for a convolution over an image of which the kernel has 400 places."""
    image = torch.randn(2, channels, 20, 20, dtype=torch.float64)
    weight = torch.randn(8, channels, kernel, kernel, dtype=torch.float64)
    moves = [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1
    grad = torch.randn_like(torch.convolution(image, weight, None, *moves))
    return grad, image, weight, [8], *moves, [True] * 3


SHAPES = {
    "many channels": (lambda: of_image(8, 3), "_by_taps"),
    "an image": (lambda: of_image(3, 3), "_by_overlapping_patches"),
    "an image by a large kernel": (lambda: of_image(3, 7), "_by_convolution"),
    "few places": (
        lambda: sample(2, CHANNELS[0], (3, 1, 1, 1), False),
        "_by_overlapping_patches",
    ),
    "81 positions": (lambda: sample(2, CHANNELS[0], (9, 1, 4, 1), False), "_by_convolution"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_the_way_suits_the_shapes(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A product for each position where each is large; else all at once, or a convolution."""
    make, way = SHAPES[case]
    args = make()
    taken = []
    for name in ("_by_taps", "_by_patches", "_by_overlapping_patches", "_by_convolution"):
        each = getattr(convolution, name)
        monkeypatch.setattr(
            convolution, name, lambda *a, name=name, each=each: taken.append(name) or each(*a)
        )
    expected = torch.ops.aten.convolution_backward(*args)
    torch.testing.assert_close(convolution_backward(*args), expected)
    assert taken == [way]


def test_pools_of_unknown_sizes_are_not_written_out() -> None:
    """Nor is the gradient of none; how many windows a symbol has nobody says."""
    empty = torch.empty(1, 1, 0, 0)
    asked = [2, 2], [2, 2], [0, 0], False, True, None
    assert pool_gradients.avg_pool_backward(2)(empty, empty, *asked) is NotImplemented
    unknown: Any = object()
    assert pools.miscounted((unknown, 4), (2, 2), (2, 2)) is False
