"""Sequences of products of two dimensions, which OpenVINO compiles to one kernel, its *snippet*.

OpenVINO (2026.4) takes what follows a product into it. If that is a difference, a quotient or a
power with a second operand, compiling ends the process; ``Mish`` it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SEPARATE = {"SNIPPETS_MODE": "DISABLE"}
"""What has OpenVINO compile each operation by itself, its older way."""

_TAKEN_WRONGLY = {"Subtract", "Divide", "Power", "SquaredDifference", "Mod", "FloorMod"}
_LENGTH, _RANK = 2, 2


def config_for(read: Any) -> Mapping[str, str]:
    """What a model must be compiled with; empty unless a sequence in it would break.

    Args:
        read: A model as OpenVINO read it.
    """
    flat = [node for node in read.get_ops() if _is_flat(node)]
    products = sum(node.get_type_name() == "MatMul" for node in flat)
    return SEPARATE if products >= _LENGTH and any(map(_breaks, flat)) else {}


def _is_flat(node: Any) -> bool:
    """Whether it gives floats in no more than two dimensions."""
    if node.get_output_size() != 1 or not node.get_output_element_type(0).is_real():
        return False
    rank = node.get_output_partial_shape(0).rank
    return bool(rank.is_static and rank.get_length() <= _RANK)


def _breaks(node: Any) -> bool:
    kind = node.get_type_name()
    by_number = any(map(_is_number, node.inputs()))
    return kind == "Mish" or (kind in _TAKEN_WRONGLY and not by_number)


def _is_number(read: Any) -> bool:
    """Whether an operand is a constant of one element."""
    source = read.get_source_output().get_node()
    elements = math.prod(source.get_output_shape(0)) if source.get_type_name() == "Constant" else 0
    return elements == 1
