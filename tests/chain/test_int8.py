"""``precision = "int8"``: products with weights in eight bits, for engines that gain by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import sandboxes
import torch
from common import compiled, last
from naps import short_nap
from spies import error, layers, told
from torch import Tensor, nn

from composer import _torch
from composer.backends.base import Backend, Build, BuildRequest
from composer.chain import sandbox
from composer.knowledge import failure
from composer.passes import ahead
from composer.passes.canonical import to_aten
from composer.passes.quantize_products import QuantizeProducts
from composer.records import Int8

IN_INT8 = {"mode": "auto", "allow": ["int8"], "max_error": 0.05}
MEASURED = {"by": "fastest", "seconds": 0.01}


class Integers(Backend):
    """An engine with kernels for eight bits: eager. It remembers what it was given."""

    gains_by_int8: ClassVar[Int8 | None] = "products"
    given: ClassVar[list[list[torch.dtype]]] = []

    def build(self, request: BuildRequest) -> Build:
        tensors = filter(torch.is_tensor, request.example_inputs)
        self.given.append([each.dtype for each in tensors])
        run = _torch.dynamo.lookup_backend("aot_eager")(request.gm, request.example_inputs)
        return Build(self.quick(run) if self.is_quantized else run)

    @property
    def is_quantized(self) -> bool:
        """True if the last graph has weights in eight bits."""
        return torch.int8 in self.given[-1]

    def quick(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs the quantized graph."""
        return run


class Floats(Integers):
    """An engine without such kernels."""

    gains_by_int8 = None


class Weights(Integers):
    """An engine that gains by weights in eight bits, where few rows are multiplied."""

    gains_by_int8 = "weights"


class Recalls(Integers):
    """Quick in eight bits only: it gives again what it computed for the same arguments."""

    def quick(self, run: Callable[..., Any]) -> Callable[..., Any]:
        known: list[Any] = []

        def recall(*args: Any) -> list[Tensor]:
            if not known or not all(map(torch.equal, known[0], args)):
                known[:] = [[each.clone() for each in args], run(*args)]
            return [each.clone() for each in known[1]]

        return recall


@pytest.fixture(autouse=True)
def _inference() -> Any:
    Integers.given.clear()
    with torch.no_grad():
        yield


def test_weights_are_given_in_eight_bits_with_a_scale_for_each_channel() -> None:
    """The integers take the places of the weights, and the scales come last."""
    module, x = layers(), torch.randn(4, 32)
    got = compiled(module, Integers, precision="int8")(x)
    assert 0 < error(got, module(x)) < 0.05
    floats = torch.float32
    (given,) = Integers.given
    assert given.count(torch.int8) == 2
    assert given.count(floats) == 1 + 2 + 2  # the input, biases, scales
    assert told() == [("Integers", "int8", "succeeded", None)]
    assert last().attempts[0].who == "Integers in int8"


class Columns(nn.Module):
    """Products with weights whose columns are the output channels, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(16, 16)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(16))
        # Each column has another size, so scales along the wrong axis are far off.
        self.first.data *= 10.0 ** torch.linspace(-3, 3, 16)
        self.second.data *= 10.0 ** torch.linspace(3, -3, 16)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        near = torch.addmm(self.bias, x, self.first)
        return near @ self.second


def test_scales_are_those_of_output_channels() -> None:
    """The columns of a second factor, and the rows of a linear layer's weight."""
    module, x = Columns(), torch.randn(4, 16)

    def first(x: Tensor) -> Tensor:
        return torch.addmm(module.bias, x, module.first)

    got = compiled(first, Integers, precision="int8")(x)
    near = first(x)
    assert ((got - near).abs().amax(0) / near.abs().amax(0)).max() < 0.05
    compiled(module, Integers, precision="int8")(x)
    assert Integers.given[-1].count(torch.int8) == 2


def test_products_of_activations_stay_in_float32() -> None:
    """Only a weight is known before the call."""
    x = torch.randn(4, 4)
    assert torch.equal(compiled(lambda x: x @ x, Integers, precision="int8")(x), x @ x)
    said = last().attempts[0].engine["not_in_int8"]
    assert said == "it has no product with a weight of float32 to compute in int8"


class Tied(nn.Module):
    """An embedding whose weight multiplies twice: its rows and its columns are output channels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)

    def forward(self, indices: Tensor) -> Tensor:
        near = nn.functional.linear(self.table(indices), self.table.weight)
        return near @ self.table.weight


def test_a_weight_may_have_several_copies_and_be_read_itself() -> None:
    """Integers and scales for each of its axes, beside the weight that the embedding reads."""
    module, indices = Tied(), torch.arange(8)
    got = compiled(module, Integers, precision="int8")(indices)
    assert 0 < error(got, module(indices)) < 0.05
    assert Integers.given[-1].count(torch.int8) == 2
    assert told() == [("Integers", "int8", "succeeded", None)]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_a_product_without_elements_stays_in_float32(sizes: tuple[int, int]) -> None:
    """Nothing in it is the largest number, by which a scale would be chosen."""
    module, x = nn.Linear(4, 3), torch.randn(sizes)
    module.weight = nn.Parameter(torch.ones(3, sizes[1]))
    assert torch.equal(compiled(module, Integers, precision="int8")(x), module(x))
    assert told() == [("Integers", "fp32", "succeeded", None)]


FACTORS = torch.randn(16, 16), torch.randn(16)
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a vector": lambda x, weight, bias: x[0] @ weight,
    "a factor of the product": lambda x, weight, bias: torch.addmm(bias, x, weight, alpha=2),
    "a factor of the bias": lambda x, weight, bias: torch.addmm(bias, x, weight, beta=0.5),
    "a sum with a matrix": lambda x, weight, bias: torch.addmm(x, x, weight),
    "a sum with a column": lambda x, weight, bias: torch.addmm(x[:, :1], x, weight),
    "a sum with a number": lambda x, weight, bias: torch.addmm(bias[:1], x, weight),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_product_that_is_more_than_a_linear_layer_stays_in_float32(case: str) -> None:
    """Engines have no kernel for it, so it would be rounded and still computed in float32."""
    weight, bias = map(nn.Parameter, FACTORS)
    x = torch.randn(4, 16)
    got = compiled(lambda x: OTHERS[case](x, weight, bias), Integers, precision="int8")(x)
    assert torch.equal(got, OTHERS[case](x, weight, bias))
    assert told() == [("Integers", "fp32", "succeeded", None)]


@pytest.mark.parametrize(("rows", "in_int8"), [(1, 2), (4, 2), (5, 0)])
def test_weights_alone_are_given_in_eight_bits_for_few_rows(rows: int, in_int8: int) -> None:
    """Only there does the time of a product depend on the bytes of its weight."""
    module, x = layers(), torch.randn(rows, 32)
    f = compiled(module, Weights, precision="int8")
    assert (error(f(x), module(x)) > 0) is bool(in_int8)
    assert Integers.given[-1].count(torch.int8) == in_int8
    module[0].weight.mul_(-3)
    assert error(f(x), module(x)) < 0.05
    if not in_int8:
        said = last().attempts[0].engine["not_in_int8"]
        assert said == "it has no product of few rows with a weight of float32 to compute in int8"


def test_rows_of_an_unknown_number_are_not_few() -> None:
    """A weight stays in float32 if the number of rows is known only at a call."""
    module, x = layers(), torch.randn(3, 32)
    torch._dynamo.mark_dynamic(x, 0)
    assert torch.equal(compiled(module, Weights, precision="int8")(x), module(x))
    assert told() == [("Weights", "fp32", "succeeded", None)]


def test_a_weight_with_few_rows_stays_in_float32_if_it_causes_the_error() -> None:
    """The search measures what the engine would round: the weights, and no activation."""
    torch.manual_seed(0)
    module, x = layers().requires_grad_(False), torch.randn(4, 32)
    module[2].weight[:, 0] *= 1e3  # the scale of a row leaves nothing of its other numbers
    x = torch.zeros(4, 32)
    module[0].bias[0] = -1e3  # GELU makes zero of the number that meets the large weights
    compiled(module, Weights, precision=IN_INT8, select=MEASURED)(x)
    first = last().attempts[0]
    assert (first.precision, first.products_in_fp32) == ("int8", 1)


@pytest.mark.parametrize("change", ["in_place", "data", "parameter"])
def test_a_changed_weight_is_quantized_again(change: str) -> None:
    """Its integers and its scales are those of the new values."""
    module, x = layers(), torch.randn(4, 32)
    f = compiled(module, Integers, precision="int8")
    before = f(x)
    if change == "in_place":
        module[0].weight.mul_(-3)
    elif change == "data":
        module[0].weight.data = -3 * module[0].weight.data
    else:
        module[0].weight = nn.Parameter(-3 * module[0].weight)
    assert error(f(x), module(x)) < 0.05
    assert error(f(x), before) > 0.1


def test_an_engine_without_such_kernels_keeps_float32_and_says_so() -> None:
    """Asked for by name it computes in float32; ``auto`` does not build it twice."""
    module, x = layers(), torch.randn(4, 32)
    assert torch.equal(compiled(module, Floats, precision="int8")(x), module(x))
    assert "no kernels that are faster" in last().attempts[0].engine["not_in_int8"]
    torch.compiler.reset()
    compiled(module, Floats, precision=IN_INT8, select=MEASURED)(x)
    assert told()[0] == ("Floats", None, "skipped", "policy")
    assert "no kernels that are faster" in last().attempts[0].message
    assert len(Floats.given) == 2


@pytest.fixture
def sandbox_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox of ``isolate`` is this process."""
    monkeypatch.setattr(sandbox.subprocesses, "ask", sandboxes.ask)


class Chooses(Integers):
    """An engine that applies the precision itself; it remembers what it was asked for."""

    chooses_precision = True
    asked: ClassVar[list[str]] = []

    def build(self, request: BuildRequest) -> Build:
        self.asked.append(request.terms.precision)
        return super().build(request)


@pytest.mark.usefixtures("sandbox_here")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_sandbox_builds_in_the_precision_of_the_program(precision: str) -> None:
    """What is proven there is what is built here: the same graph, in the same precision."""
    Chooses.asked.clear()
    compiled(layers(), Chooses, precision=precision, isolate=True)(torch.randn(4, 32))
    assert told() == [("Chooses", precision, "succeeded", None)]
    assert Chooses.asked == [precision] * 2
    assert Integers.given[0] == Integers.given[1]


class CannotInt8(Integers):
    """An engine that fails with weights in eight bits."""

    def build(self, request: BuildRequest) -> Build:
        build = super().build(request)
        if self.is_quantized:
            raise RuntimeError("no such kernel")
        return build


@pytest.mark.usefixtures("sandbox_here")
@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_a_failure_in_a_sandbox_is_that_of_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox remembers that the candidate in int8 failed, and not that in float32."""
    monkeypatch.setattr(failure, "WORTH_SECONDS", 0.0)
    module, x = layers(), torch.randn(4, 32)
    compiled(module, CannotInt8, precision="int8", isolate=True)(x)
    assert last().attempts[0].reason == "build_failed"
    torch.compiler.reset()
    compiled(module, CannotInt8, isolate=True)(x)
    assert last().attempts[0].accepted


def test_auto_needs_a_measurement() -> None:
    """Without one nobody knows that eight bits are faster on this processor."""
    module, x = layers(), torch.randn(4, 32)
    assert torch.equal(compiled(module, Integers, precision=IN_INT8)(x), module(x))
    first, second = last().attempts
    assert 'select = "fastest"' in first.message
    assert (second.precision, second.accepted) == ("fp32", True)


def test_auto_takes_eight_bits_where_they_are_measured_faster() -> None:
    """Each precision of ``allow`` is a candidate, and float32 is the last."""
    module, x = layers(), torch.randn(4, 32)
    allowed = IN_INT8 | {"allow": ["bf16", "int8"]}
    f = compiled(lambda x: module(short_nap(x)), Recalls, precision=allowed, select="fastest")
    assert 0 < error(f(x), module(x)) < 0.05
    assert [each.precision for each in last().attempts][1:] == ["int8", "fp32"]
    assert [each.accepted for each in last().attempts] == [False, True, False]
    assert last().attempts[2].reason == "slower"


def test_auto_rejects_what_is_not_exact_enough() -> None:
    """Against the program in float32, with a fifth of ``max_error`` left for other inputs."""
    module, x = nn.Linear(32, 8), torch.randn(4, 32)
    off = error(compiled(module, Integers, precision="int8")(x), module(x))
    for share, accepted in ((1.3, True), (1.2, False)):
        torch.compiler.reset()
        asked = IN_INT8 | {"max_error": share * off}
        compiled(module, Recalls, precision=asked, select=MEASURED)(short_nap(x))
        first = last().attempts[0]
        assert (first.reason != "numeric_mismatch") is accepted


class Outlier(nn.Module):
    """The second of three layers gets one number that is far larger than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.layers[1].weight.data[:, 0] *= 1e-4

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        far = x + torch.nn.functional.one_hot(torch.tensor(0), 32) * 2000.0
        last: Tensor = self.layers[2](self.layers[1](far))
        return last


def test_a_layer_with_outliers_stays_in_float32() -> None:
    """One scale for its input leaves nothing of the smaller numbers; the other layers are taken."""
    torch.manual_seed(0)
    module, x = Outlier().eval(), torch.randn(4, 32)
    compiled(module, Integers, precision=IN_INT8, select=MEASURED)(x)
    first = last().attempts[0]
    assert (first.precision, first.products_in_fp32) == ("int8", 1)
    assert first.reason in (None, "slower")
    taken = next(each for each in Integers.given if each.count(torch.int8) == 2)
    assert taken.count(torch.float32) == 1 + 1 + 3 + 2  # input, weight, biases, scales


def test_training_keeps_float32() -> None:
    """No gradient flows through integers."""
    module, x = layers(), torch.randn(4, 32)
    with torch.enable_grad():
        got = compiled(module, Integers, precision="int8")(x)
    assert torch.equal(got, module(x))
    assert last().attempts[0].engine["not_in_int8"] == "the graph trains"


def test_the_reference_of_a_quantized_program_is_that_program() -> None:
    """The user has quantized it: an engine that computes in float32 instead is wrong."""
    module, x = layers(), torch.randn(4, 32)

    def floats(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *_: (module(x),)

    _torch.operators.load_quantizing()
    ops = torch.ops.quantized_decomposed

    def program(x: Tensor) -> Tensor:
        how = 0.1, 0, -128, 127, torch.int8
        result: Tensor = module(ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *how), *how))
        return result

    with pytest.warns(match="numeric_mismatch"):
        got = compiled(program, floats, verify="compile")(x)
    assert torch.equal(got, program(x))


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_the_reference_of_composers_own_eight_bits_is_the_program_in_float32() -> None:
    """So numbers of another engine's float32 are right for it, and wrong integers are found."""

    class Wrong(Integers):
        def quick(self, run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: [each * 1.2 for each in run(*args)]

    module, x = layers(), torch.randn(4, 32)
    precision = {"mode": "int8", "max_error": 0.05}
    got = compiled(module, Integers, precision=precision, verify="compile")(x)
    verified = last().attempts[0].engine["verified"]
    assert verified["max_absolute_error"] == pytest.approx(float((got - module(x)).abs().max()))
    torch.compiler.reset()
    assert torch.equal(compiled(module, Wrong, precision=precision, verify="compile")(x), module(x))
    assert told() == [("Wrong", "int8", "rejected", "numeric_mismatch")]


def rewritten(module: nn.Module, x: Tensor, *wide: int) -> torch.fx.GraphModule:
    """The graph of a module after the pass."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(to_aten(gm, inputs))
        return gm.forward

    torch.compile(module, backend=keep)(x)
    QuantizeProducts(wide).run(graphs[0])
    graphs[0].recompile()
    return graphs[0]


def test_the_pass_shares_what_it_quantizes_and_keeps_what_it_is_told_to() -> None:
    """Two products of one activation have one scale; a product that stays wide is as it was."""
    first, second = nn.Linear(8, 4), nn.Linear(8, 4)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.first(x) + self.second(x)
            return result

    ops = torch.ops.quantized_decomposed
    for wide, products in (((), 2), ((1,), 1), ((0, 1), 0)):
        torch.compiler.reset()
        graph = rewritten(Both(), torch.randn(2, 8), *wide).graph
        chosen = graph.find_nodes(op="call_function", target=ops.choose_qparams.tensor)
        assert len(chosen) == min(products, 1)
        assert len(ahead.computed_ahead(graph)) == products
