"""Decides which operations a pass may drop, move or merge."""

from __future__ import annotations

import operator

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at
from composer.graphs.norms import KEEP_STATISTICS
from composer.graphs.writes import is_told_to_write, is_torchs

_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name in ("setitem", "delitem") or (name[0] == "i" and name[1:] in dir(operator))
)
"""``operator.iadd`` and all others in place, ``operator.setitem``, ``operator.delitem``."""

_RANDOM = frozenset(
    {"rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal"}
    | {"bernoulli", "multinomial", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d"}
    | {"alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax"}
    | {"scaled_dot_product_attention", "multi_head_attention_forward"}
)
"""Torch functions that draw, or may draw, random numbers, and have no tag that says so."""


def is_pure(node: torch.fx.Node) -> bool:
    """True if the operation can be dropped when its result is not used.

    An operation is not pure if it writes to its inputs, draws random numbers, or changes torch's
    state (grad mode, autocast, levels of ``torch.func``, assertions).

    If only the called code could say so, the operation counts as not pure: a method or function
    whose name ends in an underscore, a submodule, ``out=``, ``inplace=True``, a function from
    neither torch nor Python, a user's kernel. An operator that takes graphs as arguments is pure if
    all operations in these graphs are pure.
    """
    if node.op == "get_attr":
        return True
    name = _name(node)
    in_place = name.endswith("_") and not name.startswith("__")
    if in_place or name in _RANDOM or name in KEEP_STATISTICS:
        return False
    if node.op == "call_method":
        return True
    if node.op != "call_function" or node.target in _IN_PLACE or "out" in node.kwargs:
        return False
    if isinstance(node.target, _torch.operators.OpOverload):
        return not node.is_impure()
    if _torch.operators.takes_functions(node.target):
        return _is_pure_over_graphs(node)
    if not is_torchs(node) or _torch.modes.sets_modes(node.target):
        return False
    return not (is_told_to_write(node) or node.is_impure())


def _is_pure_over_graphs(node: torch.fx.Node) -> bool:
    gm = node.graph.owning_module
    held = [each for each in node.all_input_nodes if each.op == "get_attr"]
    values = [attribute_at(gm, str(each.target)) for each in held] if gm is not None else []
    nested = [each for each in values if isinstance(each, torch.nn.Module)]
    graphs = [each.graph for each in nested if isinstance(each, torch.fx.GraphModule)]
    calls = (n for graph in graphs for n in graph.nodes if n.op not in ("placeholder", "output"))
    return 0 < len(graphs) == len(nested) and all(map(is_pure, calls))


def keeps_to_itself(node: torch.fx.Node) -> bool:
    """True if the only side effect is drawing random numbers or updating statistics.

    No other operation in the graph reads what such a side effect changes.
    """
    name = _name(node)
    if name.endswith("_") or is_told_to_write(node) or "out" in node.kwargs:
        return False
    tags = getattr(node.target, "tags", ())
    return name in _RANDOM | KEEP_STATISTICS.keys() or torch.Tag.nondeterministic_seeded in tags


def is_function(node: torch.fx.Node) -> bool:
    """True for ``getitem``, and for a pure operator whose arguments alone decide its result.

    It draws no random numbers. Other nodes may still write to the memory that it reads.
    """
    if node.target is operator.getitem:
        return True
    if not (isinstance(node.target, _torch.operators.OpOverload) and is_pure(node)):
        return False
    tags = node.target.tags
    random = torch.Tag.nondeterministic_seeded in tags or torch.Tag.nondeterministic_bitwise in tags
    return not (random or "empty" in _name(node))


def eliminate_dead_code(gm: torch.fx.GraphModule) -> bool:
    """Erase pure nodes without users, also in nested graphs. Returns true if it erased any.

    Torch's own function (2.13) is not used, since in nested graphs it drops methods that write.
    """
    dropped = False
    for node in reversed(gm.graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and is_pure(node):
            gm.graph.erase_node(node)
            dropped = True
    for child in gm.children():
        if isinstance(child, torch.fx.GraphModule) and eliminate_dead_code(child):
            child.recompile()
            dropped = True
    return dropped


def _name(node: torch.fx.Node) -> str:
    """Return the name of the target, such as ``"dropout"`` for ``aten.dropout.default``."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", "")).partition(".")[0]
