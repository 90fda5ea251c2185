"""Decides which operations a pass may drop, move or merge."""

from __future__ import annotations

import operator

import torch
import torch.fx

from composer import _torch
from composer.graphs.nodes import attribute_at
from composer.graphs.writes import KEEP_STATISTICS, is_told_to_write, is_torchs

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
    if node.op == "call_method":
        return not _has_undeclared_effect(node)
    return node.op == "call_function" and _is_pure_function(node)


def _is_pure_function(node: torch.fx.Node) -> bool:
    if _has_undeclared_effect(node) or node.target in _IN_PLACE or "out" in node.kwargs:
        return False
    if isinstance(node.target, _torch.operators.OpOverload):
        return not node.is_impure()
    if _torch.operators.takes_functions(node.target):
        return _is_pure_over_graphs(node)
    if not is_torchs(node) or _torch.modes.sets_modes(node.target):
        return False
    return not (is_told_to_write(node) or node.is_impure())


def _has_undeclared_effect(node: torch.fx.Node) -> bool:
    name = _name(node)
    is_in_place = name.endswith("_") and not name.startswith("__")
    return is_in_place or name in _UNDECLARED_EFFECTS


def _is_pure_over_graphs(node: torch.fx.Node) -> bool:
    gm = node.graph.owning_module
    paths = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    held = [attribute_at(gm, path) for path in paths]
    modules = [value for value in held if isinstance(value, torch.nn.Module)]
    return bool(modules) and all(map(_is_pure_module, modules))


def _is_pure_module(module: torch.nn.Module) -> bool:
    """True if a module is a graph of pure operations."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    ends = ("placeholder", "output")
    return all(node.op in ends or is_pure(node) for node in module.graph.nodes)


def keeps_to_itself(node: torch.fx.Node) -> bool:
    """True if the only side effect is drawing random numbers or updating statistics.

    No other operation in the graph reads what such a side effect changes.
    """
    name = _name(node)
    if name.endswith("_") or is_told_to_write(node) or "out" in node.kwargs:
        return False
    return name in _UNDECLARED_EFFECTS or _torch.operators.draws(node.target)


def is_function(node: torch.fx.Node) -> bool:
    """True for ``getitem``, and for a pure operator whose arguments alone decide its result.

    It draws no random numbers. Other nodes may still write to the memory that it reads.
    """
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, _torch.operators.OpOverload) or "empty" in _name(node):
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
    for child in gm.children():
        if isinstance(child, torch.fx.GraphModule) and eliminate_dead_code(child):
            child.recompile()
            erased = True
    return erased


def _name(node: torch.fx.Node) -> str:
    """Return the name of the target, such as ``"dropout"`` for ``aten.dropout.default``."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", "")).partition(".")[0]
