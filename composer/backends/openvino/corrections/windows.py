"""Factors of a convolution's input, which OpenVINO multiplies into the convolution's kernel.

OpenVINO (2026.4) multiplies the kernel by what should multiply the input, and checks only if the
shapes are compatible. In ``F.conv1d(x * window, weight)`` with a window as long as the kernel, it
weights the elements of the kernel, not the positions of the input.
"""

from __future__ import annotations

from typing import Any

from composer.backends.openvino import library

_PRODUCTS = {"Multiply", "Divide"}


def keep_windows(model: Any) -> None:
    """Insert ``maximum(x, x)``, which changes nothing, between such a product and the convolution.

    Args:
        model: A model of OpenVINO's, changed in place; its results stay the same.
    """
    opset13 = library.openvino().opset13
    for node in model.get_ordered_ops():
        if "Convolution" not in node.get_type_name():
            continue
        product = node.input_value(0)
        factors = product.get_node().input_values()
        is_product = product.get_node().get_type_name() in _PRODUCTS
        if is_product and any(_goes_with(factor, node) for factor in factors):
            same = opset13.maximum(product, product)
            node.input(0).replace_source_output(same.output(0))


def _goes_with(factor: Any, convolution: Any) -> bool:
    """True if a factor varies over positions and fits the spatial shape of the kernel."""
    shape, kernel = factor.get_partial_shape(), convolution.get_input_partial_shape(1)
    if shape.is_dynamic or kernel.rank.is_dynamic:
        return False
    places = convolution.get_input_partial_shape(0).rank.get_length() - 2
    sizes = list(shape)[-places:]
    return any(size != 1 for size in sizes) and all(
        size in (1, width) for size, width in zip(sizes[::-1], list(kernel)[::-1], strict=False)
    )
