"""Finds batch norm's running statistics, which torch writes to without raising their version.

An eager forward in training mode changes ``running_mean`` and ``running_var`` without raising their
version (``tests/lowering/test_weights.py`` fails when torch mends it). On the CPU these are small
buffers, which an engine compares by value at each call (:mod:`composer.lowering.weights.samples`).
On other devices an engine watches ``num_batches_tracked``, the witness: the forward of the batch
norm that owns the statistics raises its version. A program that calls ``F.batch_norm`` itself
raises no version. So statistics that are read by such a call stay inputs, and so do statistics
without a witness.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping, Set

import torch
import torch.fx

from composer import _torch

_NORMS = (
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten.native_batch_norm.default,
)
_MEAN_AND_VARIANCE = slice(3, 5)
"""Positions of the running mean and variance among the arguments of these operators."""


def statistics(gm: torch.fx.GraphModule) -> dict[int, bool]:
    """Return the positions of the placeholders that a batch norm operator reads as statistics.

    The value is True if only the forward of a batch norm module reads the placeholder so.
    """
    found: dict[int, bool] = {}
    for i, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        norms = [user for user in placeholder.users if _reads_statistic(user, placeholder)]
        if norms:
            found[i] = all(map(is_of_norm, norms))
    return found


def _reads_statistic(node: torch.fx.Node, value: torch.fx.Node) -> bool:
    return node.target in _NORMS and value in node.args[_MEAN_AND_VARIANCE]


def is_of_norm(node: torch.fx.Node) -> bool:
    """True if the forward of a batch norm module, and not the program itself, made this call."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return False
    _, module = next(reversed(stack.values()))
    return isinstance(module, type) and issubclass(module, _torch.tensors.BATCH_NORMS)


def witness_of(owner: object) -> torch.Tensor | None:
    """Return ``num_batches_tracked`` of a batch norm; ``None`` if the owner has none."""
    witness = owner.num_batches_tracked if isinstance(owner, _torch.tensors.BATCH_NORMS) else None
    return witness if isinstance(witness, torch.Tensor) else None


def may_be_statistic(weight: torch.Tensor) -> bool:
    """True if a batch norm may own this weight: it is a floating-point buffer."""
    return type(weight) is not torch.nn.Parameter and weight.is_floating_point()


def is_statistic_of(owner: object, buffer: torch.Tensor) -> bool:
    """True if the buffer is one of the owner's running statistics."""
    if not isinstance(owner, _torch.tensors.BATCH_NORMS):
        return False
    return buffer is owner.running_mean or buffer is owner.running_var


def find_witnesses(statistics: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
    """Find a witness for each tensor that a batch norm owns, by a search through Python's objects.

    The search is needed since a graph that was made for one module and is called by another does
    not know the other's batch norms. Several batch norms own the same tensor where Dynamo copied a
    module.

    Args:
        statistics: Tensors that a batch norm may own, by index.

    Returns:
        A witness by index. It is ``None`` if the owners have different witnesses or none, or if
        ``gc.freeze()`` hides the tensor, since its owner is then unknown. Tensors that no batch
        norm owns are left out.
    """
    if not statistics:
        return {}
    objects = gc.get_objects()
    hidden = set(map(id, statistics.values())).difference(map(id, objects))
    witnesses: defaultdict[int, set[torch.Tensor | None]] = defaultdict(set)
    for key in hidden:
        witnesses[key].add(None)
    for norm in filter(_is_norm, objects):
        buffers = vars(norm).get("_buffers", {})
        for name in ("running_mean", "running_var"):
            witnesses[id(buffers.get(name))].add(buffers.get("num_batches_tracked"))
    owned = {i: witnesses[id(each)] for i, each in statistics.items() if id(each) in witnesses}
    return {i: _only(candidates) for i, candidates in owned.items()}


def _is_norm(value: object) -> bool:
    """True for a batch norm; ``isinstance`` would also run the code of other packages' proxies."""
    return issubclass(type(value), _torch.tensors.BATCH_NORMS)


def _only(witnesses: Set[torch.Tensor | None]) -> torch.Tensor | None:
    first, *others = witnesses
    return None if others else first
