"""Graphs that are written to files and read back."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch
import torch.fx
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from composer._torch.names import optional, optional_value
from composer._torch.sources import name_sources

_SAVING = "saving compiled functions to a file (aot_compile)"
_NAMES = (
    "torch._dynamo.aot_compile_types:SerializableCallable",
    *(f"torch.fx._graph_pickler:{each}" for each in ("GraphPickler.dumps", "GraphPickler.loads")),
    "torch.fx._graph_pickler:Options",
    "torch.fx._graph_pickler:_OpPickleData.pickle",
)


SerializableCallable: Any = optional_value(_SAVING, _NAMES[0], without=object)
"""The base class of objects that torch saves to a file in place of a compiled function."""


@optional(_SAVING, *_NAMES, without=lambda: False)
def will_be_saved() -> bool:
    """True if torch is about to save the compiled function to a file (``aot_compile``).

    Dynamo's own ``eager`` backend reads the same setting.
    """
    return bool(getattr(functorch_config, "force_autograd_cache", False))


def not_saving() -> contextlib.AbstractContextManager[None]:
    """Compile as if nothing were saved to a file.

    While a function is saved, AOTAutograd accepts what Inductor compiled, and refuses the results
    of any other compiler.
    """
    settings = (
        "force_autograd_cache",
        "strict_autograd_cache",
        "bundled_autograd_cache",
        "bypass_autograd_cache_key",
    )
    off = {name: False for name in settings if hasattr(functorch_config, name)}
    return cast(contextlib.AbstractContextManager[None], functorch_config.patch(off))


def graph_as_bytes(gm: torch.fx.GraphModule) -> bytes:
    """Serialize a graph for another process, with its symbols and the tensors that it holds."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(gm, Options(ops_filter=None))


def takes_function(function: Any) -> bool:
    """True if :func:`graph_as_bytes` can write a graph that calls a function.

    It writes the names of torch's own functions, and refuses all others.
    """
    from torch.fx._graph_pickler import Options, _OpPickleData

    try:
        _OpPickleData.pickle(function, Options(ops_filter=None))
    except NotImplementedError:
        return False
    return True


def graph_of_bytes(data: bytes) -> torch.fx.GraphModule:
    """Read a graph that :func:`graph_as_bytes` wrote; :func:`recaptured` can compile it."""
    from torch.fx._graph_pickler import GraphPickler

    gm = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(gm, torch.fx.GraphModule)
    _give_numbers_their_symbols(gm)
    _pass_for_captured(gm)
    gm.recompile()
    return gm


def _pass_for_captured(gm: torch.fx.GraphModule) -> None:
    """Make a graph from a file look like one that Dynamo captured.

    AOTAutograd looks for Dynamo's mark of weights only in graphs that Dynamo captured. Weights cost
    nothing to keep for the backward. If AOTAutograd knows of no weights, it cuts the graph into
    forward and backward at another place than when the graph was captured. Then no kept model fits
    the backward.
    """
    gm.meta.setdefault("dynamo_compile_id", None)
    for node in gm.graph.find_nodes(op="placeholder"):
        cast(Any, node)._dynamo_source = None
    object.__setattr__(gm, "_param_name_to_source", {})
    name_sources(gm)


def _give_numbers_their_symbols(gm: torch.fx.GraphModule) -> None:
    """Restore the symbols of dynamic numbers, as they are in a graph of Dynamo's.

    The graph reads such a number from an input by ``item``, and the input's fake tensor remembers
    the symbol in ``item_memo``. Files leave that out. AOTAutograd then assumes that an engine needs
    the number as a constant, and asks Dynamo to start again.
    """
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        fake = node.args[0].meta.get("example_value")
        number = node.meta.get("example_value")
        if isinstance(fake, FakeTensor) and isinstance(number, torch.SymFloat):
            fake.item_memo = number
