"""Decides which operations a pass may drop, move or merge."""

from __future__ import annotations

import operator

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import graphs_in, nested_graphs
from composer.graphs.writes import KEEP_STATISTICS, assigns, is_torchs, name_of

_RANDOM = frozenset(
    {"rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal"}
    | {"bernoulli", "multinomial", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d"}
    | {"alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu", "gumbel_softmax"}
    | {"scaled_dot_product_attention", "multi_head_attention_forward"}
)
"""Torch functions that draw, or may draw, random numbers, and have no tag that says so."""

_UNDECLARED_EFFECTS = _RANDOM | KEEP_STATISTICS.keys()


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
    if assigns(node) or name_of(node) in _UNDECLARED_EFFECTS:
        return False
    return node.op == "call_method" or (node.op == "call_function" and _is_pure_function(node))


def _is_pure_function(node: torch.fx.Node) -> bool:
    if _torch.operators.takes_functions(node.target):
        graphs = graphs_in(node)
        return bool(graphs) and all(map(_has_only_pure_nodes, graphs))
    is_overload = isinstance(node.target, _torch.operators.OpOverload)
    is_known = is_overload or (is_torchs(node) and not _torch.modes.sets_modes(node.target))
    return is_known and not node.is_impure()


def _has_only_pure_nodes(gm: torch.fx.GraphModule) -> bool:
    return all(node.op in ("placeholder", "output") or is_pure(node) for node in gm.graph.nodes)


def keeps_to_itself(node: torch.fx.Node) -> bool:
    """True if the only side effect is drawing random numbers or updating statistics.

    No other operation in the graph reads what such a side effect changes.
    """
    has_effect = name_of(node) in _UNDECLARED_EFFECTS or _torch.operators.draws(node.target)
    return has_effect and not assigns(node)


def is_function(node: torch.fx.Node) -> bool:
    """True for ``getitem``, and for a pure operator whose arguments alone decide its result.

    It draws no random numbers. Other nodes may still write to the memory that it reads.
    """
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, _torch.operators.OpOverload) or "empty" in name_of(node):
        return False
    varies = torch.Tag.nondeterministic_bitwise in target.tags
    return is_pure(node) and not (varies or _torch.operators.draws(target))


def eliminate_dead_code(gm: torch.fx.GraphModule) -> bool:
    """Erase pure nodes without users, also in nested graphs. Returns true if it erased any.

    ``Graph.eliminate_dead_code`` is not used: in nested graphs (pytorch/pytorch#152772) it does not
    ask the given ``is_impure_node``, and drops methods that write (torch 2.13 and 2.15).
    """
    count = len(gm.graph.nodes)
    for node in reversed(gm.graph.nodes):
        if is_pure(node) and not node.users:
            gm.graph.erase_node(node)
    erased = len(gm.graph.nodes) < count
    for child in nested_graphs(gm).values():
        if eliminate_dead_code(child):
            child.recompile()
            erased = True
    return erased
