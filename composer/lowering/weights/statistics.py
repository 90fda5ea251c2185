"""Batch norm's running statistics, which torch writes to without raising their version.

An eager forward in training mode (torch 2.13) moves ``running_mean`` and ``running_var`` unseen.
Small buffers in the host's memory, which all such statistics there are, an engine compares by value
at each call (:mod:`composer.lowering.weights.samples`). For others it watches
``num_batches_tracked``, the witness: the forward of the batch norm that owns them raises its
version. A program that calls ``F.batch_norm`` itself raises none, so statistics that are read so
stay inputs, as do those without a witness.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.fx

from composer import _torch

_STATISTICS = {
    torch.ops.aten._native_batch_norm_legit_no_training.default: (3, 4),
    torch.ops.aten.native_batch_norm.default: (3, 4),
}
"""Where the operators take running mean and variance."""


def statistics(gm: torch.fx.GraphModule) -> dict[int, bool]:
    """Positions of the placeholders that an operator of the graph reads as running statistics.

    Each with whether only the forward of a batch norm reads it so.
    """
    position = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found: dict[int, bool] = {}
    for target, indices in _STATISTICS.items():
        for node in gm.graph.find_nodes(op="call_function", target=target):
            for i in (position[node.args[at]] for at in indices if node.args[at] in position):
                found[i] = found.get(i, True) and is_of_norm(node)
    return found


def is_of_norm(node: torch.fx.Node) -> bool:
    """Whether the forward of a batch norm, and not the program itself, made this call."""
    *_, (_, module) = (node.meta.get("nn_module_stack") or {"": ("", None)}).values()
    return isinstance(module, type) and issubclass(module, _torch.tensors.BATCH_NORMS)


def witness_of(owner: object) -> torch.Tensor | None:
    """``num_batches_tracked`` of the module that owns statistics, if there is one to watch."""
    witness = owner.num_batches_tracked if isinstance(owner, _torch.tensors.BATCH_NORMS) else None
    return witness if isinstance(witness, torch.Tensor) else None


def may_be_statistic(weight: torch.Tensor) -> bool:
    """Whether a batch norm somewhere may own it: a buffer of numbers that are not whole."""
    return type(weight) is not torch.nn.Parameter and weight.is_floating_point()


def is_statistic_of(owner: object, buffer: torch.Tensor) -> bool:
    """Whether it is one of the running statistics of the module that owns it."""
    if not isinstance(owner, _torch.tensors.BATCH_NORMS):
        return False
    return any(buffer is each for each in (owner.running_mean, owner.running_var))


def find_witnesses(statistics: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
    """A witness for each tensor that batch norms in memory own, where all have the same one.

    Several do where Dynamo copied a module: the copy has the very tensors. ``None`` stands where
    there is no one witness; what no batch norm owns is left out. Of what ``gc.freeze()`` hides
    nobody knows what owns it.
    A graph made for one module and called by another tells nothing of the other's batch norms.
    """
    if not statistics:
        return {}
    found: defaultdict[int, dict[int, torch.Tensor | None]] = defaultdict(dict)
    objects = gc.get_objects()
    seen = set(map(id, objects))
    hidden = {i: None for i, each in statistics.items() if id(each) not in seen}
    for norm in (each for each in objects if issubclass(type(each), _torch.tensors.BATCH_NORMS)):
        buffers = vars(norm).get("_buffers", {})
        for name in ("running_mean", "running_var"):
            witness = buffers.get("num_batches_tracked")
            found[id(buffers.get(name))][id(witness)] = witness
    owned = {i: [*found[id(each)].values()] for i, each in statistics.items() if id(each) in found}
    return {i: of[0] if len(of) == 1 else None for i, of in owned.items()} | hidden
