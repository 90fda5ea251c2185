"""Graphs in files."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch
import torch.fx
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)

from composer._torch.names import optional
from composer._torch.sources import name_sources

_SAVING = "saving compiled functions to a file (aot_compile)"
_NAMES = (
    "torch._dynamo.aot_compile_types:SerializableCallable",
    *(f"torch.fx._graph_pickler:{each}" for each in ("GraphPickler.dumps", "GraphPickler.loads")),
    "torch.fx._graph_pickler:Options",
)


@optional(_SAVING, *_NAMES, without=lambda: object)
def _serializable() -> Any:
    from torch._dynamo.aot_compile_types import SerializableCallable

    return SerializableCallable


SerializableCallable: Any = _serializable()
"""The base of what torch writes to a file in a compiled function's place."""


@optional(_SAVING, *_NAMES, without=lambda: False)
def will_be_saved() -> bool:
    """Whether torch is about to save what is being compiled to a file (``aot_compile``).

    Dynamo's own ``eager`` backend asks the same.
    """
    from torch._functorch import config as functorch_config

    return bool(getattr(functorch_config, "force_autograd_cache", False))


def not_saving() -> contextlib.AbstractContextManager[None]:
    """Compile as if nothing were saved to a file.

    While it saves, AOTAutograd accepts what Inductor makes and refuses that of any other compiler.
    """
    from torch._functorch import config as functorch_config

    settings = (
        "force_autograd_cache",
        "strict_autograd_cache",
        "bundled_autograd_cache",
        "bypass_autograd_cache_key",
    )
    off = {name: False for name in settings if hasattr(functorch_config, name)}
    return cast(contextlib.AbstractContextManager[None], functorch_config.patch(off))


def graph_as_bytes(gm: torch.fx.GraphModule) -> bytes:
    """A graph with its symbols, for another process; the tensors that it holds as well."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(gm, Options(ops_filter=None))


def graph_of_bytes(data: bytes) -> torch.fx.GraphModule:
    """The graph that was written, ready to be compiled by :func:`recaptured`."""
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    gm = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(gm, torch.fx.GraphModule)
    _give_numbers_their_symbols(gm)
    _pass_for_captured(gm)
    gm.recompile()
    return gm


def _pass_for_captured(gm: torch.fx.GraphModule) -> None:
    """Have AOTAutograd look for Dynamo's mark of weights, which it does in graphs of Dynamo's only.

    Weights cost nothing to keep for the backward. Where it knows of none, it cuts the graph in two
    elsewhere than it did when the graph was captured, and no model that was kept is the backward's.
    """
    gm.meta.setdefault("dynamo_compile_id", None)
    for node in gm.graph.find_nodes(op="placeholder"):
        cast(Any, node)._dynamo_source = None
    object.__setattr__(gm, "_param_name_to_source", {})
    name_sources(gm)


def _give_numbers_their_symbols(gm: torch.fx.GraphModule) -> None:
    """Have the fakes of inputs that stand for dynamic numbers know their symbols, as Dynamo's do.

    Files leave that out, and AOTAutograd takes a symbol that no ``item`` has for one that an engine
    needs as a constant: it asks Dynamo to start again.
    """
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        fake, number = (each.meta.get("example_value") for each in (node.args[0], node))
        if isinstance(fake, FakeTensor) and isinstance(number, torch.SymFloat):
            fake.item_memo = number
