"""composer: one ``torch.compile`` backend that tries several engines and says what happened.

``torch.compile(model, backend="composer")`` tries TensorRT, Inductor and ONNX Runtime in turn,
checks that the engine it accepts did the work, and runs the captured graph itself when none can.
:func:`report` shows who ran and why the others did not.

Each name is imported when it is first asked for: the command ``composer`` answers ``--help``, and
reads records, without waiting for torch.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from composer.system import forks as _forks

if _typing.TYPE_CHECKING:
    __version__: str
    from composer import errors, passes, testing
    from composer.lowering.weights.by_address import refresh
    from composer.policy import Candidate, Policy, PolicyBook, using
    from composer.records import Attempt, CompileReport, Reason, Status
    from composer.session import configure, report, reports, reset
    from composer.tools.explain import explain
    from composer.tools.repro import repro
    from composer.tools.ship import load, save
    from composer.tools.warm_up import warm_up

__all__ = [
    "Attempt",
    "Candidate",
    "CompileReport",
    "Policy",
    "PolicyBook",
    "Reason",
    "Status",
    "configure",
    "errors",
    "explain",
    "load",
    "passes",
    "refresh",
    "report",
    "reports",
    "repro",
    "reset",
    "save",
    "testing",
    "using",
    "warm_up",
]

_HOMES = {
    "lowering.weights.by_address": ("refresh",),
    "policy": ("Candidate", "Policy", "PolicyBook", "using"),
    "records": ("Attempt", "CompileReport", "Reason", "Status"),
    "session": ("configure", "report", "reports", "reset"),
    "tools.explain": ("explain",),
    "tools.repro": ("repro",),
    "tools.ship": ("load", "save"),
    "tools.warm_up": ("warm_up",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


_importing = _forks.lock()
"""Several threads that import torch at once break it (2.13)."""


if not _typing.TYPE_CHECKING:  # for type checkers there is no other name than those

    def __getattr__(name: str) -> _typing.Any:
        """A public name, a module of this package, or the installed version."""
        if name == "__version__":
            distribution = _module("system.distribution")
            return distribution.version_of(distribution.NAME)
        if name not in __all__:
            return _module(name)
        with _importing:
            if name not in _HOME_OF:
                return _module(name)
            return globals().setdefault(name, getattr(_module(_HOME_OF[name]), name))


def _module(name: str) -> _typing.Any:
    wanted = f"{__name__}.{name}"
    try:
        return _importlib.import_module(wanted)
    except ModuleNotFoundError as missing:
        if missing.name != wanted:
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return list(__all__)
