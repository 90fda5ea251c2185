"""Torch's minifier."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from composer._torch.dynamo import locals_on_the_stack
from composer._torch.names import optional

_REPRO = "torch._dynamo.repro.after_dynamo:"
_FEATURE = "torch's minifier"

_MINIFIERS = {
    "dynamo_minifier_backend": "errors",
    "backend_fails": "errors",
    "dynamo_accuracy_minifier_backend": "wrong numbers",
    "backend_accuracy_fails": "wrong numbers",
}
"""Functions in the minifier's scripts that call a backend to see whether it fails, each with the
kind of failure that it looks for."""


@optional(
    _FEATURE,
    *(f"torch._dynamo.config:{each}" for each in ("repro_after", "repro_level")),
    f"{_REPRO}repro_run.__code__",
    without=lambda: "",
    lazily=True,
)
def minifier_looks_for() -> str:
    """What torch's minifier looks for: ``"errors"`` or ``"wrong numbers"``; empty if it is off.

    The user turns the minifier on by ``TORCHDYNAMO_REPRO_AFTER`` and ``TORCHDYNAMO_REPRO_LEVEL``.
    The scripts that the minifier writes set neither of them. There it is recognized by its
    functions on the Python stack.
    """
    from torch._dynamo.repro import after_dynamo

    config = torch._dynamo.config
    if config.repro_after is not None:
        return "wrong numbers" if config.repro_level == _ACCURACY else "errors"
    for frame, _ in traceback.walk_stack(sys._getframe()):
        name, module = frame.f_code.co_name, str(frame.f_globals.get("__name__"))
        if name in _MINIFIERS and module.startswith("torch._dynamo."):
            return _MINIFIERS[name]
        if frame.f_code is after_dynamo.repro_run.__code__:
            return "wrong numbers" if frame.f_locals["options"].accuracy else "errors"
    return ""


_ACCURACY = 4
"""The ``repro_level`` at which torch's minifier compares numbers."""


def for_minifier(compiled: Callable[..., Any], gm: torch.fx.GraphModule) -> Callable[..., Any]:
    """Wrap a compiled graph so that torch's minifier can call it.

    The minifier passes separate arguments, and expects some methods of a module. What AOTAutograd
    returns is marked to take one list, but takes separate arguments (torch 2.11 to 2.15). If the
    minifier is not used, the compiled graph is returned as it is.
    """
    if not minifier_looks_for():
        return compiled

    def run(*args: Any) -> Any:
        return compiled(*args)

    for name in ("zero_grad", "named_parameters", "named_buffers"):
        setattr(run, name, getattr(gm, name))
    return run


Preamble = Callable[[torch.fx.GraphModule, Sequence[Any], Mapping[str, Any]], str]


@optional(
    _FEATURE,
    *(f"{_REPRO}{each}" for each in ("generate_dynamo_fx_repro_string", "extra_imports")),
    f"{_REPRO}WrapBackendDebug.__call__",
    "torch._dynamo.eval_frame:innermost_backend",
    lazily=True,
)
def begin_scripts_with(preamble: Preamble, compiler_name: str) -> None:
    """Make the scripts that torch's minifier writes for a backend begin with additional lines.

    Args:
        preamble: Returns the lines. It is called with the graph, its inputs, and the arguments that
            ``torch.compile`` was given for the backend.
        compiler_name: The backend's name. Scripts for other backends are not changed.
    """
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.repro import after_dynamo

    module: Any = after_dynamo
    generate = module.generate_dynamo_fx_repro_string

    def generate_with_preamble(
        gm: torch.fx.GraphModule, args: Sequence[Any], name: str | None, *rest: Any, **how: Any
    ) -> Any:
        before = module.extra_imports
        if name == compiler_name:
            asking = locals_on_the_stack(after_dynamo.WrapBackendDebug.__call__.__code__)
            backend: Any = asking.get("self") and innermost_backend(asking["self"])
            lines = preamble(gm, args, getattr(backend, "kwargs", {}))
            module.extra_imports = f"{before}\n{lines}"
        try:
            return generate(gm, args, name, *rest, **how)
        finally:
            module.extra_imports = before

    module.generate_dynamo_fx_repro_string = generate_with_preamble
