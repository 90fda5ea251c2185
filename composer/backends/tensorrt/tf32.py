"""Refuses float32 products that TensorRT would compute in TF32 where torch forbids it.

If TensorRT for RTX has no name for a GPU, it makes a plan for all GPUs. Such a plan computes
float32 products in TF32, whatever the builder's flag says. The error was 3e-4 with TensorRT for RTX
1.6.1 on an H200, where eager's is 5e-7.
"""

from __future__ import annotations

import torch
import torch.fx

from composer import _torch
from composer.backends.tensorrt.library import Library
from composer.backends.tensorrt.plan import Target, named_capability
from composer.backends.tf32 import allows_convolutions, allows_products
from composer.errors import refuse
from composer.graphs.nodes import calls_of, tensors_of
from composer.records import Reason, Status

_CONVOLUTION = "aten::convolution"
_PRODUCTS = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv"}
    | {"aten::addmv", "aten::dot", "aten::matmul", "aten::linear"}
)


def require_as_allowed(gm: torch.fx.GraphModule, library: Library, target: Target) -> None:
    """Refuse products of float32 that would be computed in TF32 against torch's setting.

    Raises:
        Refusal: ``declined`` with ``unsupported_dtype``.
    """
    if not library.is_rtx or named_capability(library, target) is not None:
        return
    forbidden = set[str]()
    if not allows_products():
        forbidden |= _PRODUCTS
    if not allows_convolutions():
        forbidden.add(_CONVOLUTION)
    for node in calls_of(gm):
        name = _torch.operators.operator_name(node.target)
        if name in forbidden and torch.float32 in {t.dtype for t in tensors_of(node)}:
            message = (
                f"TensorRT for RTX {library.version} computes {name} of float32 in TF32 on this "
                f"GPU ({target.gpu}), which torch's settings do not allow; "
                'torch.set_float32_matmul_precision("high") does for products'
            )
            refuse(Status.DECLINED, Reason.UNSUPPORTED_DTYPE, message)
