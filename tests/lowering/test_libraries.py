"""Operators of libraries beside torch's own that the exporter translates: all of them, one by one.

Torch's operator samples have none of them, since they are registered when their library is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from common import compiled, last
from torch.onnx._internal import _lazy_import

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning"),
    pytest.mark.filterwarnings("ignore:ONNX export for RoIAlign:UserWarning"),
]

I8 = torch.int8
T = torch.tensor
quantized = torch.ops.quantized_decomposed
ROWS = torch.linspace(-3, 3, 4001)[:4000].reshape(4, 1000) * 1.001
INTEGERS = torch.arange(-128, 128).to(I8).reshape(4, 64)
SCALE, ZERO = T(0.02), T(3)
SCALES, ZEROS = T([0.1, 0.02, 0.03, 0.5]), T([0, 1, 2, -3])
WHOLE, NARROW = (-128, 127), (-8, 7)

QUANTIZED: dict[str, list[tuple[Any, ...]]] = {
    "quantize_per_tensor": [
        *(
            (lambda x, r=r: quantized.quantize_per_tensor(x, 0.02, 3, *r, I8), ROWS)
            for r in (WHOLE, NARROW)
        ),
        (lambda x: quantized.quantize_per_tensor(x, 0.02, 8, 0, 15, torch.uint8), ROWS),
        (lambda x: quantized.quantize_per_tensor(x, 0.5, 0, *NARROW, I8), T([-9.0, -3, 3, 9])),
    ],
    "dequantize_per_tensor": [
        (lambda x: quantized.dequantize_per_tensor(x, 0.02, 3, *WHOLE, I8), INTEGERS),
        (lambda x: quantized.dequantize_per_tensor(x, 0.02, 3, *NARROW, I8), INTEGERS),
        (
            lambda x: quantized.dequantize_per_tensor(
                x, 0.02, 3, *WHOLE, I8, out_dtype=torch.float16
            ),
            INTEGERS,
        ),
    ],
    "quantize_per_channel": [
        (
            lambda x, s, z: quantized.quantize_per_channel(x, s, z, 0, *NARROW, I8),
            ROWS,
            SCALES,
            ZEROS,
        ),
        (
            lambda x, s, z: quantized.quantize_per_channel(x, s, z, -1, *WHOLE, I8),
            ROWS.t(),
            SCALES,
            ZEROS,
        ),
        (
            lambda x, s, z: quantized.quantize_per_channel(x, s.double(), z, 0, *WHOLE, I8),
            ROWS,
            SCALES,
            ZEROS,
        ),
    ],
    "dequantize_per_channel": [
        (
            lambda x, s, z: quantized.dequantize_per_channel(x, s, z, 0, *WHOLE, I8),
            INTEGERS,
            SCALES,
            ZEROS,
        ),
        (
            lambda x, s: quantized.dequantize_per_channel(x, s, None, 0, *WHOLE, I8),
            INTEGERS,
            SCALES,
        ),
    ],
    "quantize_per_tensor.tensor": [
        (
            lambda x, s, z: quantized.quantize_per_tensor.tensor(x, s, z, *NARROW, I8),
            ROWS,
            SCALE,
            ZERO,
        )
    ],
    "quantize_per_tensor.tensor2": [
        (
            lambda x, s, z, *r: quantized.quantize_per_tensor.tensor2(x, s, z, *r, I8),
            *(ROWS, SCALE, ZERO, T(-8), T(7)),
        )
    ],
    "dequantize_per_tensor.tensor": [
        (
            lambda x, s, z: quantized.dequantize_per_tensor.tensor(x, s, z, *WHOLE, I8),
            INTEGERS,
            SCALE,
            ZERO,
        )
    ],
    "dequantize_per_tensor.tensor2": [
        (
            lambda x, s, z, *r: quantized.dequantize_per_tensor.tensor2(x, s, z, *r, I8),
            *(INTEGERS, SCALE, ZERO, T(-8), T(7)),
        )
    ],
}
NOBODYS = {
    f"{name}.{overload}"
    for name in ("quantize_per_channel", "dequantize_per_channel")
    for overload in ("tensor", "tensor2")
}
"""Overloads that the exporter translates, and torch does not have."""

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width) -> (Tensor, Tensor)",
    "deform_conv2d": "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, "
    "SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor",
}
"""Of torchvision, whose own kernels do not load beside every build of torch."""

IMAGES = torch.sin(torch.arange(2 * 3 * 12 * 14.0)).reshape(2, 3, 12, 14)
BOXES = T(
    [
        *([0, 1.0, 2, 9, 10], [1, -3, -2, 5.5, 4.5], [1, 4, 4, 4.2, 4.1]),
        *([0, 8, 8, 20, 20], [0, 5, 5, 3, 3]),
    ]
)
"""The number of an image and two corners: within it, across its edges, tiny, and inside out."""


def check(function: Callable[..., Any], *inputs: torch.Tensor, engine: str) -> None:
    """Compare with torch's numbers, of integers exactly."""
    expected = function(*inputs)
    with torch.no_grad():
        found = compiled(function, engine, min_coverage=0.0)(*inputs)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_all_translations_of_libraries_stand_here() -> None:
    """A new one of the exporter's needs a case."""
    own = {"aten", "prims", "_operator", "math"}
    names = {each.qualified_name for each in _lazy_import.onnxscript_apis.get_torchlib_ops()}
    known = {f"quantized_decomposed::{each}" for each in (*QUANTIZED, *NOBODYS)}
    known |= {f"torchvision::{each}" for each in SCHEMAS}
    assert {each for each in names if each.partition("::")[0] not in own} == known


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_numbers_are_torchs(name: str, engine: str) -> None:
    """The integers, and the floats that are made of integers, within any range of a dtype."""
    for function, *inputs in QUANTIZED[name]:
        torch.compiler.reset()
        check(function, *inputs, engine=engine)


def test_a_narrow_range_is_taken() -> None:
    """ONNX Runtime computes all of it."""
    (*_, (function, x)) = QUANTIZED["quantize_per_tensor"]
    check(function, x, engine="onnxrt")
    assert last().attempts[0].coverage == 1.0


@pytest.fixture
def vision() -> Iterator[Any]:
    """Torchvision's operators, in Python."""
    with torch.library._scoped_library("torchvision", "DEF") as library:
        for name, schema in SCHEMAS.items():
            library.define(name + schema)
        library.impl("roi_align", roi_align, "CPU")
        library.impl("roi_align", like_roi_align, "Meta")
        library.impl("roi_pool", roi_pool, "CPU")
        library.impl("roi_pool", roi_pool, "Meta")
        library.impl("deform_conv2d", deform_conv2d, "CPU")
        library.impl("deform_conv2d", deform_conv2d, "Meta")
        yield torch.ops.torchvision


def like_roi_align(x, boxes, scale, height, width, ratio, aligned):
    return x.new_empty(len(boxes), x.shape[1], height, width)


def roi_align(x, boxes, scale, height, width, ratio, aligned):
    """Means of interpolated points; see torchvision/csrc/ops/cpu/roi_align_kernel.cpp."""
    result = like_roi_align(x, boxes, scale, height, width, ratio, aligned)
    for k, (image, *corners) in enumerate(boxes.tolist()):
        left, top, right, bottom = (each * scale - 0.5 * aligned for each in corners)
        least = -math.inf if aligned else 1.0
        high, wide = max(bottom - top, least) / height, max(right - left, least) / width
        rows, columns = (
            ratio if ratio > 0 else math.ceil(high),
            ratio if ratio > 0 else math.ceil(wide),
        )
        for i in range(height):
            for j in range(width):
                total = x.new_zeros(x.shape[1])
                for a in range(rows):
                    for b in range(columns):
                        y = top + (i + (a + 0.5) / rows) * high
                        total += between(x[int(image)], y, left + (j + (b + 0.5) / columns) * wide)
                result[k, :, i, j] = total / max(rows * columns, 1)
    return result


def between(image, y, x):
    """The bilinear interpolation at a point; zero more than one pixel outside of the image."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return image.new_zeros(len(image))
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    below, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = torch.lerp(image[:, top, left], image[:, top, right], x - left)
    return torch.lerp(
        upper, torch.lerp(image[:, below, left], image[:, below, right], x - left), y - top
    )


def roi_pool(x, boxes, scale, height, width):
    shape = len(boxes), x.shape[1], height, width
    return x.new_zeros(shape), x.new_zeros(shape, dtype=torch.int32)


def deform_conv2d(x, weight, offset, *others):
    return x.new_zeros(len(x), len(weight), *offset.shape[2:])


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [2, 0, -1])
def test_aligned_regions_are_torchvisions(
    vision: Any, ratio: int, aligned: bool, engine: str
) -> None:
    """Means over regions of images, of boxes of all kinds."""
    check(
        lambda x, boxes: vision.roi_align(x, boxes, 0.9, 3, 4, ratio, aligned) * 1.0,
        *(IMAGES, BOXES),
        engine=engine,
    )


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_other_operators_of_torchvision_stay_torchs(vision: Any, engine: str) -> None:
    """The exporter's translations of them fail; ``nms`` has a size that only data tell."""

    def program(x, boxes, weight, offset):
        pooled, _ = vision.roi_pool(x, boxes, 0.9, 3, 4)
        mask, bias = offset[:, :9] * 0 + 1, weight[:, 0, 0, 0]
        moved = vision.deform_conv2d(x, weight, offset, mask, bias, 1, 1, 0, 0, 1, 1, 1, 1, True)
        return pooled * 1.0, moved * 1.0

    check(program, IMAGES, BOXES, torch.ones(4, 3, 3, 3), torch.zeros(2, 18, 10, 12), engine=engine)
    assert last().attempts[0].coverage < 1.0
