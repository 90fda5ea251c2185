"""Linear layers without bias over more than two dimensions, as ONNX says them: one ``MatMul``.

Torch flattens the input to a matrix and gives the result its dimensions back. ONNX Runtime (1.31)
runs either view as a node of its own: for a small T5 a tenth of a call.
"""

from __future__ import annotations

import torch
import torch.fx

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


def keep_dimensions(gm: torch.fx.GraphModule) -> None:
    """Replace ``view(mm(view(x), w))`` by ``matmul(x, w)`` where only the last size differs."""
    for product in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        flat, weight = product.args
        if flat.target not in _VIEWS:
            continue
        source = flat.args[0]
        for view in [user for user in product.users if user.target in _VIEWS]:
            if not _same_but_last(source, view):
                continue
            with gm.graph.inserting_before(view):
                whole = gm.graph.call_function(aten.matmul.default, (source, weight))
            whole.meta = dict(view.meta)
            view.replace_all_uses_with(whole)
            gm.graph.erase_node(view)
    gm.graph.eliminate_dead_code()


def _same_but_last(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Whether both have the same sizes, static ones, in all dimensions but the last."""
    sizes = tuple(a.meta["val"].shape[:-1]), tuple(b.meta["val"].shape[:-1])
    static = all(isinstance(size, int) for each in sizes for size in each)
    return static and sizes[0] == sizes[1]
