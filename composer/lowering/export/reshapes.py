"""Joins chains of views: ONNX Runtime 1.31 runs each view as a node, about 1 us per call."""

from __future__ import annotations

import torch
import torch.fx

from composer.graphs.nodes import are_static, drop_unread

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)


def join_views(gm: torch.fx.GraphModule) -> None:
    """Replace a chain of views by its last one, and remove views that change nothing.

    ONNX tensors are row-major whatever torch's strides are, so only the last shape counts. Shapes
    must be static.
    """
    for target in VIEWS:
        for view in gm.graph.find_nodes(op="call_function", target=target):
            _shorten(view)
    drop_unread(gm.graph)


def _shorten(view: torch.fx.Node) -> None:
    source = view.all_input_nodes[0]
    while source.target in VIEWS:
        source = source.all_input_nodes[0]
    shape, before = tuple(view.meta["val"].shape), tuple(source.meta["val"].shape)
    if not are_static((*shape, *before)):
        return
    if shape == before:  # a returned view stays a node of its own
        view.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
    else:
        view.args = (source, list(shape))
