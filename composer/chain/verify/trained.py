"""Looks at each call of a training graph whether the outputs of a function have gradients.

A function on another library's arrays returns tensors that autograd knows nothing of. The program
would go on, and its weights would stay as they are. Where engines are compared with eager, such a
function is refused before it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from composer.graphs.comparison import requires_grad
from composer.graphs.nodes import value_of


def requiring_gradients(
    compiled: Callable[..., Any], gm: torch.fx.GraphModule
) -> Callable[..., Any]:
    """Return a compiled function that raises if no output has gradients, and some of eager's have.

    Args:
        compiled: The function.
        gm: The graph that it was compiled from.
    """
    (output,) = gm.graph.find_nodes(op="output")
    if not any(map(requires_grad, map(value_of, output.all_input_nodes))):
        return compiled

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        if torch.is_grad_enabled() and not any(map(requires_grad, outputs)):
            what = "the engine gives no gradients"
            raise RuntimeError(f"{what}; without a backward, call it under torch.no_grad()")
        return outputs

    return run
