"""ONNX Runtime's own operators stand for torch's where they mean the same, and nowhere else."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
from common import compiled, last, needs_torch
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from composer.lowering.decompositions import decompositions
from composer.lowering.export.onnx import _settle_casts, to_onnx
from composer.lowering.operators.fused import fusions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operator stands in the models that are made."""
    count: Counter[str] = Counter()

    def counting(graph: Any, *more: Any, **named: Any) -> Any:
        made = to_onnx(graph, *more, **named)
        count.update(node.op_type for node in made.model.graph.node)
        return made

    # The package has a function of the same name.
    partition = importlib.import_module("composer.lowering.partition.by_trial")
    monkeypatch.setattr(partition, "to_onnx", counting)
    return count


def check(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> None:
    """Compiled for ONNX Runtime alone, ``function`` gives eager's numbers."""
    f = torch.compile(function, backend="onnxrt", dynamic=dynamic, fullgraph=True)
    torch.testing.assert_close(f(*args), function(*args))


def qkv(dtype: torch.dtype = torch.float32, keys: int = 7) -> list[torch.Tensor]:
    return [torch.randn(2, 3, n, 8, dtype=dtype) for n in (5, keys, keys)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_gelu_is_one_operator(operators: Counter[str], dynamic: bool) -> None:
    """Values at both ends and a NaN included."""
    ends = torch.tensor([[-1e4, -5.0, -0.0, 0.0, 5.0, 1e4, torch.nan]])
    f = torch.compile(functional.gelu, backend="onnxrt", dynamic=dynamic)
    torch.testing.assert_close(f(ends), functional.gelu(ends), equal_nan=True)
    check(functional.gelu, torch.randn(3, 9), dynamic=dynamic)
    assert operators["Gelu"]
    assert not operators["Erf"]


@pytest.mark.parametrize(
    "x",
    [torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4).t(), torch.randn(0, 4)],
    ids=["float64", "transposed", "empty"],
)
def test_gelu_of_anything_else_is_written_out(operators: Counter[str], x: torch.Tensor) -> None:
    """Float64, another layout and no elements stay with the common translation."""
    try:
        check(functional.gelu, x)
    except torch._dynamo.exc.BackendCompilerFailed:
        assert x.numel() == 0 or x.dtype is torch.float64  # declined, as without the fusion
    assert not operators["Gelu"]


def test_nothing_of_a_graph_on_a_gpu_is_made_on_the_cpu() -> None:
    """Where torch has the result of an operator of ONNX Runtime's own, wherever its inputs are."""
    with FakeTensorMode():
        query = torch.empty(2, 4, 8, 16, device="cuda")

    def program(query: torch.Tensor) -> torch.Tensor:
        return functional.gelu(functional.scaled_dot_product_attention(query, query, query))

    table = decompositions(fusions(), training=False)
    graph = make_fx(program, decomposition_table=table)(query).graph
    values = [node.meta["val"] for node in graph.nodes if "val" in node.meta]
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    assert {each.device.type for each in tensors if each.dim()} == {"cuda"}


def test_tanh_gelu_is_left_to_the_engine(operators: Counter[str]) -> None:
    """ONNX Runtime makes its own FastGelu of it."""
    check(lambda x: functional.gelu(x, approximate="tanh"), torch.randn(3, 4))
    assert not operators["Gelu"]


def in_a_branch(x: torch.Tensor) -> torch.Tensor:
    branches = functional.gelu, torch.sin
    return torch.cond(x.sum() > 0, *branches, (x.exp(),)) + functional.gelu(x)


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    def step(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, functional.gelu(x) + x

    zero = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, _: i < 3, step, (zero, x))[1] * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [in_a_branch, in_a_loop])
def test_gelu_in_a_nested_graph_is_torchs(function: Callable[..., Any], dynamic: bool) -> None:
    """Branches and loops are run by torch, which has no kernel for ONNX Runtime's operator."""
    check(function, torch.ones(3, 9), dynamic=dynamic)


def gated_cell(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As an LSTM has it."""
    kept, new, out, values = (x @ w).chunk(4, 1)
    cell = torch.sigmoid(kept) * x + torch.sigmoid(new) * torch.tanh(values)
    return torch.sigmoid(out) * torch.tanh(cell)


GATES = {
    "swish": (functional.silu, (3, 4)),
    "swish of a multiple": (lambda x: x * torch.sigmoid(1.702 * x), (3, 4)),
    "a gated linear unit": (lambda x, w: functional.glu(x @ w, 1), (3, 4), (4, 16)),
    "a cell": (lambda x, w: gated_cell(x @ w[:, :4], w), (3, 4), (4, 16)),
    "a channel's weight": (
        lambda x, w: torch.sigmoid(x.mean((2, 3), keepdim=True)) * functional.silu(x + w),
        *((2, 4, 5, 5), (2, 4, 5, 5)),
    ),
    "scores of a mixture": (lambda x, w: torch.sigmoid(x).t() @ w, (3, 4), (3, 5)),
}


@pytest.mark.parametrize("case", GATES.values(), ids=GATES)
def test_gates_are_one_operator(operators: Counter[str], case: tuple[Any, ...]) -> None:
    """Only a sigmoid whose logarithm may be taken has to be right to a part of itself."""
    function, *shapes = case
    check(function, *(torch.randn(*shape) for shape in shapes))
    assert operators["Sigmoid"]
    assert not operators["Exp"]


PIECES = {
    "of one size": lambda x: x.split(2, 1),
    "of one size, a smaller one": lambda x: x.split(4, 1),
    "of given sizes": lambda x: x.split([1, 5], 1),
    "of given sizes, one empty": lambda x: x.split([0, 6], 1),
    "the whole": lambda x: x.split(9, 1),
    "chunks": lambda x: x.chunk(3, -2),
    "of a size of the input": lambda x: x.split(x.shape[0], 1),
    "of sizes of the input": lambda x: x.split([x.shape[0], 6 - x.shape[0]], 1),
    "unsafe": lambda x: torch.unsafe_split(x, 2, 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_split_is_a_value_for_each_piece(
    operators: Counter[str], pieces: Callable[..., Any], dynamic: bool
) -> None:
    """No sequence, whose pieces ONNX Runtime copies twice, where all sizes are fixed."""
    function = lambda x: [each + 1 for each in pieces(x.exp())]  # noqa: E731
    f = compiled(function, "onnxrt", dynamic=dynamic)
    for x in (torch.randn(3, 6, 5), torch.randn(2 + dynamic, 6, 5 - dynamic)):
        torch.testing.assert_close(f(x), function(x))
    assert last().chosen == "onnxrt"
    assert dynamic or not operators["SplitToSequence"]


SPLITS_NOTHING = needs_torch("2.13", "Dynamo raises IndexError")


@pytest.mark.parametrize("size", [0, pytest.param(2, marks=SPLITS_NOTHING)])
def test_nothing_is_split_into_one_piece(operators: Counter[str], size: int) -> None:
    """A piece of size 0 is all that there is of a dimension of size 0."""
    check(lambda x: [each + 1 for each in x.exp().split(size, 1)], torch.ones(3, 0))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_one_operator(operators: Counter[str], scale: float | None) -> None:
    """Without a mask, self-attention or over more keys than queries."""
    check(lambda *a: functional.scaled_dot_product_attention(*a, scale=scale), *qkv())
    assert operators["MultiHeadAttention"] == 1
    assert not operators["Softmax"]


def test_attention_of_any_length_is_one_operator(operators: Counter[str]) -> None:
    """The lengths, and the batch, may change from call to call."""
    f = torch.compile(functional.scaled_dot_product_attention, backend="onnxrt")
    for keys in (7, 9, 11):
        operands = qkv(keys=keys)
        for each in operands:
            torch._dynamo.maybe_mark_dynamic(each, [0, 2])
        expected = functional.scaled_dot_product_attention(*operands)
        torch.testing.assert_close(f(*operands), expected)
    assert operators["MultiHeadAttention"] == 1


def test_layout_of_attention_is_kept(operators: Counter[str]) -> None:
    """A view that only works for heads inside of length."""

    def joined(*args: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*args).transpose(1, 2).reshape(2, 5, 24)

    check(joined, *(each.transpose(1, 2).contiguous().transpose(1, 2) for each in qkv()))
    assert operators["MultiHeadAttention"] == 1


def test_other_attention_is_written_out(operators: Counter[str]) -> None:
    """A mask, a causal one or another dtype."""
    mask = torch.zeros(5, 7).masked_fill(torch.rand(5, 7) > 0.7, -torch.inf)
    check(lambda *a: functional.scaled_dot_product_attention(*a, attn_mask=mask), *qkv())
    check(lambda *a: functional.scaled_dot_product_attention(*a, is_causal=True), *qkv(keys=5))
    assert not operators["MultiHeadAttention"]
    assert operators["Softmax"] == 2


def test_what_nobody_reads_is_dropped(operators: Counter[str]) -> None:
    """The indices of a max pool cost a second pool."""
    check(lambda x: functional.max_pool2d(x, 2), torch.randn(1, 2, 8, 8))
    assert operators["MaxPool"] == 1
    assert not operators["Sub"]


def test_a_linear_layer_keeps_its_dimensions(operators: Counter[str]) -> None:
    """No view before the product, none after it."""
    layer = torch.nn.Linear(8, 4, bias=False)
    check(lambda x: torch.relu(layer(x)), torch.randn(2, 3, 8))
    assert operators["MatMul"] == 1
    assert not operators["Reshape"]


def test_a_product_of_another_view_stays_as_it_is(operators: Counter[str]) -> None:
    """The result takes other dimensions than the input had."""
    weight = torch.randn(8, 4)
    check(lambda x: (x.view(6, 8) @ weight).view(3, 2, 4) + 1, torch.randn(2, 3, 8))
    assert operators["Reshape"] == 2


def test_a_product_of_stacked_matrices_keeps_its_dimensions(operators: Counter[str]) -> None:
    """Torch repeats nothing and flattens both sides before it; none of that is left."""
    check(lambda a, b: (a @ b).relu(), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 4, 7))
    assert operators["MatMul"] == 1
    assert not operators["Reshape"]
    assert not operators["Expand"]


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ((6, 5, 4), (2, 3, 4, 7), (2, 3, 5, 7)),
        ((2, 3, 5, 4), (3, 2, 4, 7), (2, 3, 5, 7)),
        ((2, 3, 4, 5), (2, 3, 4, 7), (2, 3, 5, 7)),
        ((2, 3, 5, 4), (2, 3, 4, 7), (3, 2, 5, 7)),
    ],
    ids=["stack of one", "other stacks", "other matrices", "other result"],
)
def test_a_product_of_other_stacks_stays_as_it_is(operators: Counter[str], a, b, result) -> None:
    """Where the sizes before the matrices differ, or a view changes the matrices."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.view(6, 5, 4), y.view(6, 4, 7)).view(result) + 1

    check(product, torch.randn(a), torch.randn(b))
    assert operators["Reshape"] >= 2


def test_stacked_matrices_of_any_number_are_multiplied_as_they_are(operators: Counter[str]) -> None:
    """The number may change from call to call, and is the same symbol in both."""
    f = torch.compile(lambda a, b: (a @ b).relu(), backend="onnxrt", dynamic=True)
    for n in (2, 3):
        a, b = torch.randn(n, 3, 5, 4), torch.randn(n, 3, 4, 7)
        torch.testing.assert_close(f(a, b), (a @ b).relu())
    assert (operators["MatMul"], operators["Reshape"]) == (1, 0)


def test_constants_behind_a_cast_are_folded() -> None:
    """ONNX Runtime folds ``Cast``, and writes ``CastLike`` out when it is too late to."""
    f = compiled(lambda x: x + torch.full_like(torch.arange(4) * 2, 15), "onnxrt")
    torch.testing.assert_close(f(torch.zeros(4)), torch.full((4,), 15.0))
    assert last().attempts[0].engine["nodes"] == {"CPUExecutionProvider": 1}


def test_onnx_runtime_folds_no_constant_behind_cast_like(tmp_path: Path) -> None:
    """``_settle_casts`` can go when it does (microsoft/onnxruntime#17798)."""
    import onnxruntime

    model = onnx_ir.to_proto(
        onnx_ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        agraph (float[4] x) => (float[4] z) <int64[4] c = {1, 2, 3, 4}> {
            t = CastLike(c, x) s = Sin(t) z = Add(s, x)
        }
    """)
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "folded.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    folded = onnx_ir.load(options.optimized_model_filepath)
    assert [node.op_type for node in folded.graph] == ["Cast", "Sin", "Add"]


def test_a_cast_to_a_type_that_is_not_known_stays() -> None:
    """What a translation makes on its way has no type in the exporter's model."""
    model = onnx_ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        agraph (float[2] x, float16[2] y) => (float16[2] z) { t = Neg(y) z = CastLike(x, t) }
    """)
    _settle_casts(model)
    assert [node.op_type for node in model.graph] == ["Neg", "CastLike"]


@pytest.mark.parametrize(("shape", "left"), [((3, 4), 0), ((2, 6), 1)], ids=["back", "on"])
def test_views_of_views_are_one(operators: Counter[str], shape, left: int) -> None:
    """None where they lead back to the shape at the start."""
    check(lambda x: x.relu().view(12).view(4, 3).view(shape).neg(), torch.randn(3, 4))
    assert operators["Reshape"] == left


def test_a_view_that_leads_back_may_be_returned(operators: Counter[str]) -> None:
    """Beside what it is a view of: the two are results of their own."""
    f = torch.compile(lambda x: (y := x.relu(), y.view(12).view(3, 4), y + 1), backend="onnxrt")
    x = torch.randn(3, 4)
    for result, expected in zip(f(x), (x.relu(), x.relu(), x.relu() + 1), strict=True):
        torch.testing.assert_close(result, expected)
    assert operators["Relu"] == 1


def test_views_of_sizes_that_change_stay(operators: Counter[str]) -> None:
    """What is symbolic is not compared."""
    f = torch.compile(lambda x: x.relu().view(-1).view(x.shape).neg(), backend="onnxrt")
    for n in (3, 5):
        x = torch.randn(n, 4)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(f(x), -x.relu())
    assert operators["Reshape"] >= 2


def test_a_pad_by_nothing_is_left_out(operators: Counter[str]) -> None:
    """A result of its own all the same, laid out as the input."""
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    f = torch.compile(lambda x: functional.pad(x, (0, 0, 0, 0)), backend="onnxrt")
    check(lambda x: functional.pad(x, (0, 0)) + 1, x)
    assert f(x).stride() == x.stride()
    assert not operators["Pad"]


@pytest.mark.parametrize("sizes", [(0, 1), (-1, 0), (1, -1, 0, 0)], ids=str)
def test_other_pads_stay(operators: Counter[str], sizes) -> None:
    """On one side, or cutting off."""
    check(lambda x: functional.pad(x, sizes, value=2.0) + 1, torch.randn(3, 4))
    assert operators["Pad"] == 1
