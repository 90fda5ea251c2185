"""The pass that evaluates operations without inputs once, at compile time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import are_static, described
from composer.graphs.writes import is_torchs
from composer.passes.aliasing import Aliasing
from composer.passes.base import SHARED_MODULES, GraphPass
from composer.passes.purity import is_function

_READS_ONLY_KIND = frozenset({"aten::new_ones", "aten::new_zeros", "aten::new_full"})
"""Operators that read only dtype and device of a tensor; the sizes are an argument."""

_READS_ONLY_METADATA = _READS_ONLY_KIND | {"aten::ones_like", "aten::zeros_like", "aten::full_like"}

Constants = dict[torch.fx.Node, Any]


@dataclass(frozen=True)
class FoldConstants(GraphPass):
    """Evaluate operations that depend on no input (masks, position indices) once, into a buffer.

    Operations are not folded in these cases:

    - The operator is not torch's own, or it is random.
    - The graph writes to the result, or returns it. Every call must return new memory.
    - The size is dynamic, or the result is larger than ``max_bytes``.
    - The evaluation gives another dtype, shape or stride than the graph has, as under autocast.

    Parameters and buffers are not constants: training and ``load_state_dict`` change them.

    Args:
        max_bytes: The largest size of a constant in bytes, also for intermediate results.
    """

    keeps_numbers: ClassVar[bool] = True

    depends_on: ClassVar[tuple[str, ...]] = SHARED_MODULES

    max_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.max_bytes < 0:
            raise ValueError(f"max_bytes is at least 0, not {self.max_bytes}")

    def run(self, gm: torch.fx.GraphModule) -> int:
        """Replace each constant that a non-constant operation uses by an attribute."""
        aliasing = Aliasing(gm)
        values: Constants = {}
        with _torch.fakes.unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            for node in gm.graph.nodes:
                if self._is_constant(node, values, aliasing):
                    _evaluate(node, values)
        tensors = [node for node, value in values.items() if isinstance(value, torch.Tensor)]
        needed = [node for node in tensors if not values.keys() >= node.users.keys()]
        chosen = list(self.chosen(needed))
        for node in chosen:
            _fold(gm, node, values[node])
        return len(chosen)

    def _is_constant(self, node: torch.fx.Node, values: Constants, aliasing: Aliasing) -> bool:
        if not is_function(node) or not is_torchs(node) or aliasing.is_observed(node):
            return False
        sources = node.all_input_nodes
        if _torch.operators.operator_name(node.target) in _READS_ONLY_METADATA:
            sources = [source for source in sources if source is not node.args[0]]
        return values.keys() >= set(sources) and self._fits(node.meta.get("val"))

    def _fits(self, fake: Any) -> bool:
        """True if the value has static sizes, and at most ``max_bytes``."""
        if isinstance(fake, list | tuple):
            return all(map(self._fits, fake))
        if not isinstance(fake, torch.Tensor) or fake.device.type == "meta":
            return False
        return are_static(fake.shape) and fake.nbytes <= self.max_bytes


def _evaluate(node: torch.fx.Node, values: Constants) -> None:
    """Run the operation on constants, and keep the result if it looks as the graph says."""
    args: Any = node.args
    name = _torch.operators.operator_name(node.target)
    if name in _READS_ONLY_METADATA and args[0] not in values:
        args = (_stand_in(args[0], of_its_sizes=name not in _READS_ONLY_KIND), *args[1:])
    args, kwargs = torch.fx.map_arg((args, node.kwargs), values.__getitem__)
    value = node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target
    if described(value) == described(node.meta["val"]):
        values[node] = value


def _stand_in(node: torch.fx.Node, *, of_its_sizes: bool) -> torch.Tensor:
    """Return an uninitialized tensor with a node's dtype, device and sizes.

    It has no dimensions if the sizes are dynamic or not needed.
    """
    fake = node.meta["val"]
    sizes, strides = tuple(fake.shape), tuple(fake.stride())
    if not of_its_sizes or not are_static(sizes + strides):
        sizes = strides = ()
    return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)


def _fold(gm: torch.fx.GraphModule, node: torch.fx.Node, value: torch.Tensor) -> None:
    names = map("_folded_constant_{}".format, itertools.count())
    name = next(name for name in names if not hasattr(gm, name))
    gm.register_buffer(name, value, persistent=False)
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
    node.replace_all_uses_with(constant)
    gm.graph.erase_node(node)
