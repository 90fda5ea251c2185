"""The OpenVINO engine: right where it answers, and torch's wherever OpenVINO computes otherwise."""

from __future__ import annotations

import math
import pkgutil
import tomllib
from concurrent.futures import ThreadPoolExecutor

import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import ROOT, compiled, fault_of, last, thorough, upstream

import composer
from composer import _torch
from composer.backends import openvino as backend
from composer.backends.openvino import compiled as compiling
from composer.backends.openvino import corrections, kernels, library, memory, wide
from composer.backends.openvino import model as model_module
from composer.backends.openvino.corrections import quotients
from composer.backends.openvino.model import read_model, unread_nodes, with_weights
from composer.build import BuildTerms, building
from composer.lowering.export.onnx import OnnxGraph
from composer.lowering.loaded import BoundRegion
from composer.lowering.partition import by_trial

openvino = pytest.importorskip("openvino", reason="the engine itself")
pytestmark = pytest.mark.slow

NAME = "openvino"
WIDEST = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="seen with AVX-512 only"
)
"""What is wrong without the rule need not be on other processors."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def check(function, *args, **options):
    """As eager, twice: values, dtypes, shapes, strides; returns the compiled function."""
    run = compiled(function, NAME, **options)
    for _ in range(2):
        torch.testing.assert_close(run(*args), function(*args), check_stride=True)
    assert last().chosen == NAME, last().attempts[0].message
    return run


@pytest.fixture
def engines(monkeypatch) -> list[BoundRegion]:
    """Every region that is loaded meanwhile."""
    made: list[BoundRegion] = []
    bind = by_trial.bind

    def spy(*args):
        made.append(bind(*args))
        return made[-1]

    monkeypatch.setattr(by_trial, "bind", spy)
    return made


def test_the_record_says_what_ran() -> None:
    """Version, device, precision, threads and streams, as OpenVINO says them."""
    chain = {"backend": NAME, "options": {"threads": 1}}
    compiled(mlp(), chain)(torch.randn(3, 8))
    (attempt,) = last().attempts
    assert attempt.coverage == 1.0
    assert attempt.engine == {
        "options": {"threads": 1},
        "openvino": library.version(),
        "device": "CPU",
        "precision": "f32",
        "threads": 1,
        "streams": 1,
        "keeps_nan": False,
        "artefacts": "kept",
    }
    assert openvino.__version__.startswith(library.version())


def test_works_by_itself_without_composers_chain() -> None:
    """And the name that pyproject.toml gives to Dynamo leads to it."""
    model, x = mlp(), torch.randn(3, 8)
    f = torch.compile(model, backend=backend.composer_openvino, options={"threads": 1})
    torch.testing.assert_close(f(x), model(x))
    assert composer.reports() == ()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    path = project["project"]["entry-points"]["torch_dynamo_backends"]["composer_openvino"]
    assert pkgutil.resolve_name(path) is backend.composer_openvino


def test_changed_weights_are_never_stale() -> None:
    """Written to, loaded, assigned or replaced: the very next call answers with the new ones."""
    model, x = mlp(), torch.randn(3, 8)
    f = check(model, x)
    model[0].weight.mul_(2)
    torch.testing.assert_close(f(x), model(x))
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
    torch.testing.assert_close(f(x), model(x))
    model[2].weight.data = torch.randn(4, 16)
    torch.testing.assert_close(f(x), model(x))
    model[2].weight = torch.nn.Parameter(torch.randn(4, 16))
    torch.testing.assert_close(f(x), model(x))


def test_weights_are_taken_in_where_a_graph_is_taken_in_part(engines) -> None:
    """Around an operator that stays torch's, each region is fed what is computed only."""
    up, down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    check(lambda x: torch.relu(down(torch.special.bessel_j0(up(x)))), torch.randn(3, 4))
    assert [[len(bound.keeps[0].inputs) for bound in each.bounds] for each in engines] == [[1], [1]]
    assert "bessel_j0" in last().attempts[0].engine["left_to_torch"][0]


def test_weights_are_read_where_they_lie() -> None:
    """The constants of the model that is compiled have torch's memory."""
    weight = torch.randn(2, 3, dtype=torch.bfloat16)
    graph = onnx_graph("Add", onnx.TensorProto.BFLOAT16, [2, 3])
    bound = with_weights(read_model(graph), {"b": weight})
    (constant,) = (each for each in bound.get_ops() if each.get_type_name() == "Constant")
    assert constant.data.ctypes.data == weight.data_ptr()
    assert [port.any_name for port in bound.inputs] == ["a"]


def test_an_input_keeps_its_name_where_a_node_does_nothing_to_it() -> None:
    """OpenVINO's reader calls it after the node: here after the largest of one tensor."""
    graph = onnx_graph("Max", onnx.TensorProto.FLOAT, [2, 3])
    del graph.model.graph.node[1].input[0]
    names = {each.friendly_name for each in read_model(graph).get_parameters()}
    assert names == {"a", "b"}


def onnx_graph(operator: str, kind: int, shape: list[int], names: str = "ab") -> OnnxGraph:
    """A model of a ReLU and one other node."""
    value = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("Relu", [names[0]], ["r"]),
        onnx.helper.make_node(operator, ["r", *names[1:]], ["y"]),
    ]
    inputs = [value(name, kind, shape) for name in names]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [value("y", kind, shape)])
    opsets = [onnx.helper.make_opsetid("", 18)]
    return OnnxGraph(onnx.helper.make_model(graph, opset_imports=opsets), tuple(names), ())


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x @ w) @ w.t(),
        lambda x, w: (F.linear(x, w, w[0]), x @ w, F.linear(x.relu(), w)),
        lambda x, w: (x @ w[:4].relu().mT, F.linear(x, w * 2), x @ (w * 2)),
        lambda x, w: (x @ w[None], x @ w[None].mT),
        lambda x, w: (x[:, :4] @ w[:4, :4], F.linear(x[:, :4], w[:4, :4])),
        lambda x, w: tuple(F.linear(x, half) + x @ half.mT for half in w.split(4)),
        lambda x, w: (x.view(8, 4) @ w.view(4, 16), F.linear(x.view(8, 4), w.view(16, 4))),
        lambda x, w: (F.linear(x, w), x @ w[:8], x @ (w * 1), x @ w.chunk(1)[0]),
        lambda x, w: (F.linear(x, w * torch.ones(8, 8).tril()), x @ (w * torch.ones(8, 8).tril())),
        lambda x, w: (F.linear(x, w.flip(0).clone()), x @ w.flip(0).view(8, 8)[:8]),
    ],
)
def test_a_weight_may_be_read_in_several_ways(function) -> None:
    """Transposed and as it is, for one; OpenVINO took one for the other."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    check(lambda x: function(x, weight), torch.randn(4, 8))
    again = torch.nn.Parameter(weight.data)
    check(lambda x: (x @ weight, F.linear(x, again)), torch.randn(4, 8))


def test_a_kernel_may_be_read_in_both_directions() -> None:
    """By a convolution, and by a transposed one."""
    kernel = torch.nn.Parameter(torch.randn(4, 4, 3, 3))
    both = lambda x: (F.conv2d(x, kernel), F.conv_transpose2d(x, kernel))  # noqa: E731
    check(both, torch.randn(1, 4, 6, 6))


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: a * b,
        lambda a, b: torch.cat((a[:4], b[4:])),
        lambda a, b: (a + b).sin().cos().exp().neg().tanh().exp() * a,
    ],
)
def test_what_is_made_of_two_weights_may_be_read_in_several_ways(make) -> None:
    """However far the making goes; OpenVINO folds it, and took one way for the other."""
    one, other = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8, 8))
    check(lambda x: (x @ make(one, other), F.linear(x, make(one, other))), torch.randn(4, 8))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        lambda x: torch.arange(4.0).reshape(2, 2),
        lambda x: torch.ones_like(x[:2]).triu(),
        lambda x: torch.sin(torch.arange(2.0)[:, None] + torch.linspace(0, 9, 2)),
    ],
)
def test_a_constant_that_is_read_in_several_ways_is_declined(make) -> None:
    """Nobody could pass it as an input, be it written down or made by the graph."""

    def both(x):
        constant = make(x)
        return x @ constant, F.linear(x, constant)

    x = torch.randn(4, 2)
    torch.testing.assert_close(compiled(both, NAME)(x), both(x))
    assert last().attempts[0].reason == "unsupported_op"


def test_a_constant_that_is_read_in_one_way_is_taken() -> None:
    """By two products, and one more of the same numbers in another shape."""
    table = lambda: torch.arange(16.0).reshape(4, 4)  # noqa: E731
    other = lambda: torch.linspace(0, 1, 16).reshape(4, 4)  # noqa: E731
    check(lambda x: (x @ table(), x.relu() @ table(), F.linear(x, other())), torch.randn(3, 4))


def test_a_product_of_a_constant_is_not_that_constant() -> None:
    """Though of its shape, as the keys of XLNet's relative positions are of their weight's."""
    keys = torch.nn.Linear(8, 8, bias=False)

    def function(x):
        positions = torch.outer(torch.arange(8.0), torch.arange(8.0)).sin()
        return x @ keys(positions).t()

    check(function, torch.randn(2, 3, 8))


def test_positions_that_the_graph_makes_are_a_constant() -> None:
    """As buckets of relative positions are, in int64: OpenVINO folds what is looked up there."""

    def biased(table, x):
        places = torch.arange(6)
        return x + table[(places[:, None] - places + 5).clamp(max=9)].permute(2, 0, 1)

    check(biased, torch.randn(11, 3), torch.randn(3, 6, 6))
    (attempt,) = last().attempts
    assert (attempt.coverage, attempt.engine.get("left_to_torch")) == (1.0, None)


def test_the_shape_of_a_shape_is_no_operands_memory() -> None:
    """A roll computes with dynamic sizes, and asks how many of them there are."""
    run = check(lambda x: torch.roll(x, (-2, 1), (1, 2)), torch.randn(2, 6, 7), dynamic=True)
    x = torch.randn(3, 5, 9)
    torch.testing.assert_close(run(x), torch.roll(x, (-2, 1), (1, 2)))


def test_every_dtype_goes_in_and_out() -> None:
    """By address, bfloat16 too, which numpy does not have; with fixed and with dynamic sizes."""
    masks = torch.randn(3, 4) > 0
    values = [torch.randn(3, 4).to(t) for t in (torch.float32, torch.float16, torch.bfloat16)]
    for dynamic in (False, True):
        torch.compiler.reset()
        check(
            lambda *all_of: tuple(torch.cat([x.t(), x.t()]) for x in all_of),
            *(*values, masks),
            dynamic=dynamic,
        )
        assert last().attempts[0].coverage == 1.0


def odd(scalar, nothing, gaps, turned, repeated, image, unused):
    return (
        scalar * 2 + 1,
        nothing * 2 + 1,
        gaps + 1,
        turned * 2,
        repeated * 3,
        F.conv2d(image, torch.ones(4, 3, 2, 2)),
        scalar * scalar,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_odd_inputs(dynamic: bool) -> None:
    """Strides of the results are eager's, too."""
    image = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    gaps, turned = torch.randn(3, 8)[:, ::2], torch.randn(3, 8).t()
    given = (torch.tensor(2.0), torch.zeros(0, 3), gaps, turned, torch.randn(1, 4).expand(3, 4))
    check(odd, *given, image, torch.ones(2), dynamic=dynamic)


def test_a_graph_without_inputs() -> None:
    """Nothing goes in; what comes out is new at every call."""
    run = check(lambda: torch.ones(3).cumsum(0) * 2)
    assert run().data_ptr() != run().data_ptr()


def test_magnitudes_of_what_is_the_same_at_every_call() -> None:
    """Of constants and of weights that are taken in, by themselves and beside what is computed."""
    weight = torch.nn.Linear(3, 3).weight.neg_()
    check(lambda x: (torch.arange(3.0) - 1).abs() + x, torch.zeros(3))
    check(lambda x: torch.cat([x, torch.linspace(-1, 0, 3)]).abs(), torch.tensor([-2.0]))
    check(_Distance(weight), torch.zeros(3, 3))


def test_openvino_takes_no_magnitude_of_what_is_made_of_constants(monkeypatch) -> None:
    """As of 2026.4; where it does, they need not be computed beforehand."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    run = compiled(lambda x: (torch.arange(3.0) - 1).abs() + x, NAME)
    assert run(torch.zeros(3)).tolist() == [-1, 0, 1]


class _Distance(torch.nn.Module):
    """From a weight to one."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.weight - 1).abs()


def test_nothing_is_looked_up_in_nothing() -> None:
    """OpenVINO would divide by the number of elements, which ends the process."""
    empty = torch.zeros(1, 0, 3)

    def function(x, y):
        return x.sin()[..., -1], x.exp().transpose(0, 2).clone(), y.sin()

    check(function, empty, torch.ones(3), min_coverage=0.0)


def test_a_bound_behind_what_is_not_converted_ends_nothing() -> None:
    """OpenVINO's reader wants the dtype of what it clips, and crashes where it knows of none."""
    x = torch.randn(4, 5, 10)
    check(lambda x: F.cosine_similarity(x.chunk(2)[1], x[:2], dim=-1).exp(), x)
    check(lambda x: x.chunk(2)[1].cos().clamp_min(torch.tensor(0.5)).exp(), x)


def test_results_of_dynamic_shape_keep_their_memory() -> None:
    """It was OpenVINO's, and no later call writes to it."""
    run = compiled(lambda x: x * 2, NAME, dynamic=True)
    ones = torch.ones(3, 4)
    first = run(ones)
    run(torch.zeros(3, 4))
    run(torch.zeros(5, 4))
    torch.testing.assert_close(first, ones * 2)
    assert len(composer.reports()) == 1


def test_results_of_fixed_shape_are_computed_of_dynamic_sizes() -> None:
    """OpenVINO knows the sizes, and takes no memory of others."""
    check(lambda x: torch.relu(x.reshape(2, 12)), torch.randn(2, 3, 4), dynamic=True)


def test_dimensions_that_are_one_are_named() -> None:
    """OpenVINO compiles no result of a rank that is not said."""
    check(lambda x: torch.relu(x.squeeze()) * 2, torch.randn(1, 3, 1, 4), dynamic=True)


def test_numbers_beyond_32_bits_are_not_computed_with() -> None:
    """The eager fallback answers such a call, as any that an engine fails."""
    run = compiled(lambda x, n: x * n, NAME, dynamic=True)
    x = torch.randn(5)
    torch.testing.assert_close(run(x, 7), x * 7)
    with pytest.warns(composer.errors.FallbackWarning):
        torch.testing.assert_close(run(x, 2**40), x * 2**40)
    assert "32 bits" in str(last().runtime.last_error)


def test_threads_call_one_engine_at_once() -> None:
    """Each has a request of its own."""
    model = mlp()
    f = compiled(model, NAME)
    inputs = [torch.randn(3, 8) for _ in range(32)]
    f(inputs[0])

    def work(x):
        with torch.no_grad():
            return f(x)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, inputs))
    torch.testing.assert_close(results, [model(x) for x in inputs])


def test_rows_that_are_masked_everywhere_give_zeros() -> None:
    """As in eager: the padding on the left of a batch."""
    query = torch.randn(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    check(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), query, mask)
    check(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), query)
    check(lambda q: F.scaled_dot_product_attention(q, q, q), query)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_arithmetic", [True, False])
def test_masked_rows_and_shared_heads_are_taken_in_half_precision(
    dtype, has_arithmetic, monkeypatch
) -> None:
    """Whatever the processor computes in bfloat16: the reader has no other translation of them."""
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: has_arithmetic)
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    query, key = torch.randn(1, 4, 4, 8, dtype=dtype), torch.randn(1, 2, 4, 8, dtype=dtype)

    def both(q, k, mask):
        masked = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return masked, F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    run = compiled(both, NAME, min_coverage=1.0)
    torch.testing.assert_close(run(query, key, mask), both(query, key, mask), rtol=2e-2, atol=2e-2)
    assert last().chosen == NAME


WIDE = torch.tensor([2**31 + 5, 2**53 + 1, -(2**40) - 3])
ODD = torch.tensor([2**24 + 1, -(2**31), 7], dtype=torch.int32)
NAN = torch.tensor([[math.inf, math.nan, 1.0]])

OTHERWISE = {
    "int64 in 32 bits": (lambda x: x + 1, WIDE),
    "int64 even to be moved": (lambda x: torch.cat([x, x]), WIDE),
    "int32 in single precision": (lambda x: x == x - 1, ODD),
    "int8 stops": (lambda x: x + x, torch.tensor([100], dtype=torch.int8)),
    "uint8 stops": (lambda x: x * 3, torch.tensor([100], dtype=torch.uint8)),
    "float64 in single precision": (lambda x: x + x, torch.tensor([1e300], dtype=torch.float64)),
    "the extreme of infinities": (lambda x: x.amax(-1), torch.full((1, 4), -math.inf)),
    "the largest of infinities": (lambda x: x.max(), torch.full((4,), -math.inf)),
    "the smallest of infinities": (lambda x: x.min(-1).values, torch.full((1, 4), math.inf)),
    "where the largest of infinities is": (
        lambda x: F.max_pool1d(x, 2, return_indices=True)[1],
        torch.full((1, 4), -math.inf),
    ),
    "maximum of NaN": (lambda x: torch.maximum(x, x.t()), NAN),
    "the order of NaN": (lambda x: x.sort(descending=True).values, NAN),
    "the greatest two and NaN": (lambda x: x.topk(2).values, NAN),
    "the truth of NaN": (torch.logical_not, NAN),
    "the truth of NaN beside others": (lambda x: x[:, 1:].all(1), NAN),
    "the truth of a NaN": (lambda x: x[:, 1:2].any(1), NAN),
    "a rest of tenths": (lambda x: torch.fmod(x, 0.1), torch.arange(100) / 10.0),
    "a rest by infinity": (lambda x: torch.fmod(x, math.inf), torch.ones(3)),
    "the average of a window that ends in no padding": (
        lambda x: F.avg_pool1d(x, 3, padding=1, ceil_mode=True),
        torch.ones(1, 2, 9),
    ),
}


SMALL = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64)


def squared(x: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(x, x)


COUNTED = {
    "moved": lambda x: x.t().reshape(-1),
    "converted": lambda x: x.float() + 1,
    "beside floats": lambda x: torch.ones(4, 64) * x,
    "cut to integers": lambda x: torch.clamp(x.float() * 0.37, -128, 127).to(torch.int8),
    "within its dtype": lambda x: torch.clamp(x.float() * 3, -128, 127).to(torch.int8),
    "made unsigned": lambda x: (x.to(torch.int32) + 128).to(torch.uint8),
    "a sum": lambda x: x.sum(1, dtype=torch.int32),
    "a product": lambda x: torch._int_mm(x, x.t()),
    "a square": lambda x: squared(x.repeat(64, 1)[:64, :64]),
    "a long product that ends in floats": lambda x: (
        torch._int_mm(x.repeat(1, 50), x.t().repeat(50, 1)).float() * 0.1
    ),
}


@pytest.mark.parametrize("function", COUNTED.values(), ids=COUNTED)
def test_integers_that_float32_holds_are_taken(function) -> None:
    """All of these numbers and sums are exact, and none leaves its dtype."""
    check(function, SMALL)
    assert last().attempts[0].coverage == 1.0, left_by(last())


NOT_COUNTED = {
    "a conversion that wraps": (lambda x: (x * 2.0).to(torch.int8), SMALL),
    "a sum that wraps": (lambda x: x + x, SMALL),
    "a long product": (
        lambda x: torch._int_mm(x.repeat(1, 50), x.t().repeat(50, 1)),
        SMALL,
    ),
    "an int32 of any size": (lambda x: x + 1, ODD),
    "memory of another dtype": (lambda x: x.view(torch.int32) * 1, SMALL),
    "a small integer of an unknown operator": (lambda x: torch.bitwise_and(x, 3), SMALL),
}


@pytest.mark.parametrize("case", NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_integers_that_may_be_rounded_or_wrap_stay_torchs(case) -> None:
    """Their ranges are too wide, or unknown."""
    function, x = case
    found = compiled(function, NAME, min_coverage=0.0)(x)
    assert torch.equal(found, function(x))
    assert any("otherwise" in each for each in left_by(last()))


def left_by(report: composer.CompileReport) -> list[str]:
    """What torch runs of a graph, or why the engine takes none of it."""
    (attempt,) = report.attempts
    return [*attempt.engine.get("left_to_torch", ()), attempt.message]


def test_a_scale_is_divided_as_in_eager() -> None:
    """The largest number of a row lies halfway between two integers after it was scaled."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        largest = torch.clamp(x.abs().amax(-1, keepdim=True), min=1e-5)
        return torch.round(x * (1.0 / (largest / 127.5)))

    assert torch.equal(compiled(rounded, NAME)(x), rounded(x))
    assert last().attempts[0].coverage == 1.0


@upstream
def test_a_quotient_is_still_a_product(monkeypatch) -> None:
    """When this fails, ``quotients`` can go."""
    monkeypatch.setattr(quotients, "_AS_IT_IS", "nothing")
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = compiled(lambda x: torch.round(x / 127.5 * 1e7), NAME)(x)
    with fault_of("openvino"):
        assert not torch.equal(found, torch.round(x / 127.5 * 1e7))


def test_number_in_float64_is_read_in_single_precision() -> None:
    """As torch does, beside tensors in float32."""
    number = torch.tensor(0.1, dtype=torch.float64)
    check(lambda x, n: (x * n + n, x / n), torch.randn(3), number)


@pytest.mark.parametrize("case", OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_computed_otherwise_stays_torchs(case, monkeypatch) -> None:
    """Without the rule OpenVINO gives other numbers; where it does not, the rule can go."""
    function, x = case
    compiled(function, NAME)(x)
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_op")
    monkeypatch.setattr(kernels, "_inexact", lambda node, weights: None)
    monkeypatch.setattr(kernels, "_otherwise", lambda node: None)
    monkeypatch.setattr("composer.lowering.export.onnx.why_unsupported", lambda *given: None)
    torch.compiler.reset()
    wrong = compiled(function, NAME)(x)
    assert last().chosen == NAME, last().attempts[0].message
    assert not torch.allclose(wrong.double(), function(x).double(), equal_nan=True)


COMPARISONS = (torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne)


def compared(x, y):
    """Numbers with one another and with zero, also as masks and as numbers."""
    masks = [f(a, b) for f in COMPARISONS for a, b in ((x, y), (x, 0.0), (x * 2, y + 1))]
    chosen = [torch.where(f(x, y), x * 2, y * 3) for f in COMPARISONS]
    return masks, chosen, (x > y) & (y >= x), (x >= y).float() * 2, torch.sign(x)


def test_nothing_is_greater_than_nan() -> None:
    """Neither is it greater than anything."""
    x, y = torch.tensor([[1, -1, math.nan, 0, math.nan, 2], [0, 0, 0, math.nan, math.nan, 2.0]])
    run = compiled(compared, NAME)
    torch.testing.assert_close(run(x, y), compared(x, y), equal_nan=True)
    assert (last().chosen, last().attempts[0].coverage) == (NAME, 1.0)


def test_nan_is_not_zero_to_a_norm() -> None:
    """The count of what is not zero, along a dimension and of all."""
    x = torch.tensor([[1, math.nan, 0, 2], [0, 0, math.nan, -0.0]])

    def norms(x):
        return torch.linalg.vector_norm(x, 0, 1), x.norm(0), torch.linalg.vector_norm(x * 2, 0)

    torch.testing.assert_close(compiled(norms, NAME)(x), norms(x))
    assert (last().chosen, last().attempts[0].coverage) == (NAME, 1.0)


@WIDEST
@pytest.mark.parametrize("compare", [torch.gt, torch.ge])
def test_openvino_takes_nan_for_greater(compare, monkeypatch) -> None:
    """As of 2026.4; where it does not any more, comparisons need not be turned."""
    monkeypatch.setattr(corrections, "ALWAYS", ())
    assert compiled(lambda x: compare(x, 0.0), NAME)(torch.full((4,), math.nan)).all()


def test_positions_are_taken_although_they_are_int64() -> None:
    """A position in a tensor fits into 32 bits."""
    image = torch.randn(1, 2, 4, 4)
    image[0, 0, 0] = -math.inf
    check(lambda x: (x.argmax(-1), x.max(-1).indices, x.min(1).indices), image)
    assert last().attempts[0].coverage == 1.0


class Table(torch.nn.Module):
    """A bias looked up by positions that are a buffer, as in windowed attention."""

    def __init__(self, positions: list[int]) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, 3))
        self.register_buffer("at", torch.tensor(positions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table[self.at]).relu()


def test_a_table_is_looked_up_by_a_buffer() -> None:
    """Whatever it becomes: positions that are there, and others, for which eager raises."""
    model, x = Table([4, 0, 4, 2]), torch.randn(2, 4, 3)
    run = check(model, x)
    assert last().attempts[0].coverage == 1.0
    model.at.copy_(torch.tensor([1, 1, 3, 0]))
    torch.testing.assert_close(run(x), model(x))
    assert last().runtime.fallbacks == 0
    model.at[0] = 5
    with pytest.raises(IndexError):
        model(x)
    with pytest.raises(IndexError, match="5"):
        run(x)


@pytest.mark.parametrize("positions", [[-1, 0, 1, -5], [0, 1, 2, 2**32 + 1]])
def test_positions_that_are_none_for_openvino_stay_torchs(positions: list[int]) -> None:
    """Those that count from the end; the others are eager's to complain of."""
    model, x = Table(positions), torch.randn(2, 4, 3)
    run = compiled(model, NAME)
    if positions[-1] < 0:
        torch.testing.assert_close(run(x), model(x))
        assert "aten.index.Tensor" in last().attempts[0].engine["left_to_torch"][0]
    else:
        with pytest.raises(IndexError):
            run(x)


def test_positions_are_looked_at_in_each_call_where_they_are_not_bound() -> None:
    """Weights of modules that die young are passed at every call."""
    run, x = compiled(lambda model, x: model(x), NAME), torch.randn(2, 4, 3)
    for _ in range(6):
        model = Table([4, 0, 4, 2])
        torch.testing.assert_close(run(model, x), model(x))
    assert [report.runtime.fallbacks for report in composer.reports()] == [0]
    with pytest.raises(IndexError, match="5"):
        run(Table([0, 1, 2, 5]), x)


class Embedded(torch.nn.Module):
    """An embedding by positions that some function makes of the input."""

    def __init__(self, positions=lambda x: x) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 6, padding_idx=0)
        self.positions = positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(self.positions(x)).relu()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_an_embedding_by_positions_from_outside_is_taken(shift: int, dynamic: bool) -> None:
    """The input's own, or what torch makes of it; for one that is none it raises as eager does."""
    model = Embedded(lambda x: x + shift if shift else x)
    run = check(model, torch.tensor([[1, 0, 8], [4, 4, 2]]), dynamic=dynamic, min_coverage=0.0)
    left = last().attempts[0].engine.get("left_to_torch", [])
    assert not any("embedding" in line for line in left)
    for wrong in (10, -2, 2**32):
        with pytest.raises(IndexError, match="out of range in self"):
            run(torch.tensor([[1, 0, 8], [wrong, 4, 2]]))
    right = torch.tensor([[7, 7, 0], [0, 3, 1]])
    torch.testing.assert_close(run(right), model(right))
    assert (last().chosen, last().runtime.fallbacks) == (NAME, 0)


@pytest.mark.parametrize(
    ("positions", "x"),
    [
        (lambda x: x.relu().argmax(-1), torch.randn(3, 10)),
        (lambda x: x, torch.tensor([3, 1], dtype=torch.int32)),
    ],
)
def test_an_embedding_by_other_positions_stays_torchs(positions, x) -> None:
    """Those that the engine itself computes cannot be looked at; int32 may be rounded."""
    model = Embedded(positions)
    run = compiled(model, {"backend": NAME, "min_coverage": 0.0})
    torch.testing.assert_close(run(x), model(x))
    left = last().attempts[0].engine["left_to_torch"]
    assert any("aten.embedding" in line for line in left)


@upstream
def test_openvino_does_not_complain_of_a_position_that_is_not_there(monkeypatch) -> None:
    """Which is why they are looked at; the day it does, that can go."""
    monkeypatch.setattr(compiling, "require_within", lambda positions, size: None)
    model, x = Table([4, 0, 4, 2]), torch.randn(2, 4, 3)
    run = check(model, x)
    model.at[0] = 5
    run(x)
    assert last().runtime.fallbacks == 0


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_interpolation_is_taken(mode, dynamic) -> None:
    """Torch writes it out by positions of int64, which are all there."""
    scale = lambda x: F.interpolate(x, scale_factor=1.5, mode=mode)  # noqa: E731
    run = check(scale, torch.randn(2, 3, 4, 6), dynamic=dynamic, min_coverage=0.0)
    lines = last().attempts[0].engine.get("left_to_torch", ())
    assert not any("index" in line for line in lines)
    if mode == "nearest" and not dynamic:
        assert last().attempts[0].coverage == 1.0
    x = torch.randn(2, 3, 4, 6)
    x[0, 0, :2, :2] = torch.tensor([[math.inf, -0.0], [math.nan, torch.finfo().max]])
    if "nearest" in mode:
        torch.testing.assert_close(run(x), scale(x), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(run(x).signbit(), scale(x).signbit())


def test_the_largest_of_minus_infinity_is_minus_infinity() -> None:
    """In a pool; OpenVINO's own starts from the lowest finite number."""
    x = torch.full((1, 8, 4, 4), float("-inf"))
    check(lambda x: F.max_pool2d(x + 1, 2), x)
    assert last().attempts[0].coverage == 1.0


GATED = """
import sys, composer, torch, torch.nn.functional as F
from composer.backends.openvino import compiled
if "unguarded" in sys.argv:
    compiled.has_gate = lambda read: False
torch.set_num_threads(1)
gate, up = (torch.nn.Linear(256, 1024, bias=False) for _ in range(2))
down = torch.nn.Linear(1024, 256, bias=False)
layer = lambda x: down(F.silu(gate(x)) * up(x))
options = {"chain": ["openvino"], "precision": "bf16"}
run = torch.compile(layer, backend="composer", options=options)
with torch.no_grad():
    x = torch.randn(2, 4, 256)
    torch.testing.assert_close(run(x), layer(x))
(attempt,) = composer.reports()[-1].attempts
assert attempt.engine["precision"] == "f32", attempt
"""


def test_a_gated_layer_is_in_float32_by_one_thread(run_python) -> None:
    """In bfloat16 compiling it ends the process; the rule may go when it does not (2026.4)."""
    done = run_python(GATED)
    assert done.returncode == 0, done.stderr
    if torch.cpu._is_amx_tile_supported():
        assert run_python(GATED, "unguarded").returncode < 0


@pytest.mark.parametrize("threads", [1, 2])
def test_gates_are_told_from_norms(threads: int) -> None:
    """What lowers the precision of a model for one thread is only what has to."""
    gate, up, down = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def gated(x):
        return down(F.gelu(gate(x)) * up(x))

    def normed(x):
        x = gate(x).relu()
        return down(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    for function, has_gate in ((gated, True), (normed, False)):
        options = {"threads": threads, "precision": "bf16"}
        torch.compiler.reset()
        compiled(function, {"backend": NAME, "options": options})(torch.randn(3, 8))
        said = last().attempts[0].engine["precision"]
        lowered = _torch.processor.multiplies_bf16() and not (has_gate and threads == 1)
        assert said == ("bf16" if lowered else "f32")


PADDED = """
import sys, composer, torch, torch.nn.functional as F
from composer.backends.openvino import kernels
if "unguarded" in sys.argv:
    kernels._RULES = ()
pool = lambda x: F.max_pool2d(x + 1, 2, 2, 1, ceil_mode=True) * 2
options = {"chain": ["openvino"], "min_coverage": 0.0}
run = torch.compile(pool, backend="composer", dynamic=True, options=options)
with torch.no_grad():
    for more in range(3):
        x = torch.randn(2, 3, 7 + more, 8 + more)
        torch.testing.assert_close(run(x), pool(x))
sys.exit(any(each.chosen != "openvino" for each in composer.reports()))
"""


def test_padded_pools_of_dynamic_sizes_are_torchs(run_python) -> None:
    """With ``ceil_mode`` OpenVINO (2026.4) ends the process, or says that there is no output.

    The rule may go when it does neither.
    """
    done = run_python(PADDED)
    assert done.returncode == 0, done.stderr
    assert run_python(PADDED, "unguarded").returncode != 0


LARGE = """
import sys, composer, torch, torch.nn.functional as F
from composer.backends.openvino import kernels
if "unguarded" in sys.argv:
    kernels._RULES = ()
pool = lambda x: getattr(F, sys.argv[1])(x.relu() + 1, 12, ceil_mode=True) * 2
run = torch.compile(
    pool, backend="composer", dynamic=True, options={"chain": ["openvino"]}
)
with torch.no_grad():
    for size in (13, 7):
        x = torch.randn(2, 3, size, size + 1)
        torch.testing.assert_close(run(x), pool(x))
report = composer.reports()[-1]
print(report.attempts[0].engine.get("left_to_torch"))
sys.exit(report.chosen != "openvino" or report.runtime.fallbacks)
"""


@pytest.mark.parametrize("pool", ["max_pool2d", *thorough("avg_pool2d")])
def test_windows_that_may_be_larger_than_a_dynamic_size_are_torchs(run_python, pool: str) -> None:
    """EfficientNet's one window over all is; OpenVINO (2026.4) refuses it or ends the process."""
    done = run_python(LARGE, pool)
    assert done.returncode == 0, done.stderr
    assert "larger than a dynamic size" in done.stdout
    assert run_python(LARGE, pool, "unguarded").returncode != 0


@pytest.mark.parametrize("convolve", [F.conv1d, F.conv_transpose1d])
def test_kernels_of_dynamic_sizes_are_torchs(convolve, monkeypatch) -> None:
    """OpenVINO takes no model with one; the rest is taken."""

    def correlate(x, template):
        return torch.tanh(convolve(x * 2, template.sin())) + 1

    signals = torch.randn(1, 4, 9), torch.randn(4, 4, 3)
    check(correlate, *signals, dynamic=True, min_coverage=0.0)
    (attempt,) = last().attempts
    assert "kernels of dynamic sizes" in attempt.engine["left_to_torch"][0]
    monkeypatch.setattr(kernels, "_RULES", ())
    torch.compiler.reset()
    compiled(correlate, NAME, dynamic=True, min_coverage=0.0)(*signals)
    assert last().attempts[0].reason == "build_failed"


def test_a_kernel_of_one_place_keeps_its_padding(monkeypatch) -> None:
    """Where it leaves places out, and behind what is computed for each element."""
    signal, kernel = torch.randn(2, 2, 9), torch.randn(4, 2, 1)
    convolve = lambda x, **how: F.conv1d(x.relu(), kernel, stride=2, **how).mean(-1)  # noqa: E731
    padded = lambda x: convolve(x, padding=1)  # noqa: E731
    check(convolve, signal)
    assert last().attempts[0].coverage == 1.0
    check(padded, signal, min_coverage=0.0)
    assert "the padding is counted" in last().attempts[0].engine["left_to_torch"][0]
    monkeypatch.setattr(kernels, "_RULES", ())
    torch.compiler.reset()
    with composer.using({"cache": {"artefacts": 0}}):  # else the graph is found as it was
        assert not torch.allclose(compiled(padded, NAME)(signal), padded(signal))
    assert last().chosen == NAME


def test_a_batch_norm_is_taken_although_results_that_nobody_reads_are_empty() -> None:
    """In inference torch's operator returns statistics without elements."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    check(model.eval(), torch.randn(1, 2, 6, 6))
    assert last().attempts[0].coverage == 1.0


def test_nodes_that_are_not_converted_are_found_by_the_reader() -> None:
    """Asked of OpenVINO itself: it has no list that could be read."""
    graph = onnx_graph("Unheard", onnx.TensorProto.FLOAT, [2], "a")
    assert unread_nodes(graph) == {1: "OpenVINO does not convert Unheard"}
    assert unread_nodes(onnx_graph("Add", onnx.TensorProto.FLOAT, [2])) == {}
    with pytest.raises(RuntimeError, match="Unheard"):
        read_model(graph)


def test_what_the_reader_refuses_stays_torchs() -> None:
    """Named, with the rest of the graph taken; it has no determinant."""
    check(lambda x: torch.relu(x) * torch.linalg.det(x), torch.randn(4, 4))
    (line,) = last().attempts[0].engine["left_to_torch"]
    assert line.startswith("aten._linalg_det.default (OpenVINO does not convert Det)")


def test_what_the_reader_refuses_in_one_of_two_equal_parts_stays_torchs() -> None:
    """Both are one model, and each has nodes of its own names."""

    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.relu(x @ w) * torch.linalg.det(x)
            x = torch.maximum(x, w)
        return x

    check(twice, torch.randn(4, 4), torch.randn(4, 4), min_coverage=0.0)
    left = [each.partition(" at ")[0] for each in last().attempts[0].engine["left_to_torch"]]
    assert left == [
        "aten._linalg_det.default (OpenVINO does not convert Det)",
        "aten.maximum.default (NaN gets lost)",
    ]


@pytest.mark.parametrize(
    "function",
    [lambda x, n: (x * 2).roll(n, 0).relu(), lambda x, n: (x.abs() ** (n / 2)).relu()],
    ids=["a roll", "a power"],
)
def test_what_the_exporter_breaks_at_stays_torchs(function) -> None:
    """A number that varies where it wants a constant; the rest of the graph is taken."""
    run = check(function, torch.randn(8, 4), 3, dynamic=True, min_coverage=0.0)
    (line,) = last().attempts[0].engine["left_to_torch"]
    assert "the exporter fails" in line
    x = torch.randn(5, 4)
    torch.testing.assert_close(run(x, 2), function(x, 2))


def test_a_view_that_the_folding_breaks_at_stays_torchs() -> None:
    """As many parts as there are is not known beforehand; what is computed with them is taken."""
    parts = lambda x: [each.relu() for each in (x * 2).chunk(3)]  # noqa: E731
    check(parts, torch.randn(8, 4), dynamic=True)
    assert last().attempts[0].coverage == 1.0


def test_training_is_declined(monkeypatch) -> None:
    """OpenVINO loses NaN on its way, by which a training that went wrong is known.

    That is known before anything is compiled.
    """
    monkeypatch.delattr("composer.lowering.compile.compile_functional")
    model, x = mlp(), torch.randn(3, 8)
    with torch.enable_grad():
        compiled(model, NAME)(x).sum().backward()
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "training_graph")
    assert model[0].weight.grad is not None


def test_nan_gets_lost_in_activations() -> None:
    """Documented, and the reason why training is declined; once it is kept, say so there."""
    run = compiled(lambda x: torch.relu(x) + 1, NAME)
    assert run(torch.tensor([math.nan])) == 1


def test_precision_is_that_of_the_build_or_of_the_option(monkeypatch) -> None:
    """The policy's allowance, the candidate's own word, and float32 by default."""
    asked = []
    core = library.core()

    class Spy:
        def compile_model(self, model, device, config):
            asked.append(config.get("INFERENCE_PRECISION_HINT"))
            return core.compile_model(model, device, config)

        def __getattr__(self, name):
            return getattr(core, name)

    monkeypatch.setattr(library, "core", Spy)
    x = torch.randn(2, 8)
    for options in ({}, {"precision": "bf16"}, {"precision": "default"}):
        torch.compiler.reset()
        compiled(mlp(), {"backend": NAME, "options": options})(x)
    torch.compiler.reset()
    with building(BuildTerms(precision="bf16")):
        torch.compile(mlp(), backend=backend.composer_openvino)(x)
    assert asked == ["f32", "bf16", None, "bf16"]


def test_policys_precision_reaches_openvino() -> None:
    """It is told, and given the graph as it is: no weight is rounded for it."""
    model, x = mlp(), torch.randn(4, 8)
    run = compiled(model, NAME, precision="bf16")
    torch.testing.assert_close(run(x), model(x), atol=0.05, rtol=0.05)
    engine = last().attempts[0].engine
    assert (last().chosen, engine["products_in_bf16"]) == (NAME, 2)
    said = {True: "bf16", False: "f32"}[_torch.processor.multiplies_bf16()]
    assert engine["precision"] == said


class Residual(torch.nn.Module):
    """Each of eight layers adds a five-hundredth of what it is given; a product ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(9))
        for layer in self.layers:
            torch.nn.init.eye_(layer.weight).data.mul_(0.002)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *layers, last = self.layers
        given = x
        for layer in layers:
            x = x + layer(x)
        return last(x - given)


class Block(torch.nn.Module):
    """Two convolutions, products with a bias, a residual sum, a layer norm, divided scores."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.convolution(self.convolution(x)) / 3.0 - 1.0)
        return self.norm(x + self.linear(x.relu()))


def test_what_is_marked_to_stay_in_float32(monkeypatch) -> None:
    """Whatever this processor has."""
    marked = []

    def spy(read, bound):
        found = wide.in_float32(read, bound)
        for node in found.get_ordered_ops():
            if any(key.startswith(("precise", "Disable")) for key in node.get_rt_info()):
                marked.append(node.get_type_name())
        return found

    monkeypatch.setattr(model_module, "in_float32", spy)
    monkeypatch.setattr(model_module, "multiplies_bf16", lambda: True)
    compiled(Block(), NAME, precision="bf16")(torch.randn(2, 8, 8))
    assert last().chosen == NAME
    assert marked == ["Convolution", "Add", "MVN"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_stay_in_float32_where_products_are_in_bfloat16(dynamic: bool) -> None:
    """As in every other engine: what a layer adds to a large number is not lost."""
    model, x = Residual(), torch.full((2, 8), 256.0)
    found = compiled(model, NAME, precision="bf16", dynamic=dynamic)(x)
    assert last().chosen == NAME
    torch.testing.assert_close(found, model(x), rtol=0.02, atol=0)


class Differences(torch.nn.Module):
    """Of neighbours, by a convolution; and a product behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(1, 1, 2, bias=False)
        self.convolution.weight.data[:] = torch.tensor([-1.0, 1.0])
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.convolution(x))


def test_what_a_convolution_reads_of_an_input_is_not_rounded() -> None:
    """Small differences of large numbers are there."""
    model, x = Differences(), (256 + torch.arange(17) / 8).expand(2, 1, 17).contiguous()
    found = compiled(model, NAME, precision="bf16")(x)
    assert last().chosen == NAME
    torch.testing.assert_close(found, model(x), rtol=0.02, atol=0.02)


@upstream
def test_openvino_loses_what_is_added_to_large_numbers(monkeypatch) -> None:
    """Unless it is told; ``in_float32`` may go when it does not any more (2026.4 does)."""
    if not _torch.processor.multiplies_bf16():
        pytest.skip("computed in float32 here")
    monkeypatch.setattr(model_module, "in_float32", lambda read, weights: read)
    model, x = Residual(), torch.full((2, 8), 256.0)
    found = compiled(model, NAME, precision="bf16")(x)
    assert (found < 0.5 * model(x)).all()


LEAST = torch.finfo(torch.float32).min


def added(q, k, v, seen, mask):
    """The mask as it is given."""
    return torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v


def scaled(q, k, v, seen, mask):
    """The mask by a product, as many models make it."""
    return torch.softmax(q @ k.mT * 0.3 + (1 - seen) * LEAST, -1) @ v


def in_two_sums(q, k, v, seen, mask):
    """The mask behind a bias."""
    return torch.softmax(q @ k.mT + (mask + 0.5), -1) @ v


def by_torch(q, k, v, seen, mask):
    """By torch's own operator, which asks a mask for its infinities."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(1 - seen) * LEAST)


def by_truths(q, k, v, seen, mask):
    """By torch's own operator, of which a row that sees nothing is zeros."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen > 0)


def by_infinity(q, k, v, seen, mask):
    """The same, with the infinities written out."""
    hidden = torch.where(seen > 0, 0.0, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)


def attend(function, *, dynamic: bool) -> torch.Tensor:
    """How far off it is with rows that are masked everywhere, which the first inputs had not."""
    run = compiled(function, NAME, dynamic=dynamic, precision="bf16")
    seen = torch.ones(2, 1, 16, 16).tril()
    q, k, v = torch.randn(3, 2, 3, 16, 8)
    run(q, k, v, seen, (1 - seen) * LEAST)
    seen[0, :, :, :5] = 0
    given = q, k, v, seen, (1 - seen) * LEAST
    return (run(*given) - function(*given)).abs().max()


MASKED = (added, scaled, in_two_sums, by_torch, by_truths, by_infinity)


@pytest.mark.parametrize("function", MASKED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_that_are_masked_everywhere_are_finite_in_bfloat16(function, dynamic: bool) -> None:
    """Where the least number of float32 is minus infinity."""
    assert attend(function, dynamic=dynamic) < 0.05
    assert last().chosen == NAME


def test_nothing_masked_is_nothing_added_in_bfloat16() -> None:
    """Where the kernel of several operations is not used, which keeps such a product in float32."""

    def heads(q, k, v, bias, seen):
        q, k, v = (x.unflatten(-1, (4, 4)).transpose(1, 2) for x in (q, k, v))
        return torch.softmax(q @ k.mT + bias + (1 - seen) * LEAST, -1) @ v

    given = *torch.randn(3, 4, 4, 16), torch.randn(4, 4, 4), torch.ones(4, 1, 1, 4)
    found = compiled(heads, NAME, precision="bf16")(*given)
    assert (found - heads(*given)).abs().max() < 0.05


def test_infinite_masks_stay_infinite_in_bfloat16() -> None:
    """A row that is masked so everywhere gives zeros."""
    mask = torch.ones(2, 1, 16, 16).tril().log()
    mask[0, :, :4] = -torch.inf
    q, k, v = torch.randn(3, 2, 3, 16, 8)
    found = compiled(F.scaled_dot_product_attention, NAME, precision="bf16")(q, k, v, mask)
    assert not found[0, :, :4].any()
    assert found[0, :, 4:].all()


@upstream
def test_openvino_rounds_the_least_number_to_an_infinity(monkeypatch) -> None:
    """The bounds may go when it does not any more (2026.4 does)."""
    if not _torch.processor.multiplies_bf16():
        pytest.skip("computed in float32 here")
    monkeypatch.setattr(corrections, "IN_BFLOAT16", ())
    assert attend(added, dynamic=True).isnan()


def test_another_precision_than_single_is_refused(monkeypatch) -> None:
    """What was compiled is asked, not what it was told."""
    monkeypatch.setattr(compiling, "_precision", lambda compiled: "bf16")
    compiled(mlp(), NAME)(torch.randn(2, 8))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("failed", "wrong_provider")
    assert attempt.message == "asked OpenVINO to compute in f32, and it computes in bf16"


def test_a_device_that_is_not_here_is_unavailable() -> None:
    """With what OpenVINO finds."""
    compiled(mlp(), {"backend": NAME, "options": {"device": "NPU.3"}})(torch.randn(2, 8))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("unavailable", "no_device")
    assert "no device 'NPU.3' here (it finds CPU" in attempt.message


def test_one_model_is_made_for_it_and_for_onnx_runtime(monkeypatch) -> None:
    """Where both take the same of a graph: GELU and attention are said alike."""
    made = []
    translate = _torch.exporter.OnnxTranslator.translate

    def count(self, gm):
        made.append(gm)
        return translate(self, gm)

    tries = iter([RuntimeError("the first engine does not run")])

    def fail_once(*_):
        for error in tries:
            raise error

    monkeypatch.setattr(_torch.exporter.OnnxTranslator, "translate", count)
    monkeypatch.setattr("composer.lowering.compile.try_once", fail_once)
    model, x = torch.nn.Sequential(mlp(), torch.nn.GELU()), torch.randn(2, 8)
    torch.testing.assert_close(compiled(model, NAME, "onnxrt")(x), model(x))
    assert [attempt.status for attempt in last().attempts] == ["failed", "succeeded"]
    assert len(made) == 1


def test_properties_are_handed_on() -> None:
    """In front of those that composer sets itself."""
    options = {"config": {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": "2"}, "threads": 2}
    compiled(mlp(), {"backend": NAME, "options": options})(torch.randn(2, 8))
    assert last().attempts[0].engine["streams"] == 2


def test_a_copy_is_compiled_and_the_model_stays_as_it_was() -> None:
    """So that it can be compiled again with other weights."""
    model = read_model(onnx_graph("Add", onnx.TensorProto.FLOAT, [2]))
    with_weights(model, {"b": torch.ones(2)})
    assert len(model.inputs) == 2


@pytest.mark.parametrize("dims", [None, ()], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_mean_of_all_without_axes_is_taken(dims, keepdim: bool) -> None:
    """OpenVINO reads no reduction without them, and failed or left it to torch."""

    def mean(x):
        return (x * 2).mean(dim=dims, keepdim=keepdim)

    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(mean, "openvino")(x), mean(x))
    assert last().attempts[0].coverage == 1.0, last().attempts[0].message
    assert last().chosen == "openvino"


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_what_openvino_was_given_can_still_be_resized(dynamic: bool) -> None:
    """Inputs, weights, and outputs in torch's memory; FSDP resizes weights to nothing and back."""
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    outputs = compiled(model, NAME)(x)
    assert last().chosen == NAME
    for each in (x, model.weight, *(() if dynamic else (outputs,))):
        assert each.untyped_storage().resizable()


def test_a_tensor_of_another_dtype_is_refused() -> None:
    """Its memory would be read as what it is not."""
    feed = memory.feed_for(torch.float32)
    with pytest.raises(TypeError, match=r"compiled for torch\.float32, and this is torch\.float64"):
        feed(torch.ones(2, dtype=torch.float64))


def test_a_tensor_that_is_negated_lazily_is_negated() -> None:
    """Its memory has the other sign."""
    feed = memory.feed_for(torch.float32)
    assert feed(torch._neg_view(torch.ones(2))).data.tolist() == [-1, -1]


LOSES_NAN = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardsigmoid": F.hardsigmoid,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "clamp": lambda x: x.clamp(-1, 1),
    "hardtanh": F.hardtanh,
    "celu": F.celu,
    "exp": torch.exp,
    "several": lambda x: F.softmax(F.relu(x * 2).clamp(max=3) + 1, 0).sum(-1),
    "behind a layer": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(),
    "pool behind relu": lambda x: F.max_pool2d(x.relu().view(1, 2, 4, -1), 3, 2, 1),
}


@pytest.mark.parametrize("function", LOSES_NAN.values(), ids=LOSES_NAN)
@pytest.mark.parametrize("dynamic", [False, True])
def test_nan_is_kept_where_that_is_asked_for(function, dynamic: bool) -> None:
    """With eager's numbers elsewhere; by default the record says that it is not."""
    x = torch.randn(4, 8)
    with torch.no_grad():
        one = {"backend": NAME, "options": {"keeps_nan": True}}
        run = compiled(function, one, dynamic=dynamic, verify="compile")
        torch.testing.assert_close(run(x), function(x))
        assert last().attempts[0].engine["keeps_nan"] is True
        x[1, 2] = torch.nan
        torch.testing.assert_close(run(x), function(x), equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("before", "keeps", "checks"),
    [(F.relu, False, False), (F.relu, True, True), (F.tanh, False, True)],
)
def test_pools_are_checked_for_nan_where_one_may_come(
    before, keeps: bool, checks: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO's ``relu`` returns none, unless it is told to; a check is a second pool."""
    kinds: set[str] = set()

    def spy(model, **how):
        corrections.correct(model, **how)
        kinds.update(node.get_type_name() for node in model.get_ops())

    monkeypatch.setattr(compiling, "correct", spy)
    one = {"backend": NAME, "options": {"keeps_nan": keeps}}
    x = torch.randn(2, 3, 8, 8)
    run = compiled(lambda x: F.max_pool2d(before(x), 3, 2, 1), one, dynamic=dynamic)
    torch.testing.assert_close(run(x), F.max_pool2d(before(x), 3, 2, 1))
    assert ("AvgPool" in kinds) is checks
    x[1, 2, 3, 4] = torch.nan
    if checks:
        expected = F.max_pool2d(before(x), 3, 2, 1)
        torch.testing.assert_close(run(x), expected, equal_nan=True)


@upstream
@pytest.mark.parametrize("name", sorted(LOSES_NAN.keys() - {"several"}))
def test_openvino_loses_nan(name: str) -> None:
    """The option may go when it does not any more (2026.4 does)."""
    x, function = torch.randn(4, 8), LOSES_NAN[name]
    x[1, 2] = torch.nan
    with torch.no_grad():
        assert not torch.equal(compiled(function, NAME)(x).isnan(), function(x).isnan())
    assert last().attempts[0].engine["keeps_nan"] is False


def test_faults_of_another_engines_kernels_decline_nothing_here() -> None:
    """ONNX Runtime refuses such an output padding, and has no kernel for such a choice."""

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        grown = F.conv_transpose2d(x, weight, output_padding=1, dilation=2)
        return torch.where(grown > 0, grown > 1, grown < -1).to(torch.float32) + grown

    x = torch.randn(1, 2, 5, 5).to(memory_format=torch.channels_last)
    weight = torch.randn(2, 3, 3, 3)
    with torch.no_grad():
        got = compiled(program, "composer_openvino", min_coverage=1.0)(x, weight)
        torch.testing.assert_close(got, program(x, weight))
    assert last().chosen == "composer_openvino", last().attempts[0].message
