"""Whether products of float32 are computed as torch allows it.

Where TensorRT for RTX has no name for a GPU it makes a plan for any, and multiplies float32 in TF32
there, with the builder's flag or without (1.6.1 on an H200: 3e-4 off where eager is 5e-7).
"""

from __future__ import annotations

import torch

from composer import _torch
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.plan import Target, named_capability
from composer.backends.tf32 import allows_convolutions, allows_products
from composer.errors import refuse
from composer.graphs.nodes import tensors_of
from composer.lowering.aot import FunctionalGraph
from composer.lowering.partition.regions import calls_of
from composer.records import Reason, Status

_CONVOLUTION = "aten::convolution"
_PRODUCTS = frozenset(
    {_CONVOLUTION, "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv"}
    | {"aten::addmv", "aten::dot", "aten::matmul", "aten::linear"}
)


def require_as_allowed(graph: FunctionalGraph, library: Library, target: Target) -> None:
    """Refuse products of float32 that would be computed in TF32 against torch's setting.

    Raises:
        Refusal: ``declined`` with ``unsupported_dtype``.
    """
    if not library.is_rtx or named_capability(library, target) is not None:
        return
    for node in calls_of(graph.gm):
        name = _torch.operators.operator_name(node.target)
        if name not in _PRODUCTS or all(t.dtype is not torch.float32 for t in tensors_of(node)):
            continue
        if not (allows_convolutions() if name == _CONVOLUTION else allows_products()):
            what = (
                f"TensorRT for RTX {library.version} computes {name} of float32 in TF32 on this "
                f"GPU ({target.gpu}), which torch's settings do not allow; "
                'torch.set_float32_matmul_precision("high") does for products'
            )
            refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, what)
