"""The pass that removes operations that return their input unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import described
from composer.passes.aliasing import Aliasing
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.metadata import layout
from composer.passes.node_modes import NodeModes

_DROPOUTS = frozenset(
    f"aten::{kind}{end}"
    for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for end in ("", "_")
)
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "alias", "slice"),
        *("expand", "expand_as", "broadcast_to", "narrow", "squeeze", "permute", "transpose"),
    )
)
_NEUTRAL = {"aten::mul": 1, "aten::div": 1, "aten::pow": 1, "aten::sub": 0}
"""Operators, and the number as second operand that leaves the first one unchanged, bit for bit."""


@dataclass(frozen=True)
class RemoveNoOps(GraphPass):
    """Remove operations that return their input unchanged.

    There are three kinds:

    - An operation that returns the same tensor object is always removed: ``to`` the same dtype,
      dropout in eval mode, ``contiguous`` of a contiguous tensor.
    - A view with the sizes and strides of its base is removed, unless the graph writes to that
      memory or returns it.
    - A copy is removed only if the graph itself allocates the memory on both sides, and does not
      write to it or return it. Copies are ``x * 1``, ``x - 0``, padding with width 0, ``cat`` of
      one tensor, and ``clone``.

    For views and copies, input and result must also have the same storage offset, since
    ``as_strided`` depends on it. ``x + 0`` stays for floating point, since it turns -0.0 into +0.0.

    Similar: Inductor's ``remove_noop_ops``, on functional graphs after autograd.
    """

    keeps_numbers: ClassVar[bool] = True

    depends_on: ClassVar[tuple[str, ...]] = SHARED_MODULES

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Replace each no-op by its input."""
        aliasing, modes = Aliasing(gm), NodeModes.in_graph(gm.graph)
        no_ops = [node for node in gm.graph.nodes if _is_no_op(node, aliasing, modes)]
        chosen = list(self.chosen(no_ops))
        for node in chosen:
            node.replace_all_uses_with(_source(node))
            gm.graph.erase_node(node)
        return len(chosen)


def _is_no_op(node: torch.fx.Node, aliasing: Aliasing, modes: NodeModes) -> bool:
    source = _source(node)
    if source is None:
        return False
    value, result = source.meta.get("val"), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or described(value) != described(result):
        return False
    if _returns_its_input(node):
        return True
    if not modes.keeps_grad(node) or layout(value) != layout(result):
        return False
    name = _torch.operators.operator_name(node.target)
    if name in _VIEWS:
        return not aliasing.is_observed(source, node)
    return _copies(node, name) and aliasing.is_own(source, node)


def _source(node: torch.fx.Node) -> Any:
    """Return the node of the tensor that may be returned unchanged, or ``None``."""
    if not (isinstance(node.target, _torch.operators.OpOverload) and node.args):
        return None
    first = node.args[0]
    if isinstance(first, list | tuple) and len(first) == 1:
        (first,) = first
    return first if isinstance(first, torch.fx.Node) else None


def _returns_its_input(node: torch.fx.Node) -> bool:
    """True if the operation returns the same tensor object, given that both look the same."""
    name, argument = _torch.operators.operator_name(node.target), _torch.operators.argument
    if name in _DROPOUTS:
        return argument(node, "p") == 0 or argument(node, "train") is False
    if name in ("aten::to", "aten::type_as"):
        memory_format = argument(node, "memory_format")
        return memory_format in (None, torch.preserve_format) and not argument(node, "copy")
    return name == "aten::contiguous"


def _copies(node: torch.fx.Node, name: str) -> bool:
    """True if the result is a bit-for-bit copy of the input in new memory."""
    dtype = node.meta["val"].dtype
    if name in _NEUTRAL:
        # A complex product may change the sign of a zero, or turn infinity into NaN.
        is_exact = not (node.kwargs or dtype.is_complex)
        return is_exact and _is_number(node.args[1], _NEUTRAL[name])
    if name == "aten::add":
        is_exact = not (dtype.is_floating_point or dtype.is_complex)
        return is_exact and _is_number(node.args[1], 0)
    if name in ("aten::pad", "aten::constant_pad_nd"):
        widths = node.args[1]
        return isinstance(widths, list | tuple) and all(_is_number(width, 0) for width in widths)
    if name == "aten::cat":
        return isinstance(node.args[0], list | tuple)
    return name == "aten::clone"


def _is_number(value: Any, number: int) -> bool:
    """True if a value is this number, and no negative zero: ``-0.0 - (-0.0)`` is ``0.0``."""
    return type(value) in (int, float) and value == number and math.copysign(1, value) > 0
