"""What passes need of torch: canonical ATen, and Inductor's pattern matcher."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from composer._torch.fakes import forget_met, mode_of_compile, symbolic_context
from composer._torch.modes import belongs_to_functorch
from composer._torch.sources import lazily


def is_pattern_matcher_pass(value: object) -> bool:
    """True for a pass of Inductor's pattern matcher; its heavy module is not imported for that."""
    module = sys.modules.get("torch._inductor.pattern_matcher")
    return module is not None and isinstance(value, module.PatternMatcherPass)


def is_canonical(target: Any) -> bool:
    """True if :func:`capture_aten` keeps the meaning of a call of this function."""
    if isinstance(target, HigherOrderOperator):
        return target is torch.ops.higher_order.cond
    return not belongs_to_functorch(target)


def _is_static(symbolic: Any) -> bool:
    """True if Dynamo gave no symbol to any size or stride of a tensor."""
    kinds = (*symbolic.dynamic_sizes, *symbolic.dynamic_strides)
    return all(kind in (DimDynamic.STATIC, DimDynamic.INFER_STRIDE) for kind in kinds)


def capture_aten(run: Callable[..., Any], example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Trace a captured graph to canonical ATen, before autograd, with the same symbols for sizes.

    ``make_fx(pre_dispatch=True)`` records each call as one overload, above autograd and autocast,
    as ``torch.export`` does for training. The inputs get new fake tensors, in a mode that shares
    Dynamo's symbols. Dynamo's own fake tensors are not used, because running the graph may change
    their metadata. ``example_inputs`` are real tensors and symbols.
    """
    known = getattr(mode_of_compile(), "shape_env", None)
    mode = FakeTensorMode(shape_env=known, allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        symbolic = symbolic_context(value)
        if symbolic is None or (value.dim() and _is_static(symbolic)):  # saves half of the work
            return mode.from_tensor(value, static_shapes=True)
        return mode.from_tensor(
            value, symbolic_context=symbolic, source=symbolic.tensor_source, trace=False
        )

    fakes = [fake(value) for value in example_inputs]
    with mode, traceback.preserve_node_meta(), lazily():
        made = make_fx(run, pre_dispatch=True)(*fakes)
    forget_met(mode)
    return made


def untraced() -> contextlib.AbstractContextManager[Any]:
    """Call operators on fake tensors without recording or decomposing them."""
    return disable_proxy_modes_tracing()
