"""Quotients whose last digit shows: they are rounded to integers, or returned in float64.

OpenVINO (2026.4) computes ``a / b`` as ``a`` times the reciprocal of ``b``. The last digit of the
product is often another one. The scale by which a row is quantized is its largest number divided by
127.5. This number then lies halfway between two integers, and the last digit of the scale decides
which of them it becomes.
"""

from __future__ import annotations

from typing import Any

from composer.backends.openvino.nodes import nodes_of

_AS_IT_IS = "nonconvertable_divide_0"
"""The mark by which OpenVINO's own passes leave a division as it is. It has no public name."""


def divide_where_it_shows(model: Any) -> None:
    """Mark the divisions of a model that rounds, or returns float64, so that OpenVINO divides."""
    types = [each.get_output_element_type(0).get_type_name() for each in model.get_results()]
    if "f64" in types or nodes_of(model, {"Round"}):
        for node in nodes_of(model, {"Divide"}):
            node.get_rt_info()[_AS_IT_IS] = True
