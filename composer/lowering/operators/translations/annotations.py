"""Types of arguments and results of translations, which the exporter reads from annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # type checkers cannot read onnxscript's types
    INT64: TypeAlias = Any
    TReal: TypeAlias = Any
    TTensor: TypeAlias = Any
else:
    from onnxscript import INT64
    from onnxscript.function_libs.torch_lib.tensor_typing import TReal, TTensor

__all__ = ["INT64", "TReal", "TTensor"]
