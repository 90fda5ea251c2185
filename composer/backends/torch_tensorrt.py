"""The backend that ``torch_tensorrt`` registers. Where it is installed, ``tensorrt`` means it.

``torch_tensorrt`` has no entry points, so its backends exist only after its import. Composer
imports it only when a graph on a CUDA device needs it. The import prints, and may raise anything
from ``AssertionError`` to a bare ``Exception``.
"""

from __future__ import annotations

import contextlib
import importlib
import io

from composer.backends.base import Backend, Build, BuildRequest
from composer.backends.dynamo import NamedBackend
from composer.backends.tensorrt.probe import require_device
from composer.errors import Refusal, class_and_text
from composer.records import GraphRequest, Reason, Status
from composer.system import control_flow

PACKAGE = "torch_tensorrt"


class TorchTensorRTBackend(Backend):
    """The backend of ``torch_tensorrt``, which checks its own options."""

    packages = ("torch-tensorrt", "tensorrt", "tensorrt-rtx")

    def probe(self, request: GraphRequest) -> None:
        """Check device and driver, without importing the package."""
        require_device(request.device)

    def build(self, request: BuildRequest) -> Build:
        """Compile with ``torch_tensorrt``.

        :mod:`composer.backends.foreign` checks that it does compile.
        """
        request.terms.facts.versions[PACKAGE] = _import_torch_tensorrt()
        return NamedBackend("tensorrt").build(request)


def _import_torch_tensorrt() -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(PACKAGE)
    except BaseException as error:
        control_flow.pass_on(error)
        raise Refusal(
            Status.UNAVAILABLE,
            Reason.NOT_INSTALLED,
            f"torch_tensorrt is installed but cannot be imported: {class_and_text(error)}",
        ) from error
    return str(getattr(module, "__version__", "unknown"))
