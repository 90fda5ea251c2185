"""Optimizers of ONNX Runtime that composer disables, for all models or for some.

Numbers and faults are those of ONNX Runtime 1.31, the newest release for GPUs.

Disabled for all models:

- ``SkipLayerNormFusion`` makes models slower. On the CPU the fused kernel takes 0.26 ms for
  128 x 768 elements; LayerNormalization and an Add take about 0.1 ms. Measure it again with each
  release.
- The optimizers for norms give wrong results (:mod:`composer.backends.onnxrt.norms`).

Disabled for some models:

- ``MatMulScaleFusion`` is inexact in float64: it keeps the factor of a product in float32.
- ``MatMulScaleFusion`` makes some models invalid, and ONNX Runtime then refuses them. It moves
  ``x * a * b`` into a product and removes ``x * a``, although another product reads ``x * a``.
- ``Pad_Fusion`` makes some models invalid, too. It moves the zero padding of an average pool's
  input into the pool. The padding may be wider than the kernel, which a pool does not allow. Or
  ``ceil_mode`` then gives another output size.

``test_onnxrt_optimizers.py`` and ``test_onnxrt_norms.py`` fail when an optimizer can be enabled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from composer.backends.onnxrt.norms import FUSIONS
from composer.backends.onnxrt.values import Values

if TYPE_CHECKING:
    import onnx

SLOWER = ("SkipLayerNormFusion",)


def optimizers_to_disable(model: onnx.ModelProto) -> Iterator[str]:
    """The names of the optimizers to disable for this model."""
    import onnx

    values = Values(model)
    has_doubles = onnx.TensorProto.DOUBLE in {each.dtype for each in values.types.values()}
    yield from SLOWER
    yield from FUSIONS
    if _pads_averages(model, values):
        yield "Pad_Fusion"
    if has_doubles or _scales_twice(model, values):
        yield "MatMulScaleFusion"


def _pads_averages(model: onnx.ModelProto, values: Values) -> bool:
    """True if an average pool reads the result of a ``Pad``."""
    return any(
        node.op_type == "AveragePool" and values.producer(node.input[0], "Pad")
        for node in model.graph.node
    )


def _scales_twice(model: onnx.ModelProto, values: Values) -> bool:
    """True if a value is multiplied or divided by a number, and the result again by a number.

    Other users of the first result are not checked here. The optimizer merges equal operations
    before, so the users it sees may differ from those in this model.
    """
    scaled: set[str] = set()
    for node in model.graph.node:
        if node.op_type not in ("Mul", "Div") or not any(map(values.is_number, node.input)):
            continue
        if not scaled.isdisjoint(node.input):
            return True
        scaled.update(node.output)
    return False
