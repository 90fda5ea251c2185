"""Inductor: its settings, caches and kinds of pass."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch._inductor
import torch.fx
from torch._functorch import config as functorch_config
from torch._inductor import config as settings
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphModulePass as CustomGraphModulePass
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._ops import OpOverload

from composer._torch.compiles import compile_lock, patched
from composer._torch.names import off, optional
from composer._torch.operators import shares_memory
from composer._torch.tensors import tensors_among
from composer.errors import refuse
from composer.records import Reason, Status

CUSTOM_PASSES = (CustomGraphPass, CustomGraphModulePass, CustomPartitionerFn)
"""The classes of Inductor's kinds of pass. They have a common base class from torch 2.13 on."""


if TYPE_CHECKING or hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):
    from torch._inductor.custom_graph_pass import (
        CustomInferenceAwareGraphPass as CustomInferenceAwareGraphPass,
    )
else:

    class CustomInferenceAwareGraphPass(CustomGraphPass):
        """Stands in for a class that torch 2.11 lacks: there, no pass is told of inference."""


def inductor_options() -> list[str]:
    """Every setting that Inductor knows; ``torch.compile(options=...)`` takes them."""
    return torch._inductor.list_options()


def modes() -> list[str]:
    """The words that ``torch.compile(mode=...)`` takes."""
    return list(torch._inductor.list_mode_options())


def _config_of(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The same as :func:`inductor_config` by public names. The options are not checked."""
    return {**(torch._inductor.list_mode_options(mode) if mode else {}), **options}


@optional(
    "sending the settings of Inductor to a child process",
    *("torch._inductor.config:save_config_portable", "torch._inductor.config:load_config"),
    *("torch._functorch.config:save_config_portable", "torch._functorch.config:load_config"),
    without=lambda: ({}, {}),
)
def portable_settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of Inductor and AOTAutograd that change what they compile."""
    return settings.save_config_portable(), functorch_config.save_config_portable()


def apply_settings(portable: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Set what :func:`portable_settings` returned in another process."""
    for config, values in zip((settings, functorch_config), portable, strict=True):
        config.load_config(values)


@optional(
    "one thread for what Inductor compiles beside the program",
    "torch._inductor.config:compile_threads",
)
def compile_in_one_thread() -> None:
    """Have Inductor start no compile workers in this process, for the rest of its life."""
    settings.compile_threads = 1


@optional(
    "naming an option of Inductor's that has a wrong type",
    "torch:_TorchCompileInductorWrapper",
    without=_config_of,
)
def inductor_config(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that ``torch.compile(mode=..., options=...)`` would hand to Inductor.

    Raises:
        RuntimeError: Inductor does not know the mode, an option or the type of its value.
    """
    wrapper = torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return dict(wrapper.config)


def inductor_setting(name: str, config: Mapping[str, Any]) -> Any:
    """A setting as Inductor sees it: from the compile's own ``config``, or else from Inductor's."""
    return config[name] if name in config else getattr(settings, name)


def is_compilers(error: BaseException) -> bool:
    """True if Inductor raised the error because the system's compiler failed or is missing."""
    raised = sys.modules.get("torch._inductor.exc")  # not imported: nothing can have raised it
    kinds = (raised.CppCompileError, raised.InvalidCxxCompiler) if raised else ()
    return isinstance(error, kinds)


@optional(
    "Inductor's artefacts in the file of composer.save",
    "torch._inductor.runtime.cache_dir_utils:temporary_cache_dir",
    without=lambda folder: contextlib.nullcontext(),
)
def caches_in(folder: str) -> contextlib.AbstractContextManager[None]:
    """Let Inductor find nothing that it compiled before, and keep what it compiles in a folder."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    return temporary_cache_dir(folder)


@optional(
    "telling what shared passes did to graphs in Inductor's cache, by torch's own folder",
    "torch._inductor.runtime.cache_dir_utils:cache_dir",
    without=lambda: os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir(),
    lazily=True,
)
def inductor_cache_dir() -> str:
    """The folder in which Inductor keeps what it compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


@optional(
    "compiling anew what torch has in its caches",
    *("torch._functorch.config:enable_autograd_cache", "torch._inductor.config:fx_graph_cache"),
    without=contextlib.nullcontext,
)
@contextlib.contextmanager
def fresh_compiles() -> Iterator[None]:
    """Compile anew: neither Inductor nor AOTAutograd takes a graph from its cache.

    ``torch.compiler.config.force_disable_caches`` does the same, but it warns.
    """
    with (
        functorch_config.patch(enable_autograd_cache=False),
        settings.patch(fx_graph_cache=False),
    ):
        yield


@optional(
    "starting no idle processes for Inductor's compiles on a CPU",
    "torch._inductor.async_compile:maybe_warm_pool",
    without=lambda inputs: contextlib.nullcontext(),
    lazily=True,
)
@contextlib.contextmanager
def no_idle_workers(inputs: Sequence[Any]) -> Iterator[None]:
    """Keep Inductor from starting processes for compiling where no input is on a GPU.

    The processes compile Triton kernels; threads of this process compile C++ (torch 2.13). Dynamo's
    backend for Inductor starts the processes for any graph. ``torch.compile(backend="inductor")``
    itself starts them only for a graph on a GPU. Their start takes a core for some seconds. Engines
    were measured meanwhile, and a slow one was chosen.
    """
    if any(each.device.type != "cpu" for each in tensors_among(inputs)):
        yield
        return
    from torch._inductor import async_compile

    with compile_lock, patched(async_compile, "maybe_warm_pool", lambda: None):
        yield


@optional(
    "freeing the constants of frozen graphs of Inductor's",
    *(f"torch._inductor.codecache:PyCodeCache.{each}" for each in ("modules", "modules_no_attr")),
    without=contextlib.nullcontext,
    lazily=True,
)
@contextlib.contextmanager
def constants_let_go() -> Iterator[None]:
    """Let the code that Inductor loads within be freed when nothing refers to it any more.

    Otherwise Inductor keeps the modules of all code that it has loaded until the process ends. The
    modules hold the constants of frozen graphs (torch 2.13).
    """
    from torch._inductor.codecache import PyCodeCache

    known = set(map(id, PyCodeCache.modules))
    try:
        yield
    finally:
        known |= set(map(id, PyCodeCache.modules_no_attr.values()))
        for module in [each for each in PyCodeCache.modules if id(each) not in known]:
            PyCodeCache.modules.remove(module)
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


def _refuse() -> Any:
    refuse(Status.FAILED, Reason.BUILD_FAILED, "; ".join(off(look=False)))


@optional(
    "freezing weights into Inductor's code",
    "torch._inductor.freezing:freeze",
    without=_refuse,
    lazily=True,
)
@contextlib.contextmanager
def constants_kept_apart() -> Iterator[None]:
    """Make the graphs that Inductor freezes within return copies of their constants.

    Otherwise an output that is computed from weights alone is the same tensor in all calls, and the
    program may write to it (``test_what_inductor_folds_it_gives_out`` fails once that is mended).
    """
    from torch._inductor import freezing

    freeze = freezing.freeze

    def freeze_and_copy(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, list[int]]:
        gm, kept = freeze(*args, **kwargs)
        _copy_what_is_given_out(gm)
        return gm, kept

    with patched(freezing, "freeze", freeze_and_copy):
        yield


def _copy_what_is_given_out(gm: torch.fx.GraphModule) -> None:
    (returned,) = gm.graph.find_nodes(op="output")
    for node in returned.all_input_nodes:
        base = node
        while isinstance(base.target, OpOverload) and shares_memory(base.target):
            base = base.args[0]
        if base.op == "get_attr":  # Inductor would remove a clone as useless
            with gm.graph.inserting_before(returned):
                copy = gm.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
            copy.meta.update(node.meta)
            returned.replace_input_with(node, copy)


CUDAGRAPHS = "torch._dynamo.backends.cudagraphs"
"""The module of Dynamo's backend ``cudagraphs``."""


def cudagraphs_or_error() -> contextlib.AbstractContextManager[None]:
    """Make that backend raise if no CUDA graph can be made, and not run the graph without one."""
    patch = settings.patch({"triton.cudagraph_or_error": True})
    return cast(contextlib.AbstractContextManager[None], patch)
