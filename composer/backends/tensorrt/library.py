"""The TensorRT library: ``tensorrt``, or else ``tensorrt_rtx``.

No other module of this package imports either of them.
"""

from __future__ import annotations

import functools
import importlib
import threading
from dataclasses import dataclass, field
from typing import Any

from composer.backends.base import is_installed
from composer.backends.tensorrt.log import make_log
from composer.backends.tensorrt.probe import LIBRARIES
from composer.errors import Refusal, class_and_text
from composer.records import Reason, Status
from composer.system import forks


@dataclass(frozen=True, slots=True)
class Library:
    """One TensorRT module and its log.

    ``busy`` is held while a plan is built or loaded, so that the messages of two builds do not mix.
    """

    module: Any
    name: str
    version: str
    log: Any
    busy: threading.RLock = field(default_factory=forks.lock, compare=False)

    @property
    def is_rtx(self) -> bool:
        """True for TensorRT for RTX.

        It can compile for a named device that this machine does not have.
        """
        return self.name == "tensorrt_rtx"


def load_library() -> Library:
    """Import the first library that can be imported; call this only after the probe has passed.

    Raises:
        Refusal: ``unavailable`` with ``not_installed``; it names what each import raised.
    """
    failures: list[str] = []
    cause: Exception | None = None
    for name in filter(is_installed, LIBRARIES):
        try:
            return _load(name)
        except Exception as error:  # noqa: BLE001  # a broken package raises anything
            failures.append(f"{name} cannot be imported: {class_and_text(error)}")
            cause = error
    message = "; ".join(failures) or "neither tensorrt nor tensorrt_rtx is installed"
    raise Refusal(Status.UNAVAILABLE, Reason.NOT_INSTALLED, message) from cause


@functools.cache
def _load(name: str) -> Library:
    module = importlib.import_module(name)
    return Library(module, name, str(module.__version__), make_log(module))
