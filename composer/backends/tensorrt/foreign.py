"""The backend that ``torch_tensorrt`` registers, where that package is installed.

``torch_tensorrt`` has no entry points, so its backends exist only after its import. Composer
imports it only when a graph on a CUDA device needs it. The import prints, and may raise anything
from ``AssertionError`` to a bare ``Exception``.
"""

from __future__ import annotations

import contextlib
import importlib
import io

from composer.backends.base import Build, BuildRequest
from composer.backends.dynamo import NamedBackend
from composer.backends.tensorrt.probe import FOREIGN
from composer.errors import Refusal, class_and_text
from composer.records import Reason, Status
from composer.system import control_flow


def build_with_torch_tensorrt(request: BuildRequest) -> Build:
    """Compile with ``torch_tensorrt``.

    :mod:`composer.backends.foreign` checks that it does compile.
    """
    request.terms.facts.versions["torch_tensorrt"] = _import_torch_tensorrt()
    return NamedBackend("tensorrt").build(request)


def _import_torch_tensorrt() -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(FOREIGN)
    except BaseException as error:
        control_flow.pass_on(error)
        raise Refusal(
            Status.UNAVAILABLE,
            Reason.NOT_INSTALLED,
            f"torch_tensorrt is installed but cannot be imported: {class_and_text(error)}",
        ) from error
    return str(getattr(module, "__version__", "unknown"))
