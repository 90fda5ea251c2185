"""Drop operations that return what they were given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import described
from composer.passes.aliasing import Aliasing
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.modes import NodeModes

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
"""Numbers that leave the other operand as it is, bit for bit."""


@dataclass(frozen=True)
class RemoveNoOps(GraphPass):
    """Drop operations that return what they were given.

    What returns the same tensor object (``to`` its own dtype, dropout in eval mode, ``contiguous``
    of what is contiguous) always goes. A view with the sizes and strides of its base goes unless
    the graph writes to that memory or returns it. A copy (``x * 1``, ``x - 0``, a padding by
    nothing, ``cat`` of one, ``clone``) goes only where both sides are the graph's own, unwritten
    and unreturned, and each begins where the other does in its memory: ``as_strided`` would tell
    them apart. ``x + 0`` stays for floating point: it makes +0.0 of -0.0.

    Kin: Inductor's ``remove_noop_ops`` on functional graphs, after autograd.
    """

    keeps_numbers: ClassVar[bool] = True

    depends_on: ClassVar[tuple[str, ...]] = SHARED_MODULES

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Rewire all that reads a no-op to what it reads."""
        aliasing, modes = Aliasing(gm), NodeModes.in_graph(gm.graph)
        found = [node for node in gm.graph.nodes if _is_no_op(node, aliasing, modes)]
        count = 0
        for node in self.chosen(found):
            node.replace_all_uses_with(_source(node))
            gm.graph.erase_node(node)
            count += 1
        return count


def _is_no_op(node: torch.fx.Node, aliasing: Aliasing, modes: NodeModes) -> bool:
    source = _source(node)
    if source is None or not _look_the_same(node, source):
        return False
    if _returns_its_input(node):
        return True
    if not modes.keeps_grad(node) or _offset(node) != _offset(source):
        return False
    name = _torch.operators.operator_name(node.target)
    if name in _VIEWS:
        return not (aliasing.is_written(source, node) or aliasing.is_returned(source, node))
    return _copies(node, name) and aliasing.is_own(source, node)


def _source(node: torch.fx.Node) -> Any:
    """The one tensor that the operation is about."""
    if not (isinstance(node.target, _torch.operators.OpOverload) and node.args):
        return None
    first = node.args[0]
    if isinstance(first, list | tuple) and len(first) == 1:
        (first,) = first
    return first if isinstance(first, torch.fx.Node) else None


def _look_the_same(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    values = node.meta.get("val"), source.meta.get("val")
    tensors = all(isinstance(value, torch.Tensor) for value in values)
    return tensors and described(values[0]) == described(values[1])


def _returns_its_input(node: torch.fx.Node) -> bool:
    """Whether the result is the very tensor that was given, for arguments that look the same."""
    name = _torch.operators.operator_name(node.target)
    if name in _DROPOUTS:
        return (
            _torch.operators.argument(node, "p") == 0
            or _torch.operators.argument(node, "train") is False
        )
    if name in ("aten::to", "aten::type_as"):
        kept = _torch.operators.argument(node, "memory_format") in (None, torch.preserve_format)
        return kept and not _torch.operators.argument(node, "copy")
    return name == "aten::contiguous"


def _copies(node: torch.fx.Node, name: str) -> bool:
    """Whether the result holds the bits that were given, in memory of its own."""
    dtype = node.meta["val"].dtype
    if name in _NEUTRAL:
        # A product of complex numbers may turn the sign of a zero, and infinity into NaN.
        return _is_number(node.args[1], _NEUTRAL[name]) and not (node.kwargs or dtype.is_complex)
    if name == "aten::add":
        return _is_number(node.args[1], 0) and not (dtype.is_floating_point or dtype.is_complex)
    if name in ("aten::pad", "aten::constant_pad_nd"):
        widths = node.args[1]
        return isinstance(widths, list | tuple) and all(_is_number(each, 0) for each in widths)
    if name == "aten::cat":
        return isinstance(node.args[0], list | tuple)
    return name == "aten::clone"


def _is_number(value: Any, number: int) -> bool:
    return type(value) in (int, float) and value == number


def _offset(node: torch.fx.Node) -> str:
    return str(node.meta["val"].storage_offset())
