"""The graph of the ``aten`` stage does what the captured graph does, bit for bit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from common import compiled, last, needs_torch
from rewrites import CosineToSine, at
from torch import nn
from torch.nn import functional
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from composer.passes.canonical import to_aten


def leaf(*sizes):
    return torch.randn(*sizes, requires_grad=True)


def writes_in_place(x, y):
    return x.mul_(2), y + x, x.view(-1)


def writes_a_column(x):
    x[:, 0] = 1.0
    return x


def changes_an_inputs_shape(x):
    x.unsqueeze_(0)
    return x * 2


def aliases(x):
    return x, x.detach(), x.clone(), x[0], x.t(), x.view(-1)[::2]


def autocast_region(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
    return y.float() + x @ w, y.sum(0)


def no_grad_region(x, w):
    with torch.no_grad():
        y = x * 2
    return y + w


def branch(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def draws(x):
    return functional.dropout(x, 0.5) + torch.rand_like(x) + torch.rand(4)


def counts(x):
    return x.shape[0] * 2 + x.sum()


def attend(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)


PROGRAMS = {
    writes_in_place: lambda: (torch.randn(3, 4), leaf(3, 4)),
    writes_a_column: lambda: (torch.randn(4, 4),),
    changes_an_inputs_shape: lambda: (torch.randn(4),),
    aliases: lambda: (leaf(4, 4),),
    autocast_region: lambda: (leaf(4, 4), leaf(4, 4)),
    no_grad_region: lambda: (leaf(4), leaf(4)),
    branch: lambda: (leaf(4),),
    draws: lambda: (leaf(4),),
    counts: lambda: (leaf(4),),
    attend: lambda: (leaf(2, 2, 5, 8), leaf(2, 2, 5, 8), leaf(2, 2, 5, 8)),
}

MODULES = {
    "batch norm": (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3)),
        (3, 4),
    ),
    "convolution": (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (2, 3, 8, 8)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "parametrized": (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
}


def runs_aten(gm, example_inputs):
    return to_aten(gm, example_inputs).forward


def state_after(function, inputs, weights=()):
    """All that a call leaves behind: outputs, inputs, gradients, the random state."""
    torch.manual_seed(1)
    outputs = function(*inputs)
    leaves = [each for each in _pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor)]
    trained = [each for each in (*inputs, *weights) if each.is_leaf and each.requires_grad]
    losses = [each.float().sum() for each in leaves if each.requires_grad]
    grads = torch.autograd.grad(sum(losses), trained, allow_unused=True) if losses else ()
    layout = [(each.stride(), each.requires_grad) for each in leaves]
    return [outputs, inputs, grads, torch.get_rng_state()], layout


def same(found, wanted) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0)
    assert found[1] == wanted[1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            each,
            id=each.__name__,
            marks=[needs_torch("2.12", "a branch is faked in a mode of its own")]
            if each is branch
            else [],
        )
        for each in PROGRAMS
    ],
)
def test_aten_is_exact(program, dynamic: bool) -> None:
    """Writes, views, random numbers, regions, gradients, symbols."""
    torch.manual_seed(0)
    inputs = PROGRAMS[program]()
    twins = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    wanted = state_after(program, inputs)
    same(state_after(torch.compile(program, backend=runs_aten, dynamic=dynamic), twins), wanted)


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODULES)
def test_aten_is_exact_for_modules(name: str, context) -> None:
    """Weights, statistics and layouts as well, training or not."""
    module, sizes = MODULES[name]
    first, second = copy.deepcopy(module), copy.deepcopy(module)
    x = torch.randn(*sizes)
    with context():
        wanted = state_after(
            first, [x], list(first.parameters()) if context is contextlib.nullcontext else ()
        )
        weights = list(second.parameters()) if context is contextlib.nullcontext else ()
        same(state_after(torch.compile(second, backend=runs_aten), [x], weights), wanted)
    torch.testing.assert_close(dict(second.named_buffers()), dict(first.named_buffers()))


def test_aten_leaves_autocast_to_the_call() -> None:
    """What stands around the compiled call is not written into the graph."""
    x, w = leaf(4, 4), leaf(4, 4)
    function = torch.compile(lambda x, w: functional.softmax(x @ w, -1), backend=runs_aten)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(function(x, w), functional.softmax(x @ w, -1))


def test_weights_that_the_graph_holds_stay_its_attributes() -> None:
    """For a graph that did not come from Dynamo."""
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x = torch.randn(2, 4)
    made = to_aten(gm, [x])
    assert {str(node.target) for node in made.graph.find_nodes(op="get_attr")} == {
        *("0.weight", "0.bias"),
    }
    assert torch.equal(made(x), gm(x))
    assert made.get_parameter("0.weight") is gm.get_parameter("0.weight")


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.cos()

    @staticmethod
    def backward(ctx, grad):
        return grad * 17


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo does (torch 2.13)
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (lambda x: Gate.apply(x) + 1, "autograd_function_apply"),
        (lambda x: checkpoint(torch.cos, x, use_reentrant=False), "tag_activation_checkpoint"),
        (lambda x: torch.func.vmap(torch.cos)(x), "lazy_load_decompositions"),
    ],
)
def test_what_aten_cannot_say_keeps_its_graph(program, name: str) -> None:
    """The passes of the stage are recorded as not run, and the numbers are eager's."""
    x = leaf(4)
    result = compiled(program, "aot_eager", passes=[at("aten", CosineToSine)], strict=True)(x)
    torch.testing.assert_close(result, program(x))
    got, wanted = (torch.autograd.grad(each.sum(), x)[0] for each in (result, program(x)))
    torch.testing.assert_close(got, wanted)
    (record,) = last().passes
    assert (record.changed, record.nodes_before) == (False, 0)
    assert "broke the rule 'stage'" in record.error
    assert name in record.error
