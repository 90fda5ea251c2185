"""Factors of a convolution's input, which OpenVINO multiplies into the convolution's kernel.

OpenVINO (2026.4) multiplies the kernel by what should multiply the input, and checks only if the
shapes are compatible. In ``F.conv1d(x * window, weight)`` with a window as long as the kernel, it
weights the elements of the kernel, not the positions of the input.
"""

from __future__ import annotations

from typing import Any

from composer.backends.openvino import library
from composer.backends.openvino.nodes import PRODUCTS, redirect, sizes_of


def keep_windows(model: Any) -> None:
    """Insert ``maximum(x, x)``, which changes nothing, before a convolution of such a product."""
    maximum = library.openvino().opset13.maximum
    for node in model.get_ordered_ops():
        if "Convolution" not in node.get_type_name():
            continue
        product = node.input_value(0)
        if product.get_node().get_type_name() not in PRODUCTS:
            continue
        if any(_fits_kernel(factor, node) for factor in product.get_node().input_values()):
            redirect([node.input(0)], maximum(product, product))


def _fits_kernel(factor: Any, convolution: Any) -> bool:
    """True if a factor varies over positions and fits the spatial shape of the kernel."""
    sizes, kernel = sizes_of(factor), sizes_of(convolution.input(1))
    positions = len(sizes_of(convolution.input(0))) - 2
    spatial = sizes[-positions:]
    if -1 in sizes or not kernel or set(spatial) <= {1}:
        return False
    widths = kernel[-len(spatial) :]
    return all(size in (1, width) for size, width in zip(spatial, widths, strict=True))
