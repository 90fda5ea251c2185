"""Graphs that are written to files and read back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.fx
from torch._dynamo import config as dynamo_config
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
_SHIPPING = "saving a model to one file (composer.save)"
_OF_FUNCTIONS = (
    "torch._dynamo.aot_compile:AOTCompiledFunction",
    *(f"torch._dynamo.package:{each}" for each in ("load_guards_state", "load_guard_manager")),
    *(f"torch._dynamo.config:{each}" for each in ("specialize_int", "specialize_float")),
    *(f"torch._C._dynamo.guards:GlobalStateGuard.__{each}state__" for each in ("get", "set")),
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


@optional(_SHIPPING, *_OF_FUNCTIONS)
def function_as_bytes(compiled: Any, inputs: Sequence[torch.Tensor]) -> bytes:
    """Compile a function of tensors ahead of time, and serialize it.

    Args:
        compiled: What ``torch.compile`` returned. No guard on its module is kept. So numbers of the
            module become constants, also where sizes are dynamic.
        inputs: The tensors.
    """
    with dynamo_config.patch(specialize_int=True, specialize_float=True):
        function = compiled.aot_compile((tuple(inputs), {}))
    artifacts = function._artifacts
    env = artifacts.runtime_env
    # Torch would let the other process import each module that was seen while it traced.
    used = {
        name: module for name, module in env.import_sources.items() if name in env.external_refs
    }
    artifacts.runtime_env = dataclasses.replace(env, import_sources=used)
    return bytes(type(function).serialize(function).serialized_data)


@optional(_SHIPPING, *_OF_FUNCTIONS)
def function_of_bytes(data: bytes) -> Any:
    """Read a function that :func:`function_as_bytes` wrote.

    A filter of guards does not leave out the guards on the order of keys, such as the names of a
    module's children. Torch cannot read these without the guards on the module itself.
    """
    from torch._dynamo import aot_compile, package

    class Function(aot_compile.AOTCompiledFunction):
        def __post_init__(self) -> None:
            artifacts = self._artifacts
            artifacts.check_compatibility()
            state = package.load_guards_state(artifacts.guards_state)
            state.output_graph.guard_on_key_order = set()
            artifacts.guard_manager = package.load_guard_manager(state, artifacts.original_code, {})
            self._global_state = state.output_graph.global_state_guard
            super().__post_init__()

        def guard_check(self, *args: Any, **kwargs: Any) -> bool:
            """Check the guards, and accept any number of threads, as all engines do."""
            expected = json.loads(self._global_state.__getstate__())
            if expected["num_threads"] != torch.get_num_threads():
                here = expected | {"num_threads": torch.get_num_threads()}
                self._global_state.__setstate__(json.dumps(here))
            return bool(super().guard_check(*args, **kwargs))

    return Function.deserialize(data)


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
