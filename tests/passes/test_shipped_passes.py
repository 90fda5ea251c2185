"""The passes that ship: what each rewrites, what it must not, and the numbers of both."""

from __future__ import annotations

import ast
import copy
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from common import compiled, last, needs_torch, thorough
from torch import nn
from torch.nn import functional

import composer
from composer.errors import OptionError
from composer.passes import GraphPass
from composer.passes.lower_precision import LowerPrecision
from composer.passes.quantize_products import QuantizeProducts
from composer.passes.resolve import PASSES

aten = torch.ops.aten
ENGINES = ("onnxrt", "inductor", "aot_eager")
NAMES = (
    "eliminate_common_subexpressions",
    "fold_batch_norm",
    "fold_constants",
    "merge_parallel_linears",
    "remove_no_ops",
)
OTHER = {"fold_constants": {"max_bytes": 7}, "merge_parallel_linears": {"min_products": 3}}
"""A parameter that is not the default, by pass."""


def norm_block() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    nn.init.normal_(block[1].running_mean)
    nn.init.uniform_(block[1].running_var, 0.5, 2)
    nn.init.normal_(block[1].weight)
    return block.eval()


class Attention(nn.Module):
    """Three projections of one input, as attention has them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n) for n in (8, 8, 4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        heads = [each.view(each.shape[0], 5, 2, -1).transpose(1, 2) for each in (q, k)]
        return torch.softmax(heads[0] @ heads[1].mT, -1).sum(1) @ v


def no_ops(x):
    y = functional.dropout(functional.relu(x), 0.5, training=False).to(x.dtype)
    return torch.cos(functional.pad(y.view(y.shape), (0, 0)) * 1)


def constants(x):
    mask = torch.arange(8).unsqueeze(0) >= torch.arange(8).unsqueeze(1)
    return torch.where(mask, x, x.new_full((1, 8, 8), -1.0)).softmax(-1)


def repeats(x):
    return torch.cos(x * 2) + torch.sin(x * 2)


CASES = {
    "eliminate_common_subexpressions": (lambda: repeats, (6, 8, 8), 1),
    "fold_batch_norm": (norm_block, (6, 3, 8, 8), 1),
    "fold_constants": (lambda: constants, (6, 8, 8), 2),
    "merge_parallel_linears": (Attention, (6, 5, 8), 1),
    "remove_no_ops": (lambda: no_ops, (6, 8, 8), 5),
}
"""What each pass rewrites, the shape of its input, and in how many places."""


def matches(function, *args, name: str, **fields) -> int:
    """In how many places the pass rewrites the function, which keeps its numbers."""
    twins = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    passes = [{"pass": name, **fields}]
    got = compiled(function, "eager", passes=passes, on_pass_error="raise")(*args)
    torch.testing.assert_close(got, function(*twins))
    torch.testing.assert_close(args, tuple(twins))
    (record,) = last().passes
    return record.matches


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_torch("2.13", "a view of a slice fixes a dynamic size"))
        if name == "merge_parallel_linears"
        else name
        for name in NAMES
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_keeps_the_numbers(engine: str, name: str) -> None:
    """In inference, for two sizes of one dynamic graph."""
    make, shape, places = CASES[name]
    function = make()
    run = compiled(function, engine, passes=[name], on_pass_error="raise", dynamic=True)
    with torch.no_grad():
        for rows in (shape[0], 4):
            x = torch.randn(rows, *shape[1:])
            torch.testing.assert_close(run(x), function(x))
    assert (last().chosen, last().passes[0].matches) == (engine, places)
    assert len(composer.reports()) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pass_keeps_the_gradients(engine: str, name: str) -> None:
    """Of the input and of every parameter."""
    make, shape, places = CASES[name]
    function = make()
    x = torch.randn(shape, requires_grad=True)
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    wanted = torch.autograd.grad(function(x).square().sum(), [x, *parameters])
    run = compiled(function, engine, passes=[name], on_pass_error="raise")
    got = torch.autograd.grad(run(x).square().sum(), [x, *parameters])
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert (last().chosen, last().passes[0].matches) == (engine, places)


def test_batch_norm_behind_a_linear_layer_is_folded() -> None:
    """Its channels are the features of a matrix."""
    both = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, affine=False)).eval()
    assert matches(both, torch.randn(5, 3), name="fold_batch_norm") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_batch_norm_of_short_numbers_is_folded_in_long_ones(engine: str, dtype) -> None:
    """A channel without variance stays finite, and the error of the others is that of eager."""
    block = norm_block()[:2]
    block[1].eps = 1e-8
    block[1].running_var[0] = 0
    block.to(dtype)
    exact, x = copy.deepcopy(block).float(), torch.randn(2, 3, 8, 8).to(dtype)
    folded = compiled(block, engine, passes=["fold_batch_norm"], on_pass_error="raise")
    with torch.no_grad():
        got, eager = folded(x), block(x)
        errors = [(each - exact(x.float()))[:, 1:].abs().mean() for each in (got, eager)]
    assert got.isfinite().all()
    assert errors[0] < 2 * errors[1]
    assert last().passes[0].matches == 1


def bare(block: nn.Module):
    """The convolution's own result read a second time."""

    def run(x):
        y = block[0](x)
        return block[1](y), y.sum()

    return run


def statistics_written(block: nn.Module):
    def run(x):
        y = block[0](x)
        block[1].running_mean.mul_(0.5)
        return block[1](y)

    return run


def two_regions(block: nn.Module):
    def run(x):
        with torch.no_grad():
            y = block[0](x)
        return block[1](y)

    return run


@pytest.mark.parametrize("make", [bare, two_regions], ids=lambda f: f.__name__)
def test_batch_norm_stays(make) -> None:
    """Where the convolution is read by others or stands in another region."""
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    assert matches(make(norm_block()), x, name="fold_batch_norm") == 0


def test_batch_norm_stays_where_statistics_change() -> None:
    """By training, or by the program's own hand."""
    x = torch.randn(2, 3, 8, 8)
    trained, twin = norm_block().train(), norm_block().train()
    twin.load_state_dict(trained.state_dict())
    run = compiled(trained, "eager", passes=["fold_batch_norm"], on_pass_error="raise")
    torch.testing.assert_close(run(x), twin(x))
    torch.testing.assert_close(trained.state_dict(), twin.state_dict())
    assert last().passes[0].matches == 0
    block, twin = norm_block(), norm_block()
    twin.load_state_dict(block.state_dict())
    run = compiled(
        statistics_written(block), "eager", passes=["fold_batch_norm"], on_pass_error="raise"
    )
    torch.testing.assert_close(run(x), statistics_written(twin)(x))
    assert last().passes[0].matches == 0


def test_batch_norm_stays_under_autocast() -> None:
    """The convolution computes in bfloat16, the norm's statistics are float32."""
    block = norm_block()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return block(x)

    assert matches(run, torch.randn(2, 3, 8, 8), name="fold_batch_norm") == 0


def writes_to_a_view(x):
    y = torch.relu(x)
    y.view(y.shape).add_(1)
    return y * 2


def writes_to_a_copy(x):
    y = torch.relu(x)
    (y * 1).add_(1)
    return y.sin()


def cuts_the_gradient(x):
    y = x * 2
    with torch.no_grad():
        z = y.view(y.shape) * 1
    return y * z


NEAR_NO_OPS = {
    "another dtype": lambda x: x.to(torch.float64).sum(),
    "a copy of the same dtype": lambda x: x.relu().to(x.dtype, copy=True),
    "dropout that trains": lambda x: functional.dropout(x, 0.5, training=True) * 0,
    "zero added to a float": lambda x: x.sin() + 0,
    "a negative zero taken from a float": lambda x: (x.sin() - (-0.0)) * 2,
    "contiguous that copies": lambda x: x.mT.contiguous() * 2,
    "a slice of a part": lambda x: x[:, 1:] * 2,
    "a view returned": lambda x: x.view(x.shape),
    "an integer made float": lambda x: x.long() / 1,
    "a product of complex numbers": lambda x: (x.cos() * 1j * 1).abs(),
    "a padding": lambda x: functional.pad(x.sin(), (0, 1)) * 2,
    "a copy of an input": lambda x: torch.sin(x * 1),
    "a view written to": writes_to_a_view,
    "a copy written to": writes_to_a_copy,
    "a region without grad": cuts_the_gradient,
    "a copy of a part": lambda x: (x * 2)[1:].clone().as_strided((1, 4), (4, 1), 0) + 1,
    "a product of a part": lambda x: ((x * 2)[1:] * 1).as_strided((1, 4), (4, 1), 0) + 1,
    "a copy at an odd offset": lambda x: torch.view_as_complex(
        (x * 2).view(-1)[1:5].clone().view(2, 2)
    ).abs(),
}


@pytest.mark.parametrize("case", NEAR_NO_OPS)
def test_what_only_looks_like_a_no_op_stays(case: str) -> None:
    """A change of value, of memory, or of the gradient is no no-op."""
    x = torch.randn(4, 4, requires_grad=True)
    assert matches(NEAR_NO_OPS[case], x, name="remove_no_ops") == 0


def test_a_gradient_cut_off_stays_cut_off() -> None:
    """A view made without grad has none; its base has one."""
    x = torch.randn(4, requires_grad=True)
    run = compiled(cuts_the_gradient, "aot_eager", passes=list(NAMES), on_pass_error="raise")
    got, wanted = (torch.autograd.grad(f(x).sum(), x) for f in (run, cuts_the_gradient))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_is_its_input_as_before(engine: str) -> None:
    """``to`` its own dtype returns the same object, a clone never does."""

    def run(x):
        return functional.dropout(x, 0.5, training=False).to(x.dtype), x.clone()

    x = torch.randn(4)
    same, copy = compiled(run, engine, passes=["remove_no_ops"], on_pass_error="raise")(x)
    assert same is x
    assert copy.data_ptr() != x.data_ptr()
    assert last().passes[0].matches == 2


def test_negative_zero_survives() -> None:
    """``x - 0`` keeps it and goes; ``x + 0`` makes it positive and stays."""
    zero = torch.tensor([-0.0])
    run = compiled(lambda x: ((x.abs().neg() - 0) * 3, (x.abs().neg() + 0) * 3), "eager",
                   passes=["remove_no_ops"])  # fmt: skip
    kept, made_positive = run(zero)
    assert kept.signbit().item()
    assert not made_positive.signbit().item()
    assert last().passes[0].matches == 1


def test_integers_have_no_negative_zero() -> None:
    """There ``x + 0`` goes."""
    assert matches(lambda x: (x * 2 + 0) * 3, torch.arange(3), name="remove_no_ops") == 1


def written_constant(x):
    y = torch.zeros(4)
    y.add_(1)
    return x * y


NEAR_CONSTANTS = {
    "random numbers": lambda x: x + torch.rand(4) * 0,
    "one that is returned": lambda x: (x * 2, torch.arange(4)),
    "one that is written to": written_constant,
    "one of uninitialised memory": lambda x: x + torch.empty(4).fill_(1),
    "what depends on the input": lambda x: x + torch.sin(x),
}


@pytest.mark.parametrize("case", NEAR_CONSTANTS)
def test_what_differs_from_call_to_call_is_no_constant(case: str) -> None:
    """Or is the caller's to write to."""
    assert matches(NEAR_CONSTANTS[case], torch.randn(4), name="fold_constants") == 0


def test_constants_of_one_tensor_get_names_of_their_own() -> None:
    """A conversion that converts nothing gives the same tensor again."""

    def run(x):
        first = torch.arange(8.0)
        y = x + first
        return y * first.to(torch.float32) - torch.full((8,), 5.0)

    assert matches(run, torch.ones(8), name="fold_constants") == 3


@torch.library.custom_op("composer_tests::serial_number", mutates_args=())
def serial_number(size: int) -> torch.Tensor:
    """Another one at each call."""
    serial_number.count = getattr(serial_number, "count", 0) + 1
    return torch.full((size,), float(serial_number.count))


serial_number.register_fake(lambda size: torch.empty(size))


def test_another_packages_operator_runs_at_each_call() -> None:
    """Whatever it says of itself."""
    run = compiled(lambda x: x + serial_number(4), "eager", passes=["fold_constants"])
    assert run(torch.zeros(4))[0] + 1 == run(torch.zeros(4))[0]
    assert last().passes[0].matches == 0


def test_a_constant_has_a_largest_size() -> None:
    """``max_bytes`` counts what is made on the way as well."""

    def run(x):
        return x + torch.arange(64).float().sum()

    assert matches(run, torch.randn(4), name="fold_constants") == 1
    torch.compiler.reset()
    assert matches(run, torch.randn(4), name="fold_constants", max_bytes=511) == 0


def test_a_constant_costs_no_more_memory_than_itself(monkeypatch) -> None:
    """Beside a large input, which lends it its dtype and device alone."""
    made, own = [], torch.empty_strided

    def noted(*sizes, **how):
        tensor = own(*sizes, **how)
        has_memory = type(tensor) is torch.Tensor and tensor.device.type != "meta"
        made.append(tensor.nbytes if has_memory else 0)
        return tensor

    monkeypatch.setattr(torch, "empty_strided", noted)
    x = torch.ones(1000, 1000)
    assert matches(lambda x: x[0, :3] + x.new_ones(3), x, name="fold_constants") == 1
    assert x.nbytes not in made


def test_a_size_of_the_call_is_no_constant() -> None:
    """``arange`` over a dynamic size is computed at every call."""
    run = compiled(lambda x: x + torch.arange(x.shape[0]), "eager", passes=["fold_constants"],
                   dynamic=True)  # fmt: skip
    for rows in (3, 5):
        torch.testing.assert_close(run(torch.zeros(rows)), torch.arange(rows).float())
    assert last().passes[0].matches == 0


def test_a_rolled_back_constant_leaves_no_buffer() -> None:
    """The contract covers attributes, too."""

    @dataclasses.dataclass(frozen=True)
    class Folds(PASSES.get("fold_constants")):
        def run(self, gm):
            super().run(gm)
            raise ValueError("after the fact")

    class Looks(GraphPass):
        def run(self, gm):
            return len(list(gm.named_buffers()))

    x = torch.randn(6, 8, 8)
    run = compiled(constants, "eager", passes=[Folds(), Looks()])
    torch.testing.assert_close(run(x), constants(x))
    assert last().passes[1].matches == 0


def write_between(x):
    y = x.sin()
    a = y * 2
    y.add_(1)
    return a + y * 2


def both_written(x):
    a, b = x.sin(), x.sin()
    a.add_(1)
    return a + b


def two_autocasts(x):
    with torch.autocast("cpu", torch.bfloat16):
        a = x @ x
    return a.float() + x @ x


NEAR_REPEATS = {
    "a write between": write_between,
    "one written to": both_written,
    "both returned": lambda x: (x.sin(), x.sin()),
    "random numbers": lambda x: (torch.rand_like(x) - torch.rand_like(x)) * 0,
    "another region": two_autocasts,
    "an integer and a float": lambda x: x.long().pow(2) + x.long().pow(2.0),
    "zero and its negative": lambda x: x.clamp(0.0, 1.0) * 2 + x.clamp(-0.0, 1.0),
    "dropout": lambda x: (functional.dropout(x, 0.5) + functional.dropout(x, 0.5)) * 0,
}


@pytest.mark.parametrize("case", NEAR_REPEATS)
def test_what_is_not_the_same_twice_stays(case: str) -> None:
    """By its value, its memory, or its state."""
    places = matches(NEAR_REPEATS[case], torch.randn(4, 4), name="eliminate_common_subexpressions")
    assert places == (1 if case == "an integer and a float" else 0)


def written_through_its_own_type(x, block):
    a = block(x)
    a.type_as(x).add_(1)
    return a * 2, block(x) * 3


@pytest.mark.parametrize("engine", [*thorough("inductor"), "onnxrt", "aot_eager"])
def test_what_an_earlier_pass_made_is_written_to_as_what_was_there(engine: str) -> None:
    """An operator that may return its argument says so in no schema: fake values do."""
    block = norm_block()[:2]
    passes = ["fold_batch_norm", "eliminate_common_subexpressions"]
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        run = compiled(written_through_its_own_type, engine, passes=passes, on_pass_error="raise")
        wanted = written_through_its_own_type(x, block)
        torch.testing.assert_close(run(x, block), wanted, rtol=1e-4, atol=1e-4)
    assert last().passes[0].matches == 2


def normed(x, mean, variance):
    return torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)[0]


def normed_twice(x, mean, variance):
    return normed(x, mean, variance).sin() + normed(x, mean, variance).cos()


def normed_for_nobody(x, mean, variance):
    normed(x, mean, variance)
    return (x * 2).sin() + (x * 2).cos() * 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [normed_twice, normed_for_nobody])
def test_statistics_are_updated_as_often_as_the_program_says(function, name: str) -> None:
    """By batch norm called as torch's own operator, whose schema does not tell of it, as well."""
    matches(function, torch.randn(4, 3), torch.zeros(3), torch.ones(3), name=name)


def test_products_of_merged_products_are_merged() -> None:
    """Two groups, one behind the other."""

    def run(a, b, w, v):
        o = [each @ v for each in (a @ w, b @ w)]
        return o[0].relu() + o[1].relu()

    assert matches(run, *torch.randn(4, 4, 4), name="merge_parallel_linears") == 2


@pytest.mark.parametrize("shared", ["left", "right"])
def test_products_of_a_list_are_merged(shared: str) -> None:
    """With one operand in common, on either side."""

    def run(x, others):
        products = [x @ each if shared == "left" else each @ x for each in others]
        return sum(each.relu().sum() for each in products)

    sizes = [(4, n) if shared == "left" else (n, 4) for n in (2, 3, 5)]
    others = [torch.randn(size) for size in sizes]
    assert matches(run, torch.randn(4, 4), others, name="merge_parallel_linears") == 1
    torch.compiler.reset()
    fields = {"name": "merge_parallel_linears", "min_products": 4}
    assert matches(run, torch.randn(4, 4), others, **fields) == 0


def chained(x, w, v):
    return x @ (w * (x @ w).sum()) + x @ v * 0


def written_operand(x, w, v):
    a = (x @ w).relu()
    w.mul_(2)
    return a + (x @ v).relu()


def two_dtypes(x, w, v):
    with torch.autocast("cpu", torch.bfloat16):
        a = (x @ w).float()
    return a + (x @ v).relu()


def biased(x, w, v, bias):
    return functional.linear(x, w, bias).relu() + functional.linear(x, v, bias).relu()


@torch.library.custom_op("composer_tests::sixth_in_memory", mutates_args=())
def sixth_in_memory(x: torch.Tensor) -> torch.Tensor:
    """As a kernel would that takes its argument to have no gaps."""
    return x.as_strided((1,), (1,), 5).clone()


sixth_in_memory.register_fake(lambda x: x.new_empty(1))


def both(read):
    return lambda x, w, v: (read(x @ w) + 1, (x @ v).relu())


NEAR_PARALLEL = {
    "results returned": lambda x, w, v: (x @ w, (x @ v).mT),
    "an operand written to": written_operand,
    "another region": two_dtypes,
    "one that needs the other": lambda x, w, v: (x @ (v * (x @ w).sum())).relu(),
    "batches of matrices": lambda x, w, v: (x[None] @ w[None] + x[None] @ v[None]).relu(),
    "one bias and none": lambda x, w, v: (
        functional.linear(x, w, w[0]) + functional.linear(x, v)
    ).relu(),
    "a bias for all rows": lambda x, w, v: biased(x, w, v, x * 2),
    "a bias of one number": lambda x, w, v: biased(x, w, v, x[0, :1]),
    "memory read by strides": both(lambda y: y.as_strided((4, 4), (4, 1))),
    "a view of it read by strides": both(lambda y: y.view(-1).as_strided((3,), (5,))),
    "pairs taken for complex numbers": both(lambda y: torch.view_as_complex(y.view(4, 2, 2)).abs()),
    "bits of another dtype": both(lambda y: y.view(torch.int64)),
    "another package's operator": both(sixth_in_memory),
}


@pytest.mark.parametrize("case", NEAR_PARALLEL)
def test_products_that_are_not_parallel_stay(case: str) -> None:
    """Or whose strides, dtypes or regions would show."""
    args = [torch.randn(4, 4) for _ in range(3)]
    assert matches(NEAR_PARALLEL[case], *args, name="merge_parallel_linears") == 0


@pytest.mark.parametrize("engine", [*thorough("inductor"), "onnxrt", "aot_eager"])
def test_a_frozen_product_does_not_come_to_need_a_gradient(engine: str) -> None:
    """Beside one that is trained; without grad the two are merged."""

    def run(x, w, v):
        return torch.relu(x @ w), torch.relu(x @ v)

    x, w, v = (torch.randn(4, 4) for _ in range(3))
    w.requires_grad_()
    both = compiled(run, engine, passes=["merge_parallel_linears"], on_pass_error="raise")
    assert [each.requires_grad for each in both(x, w, v)] == [True, False]
    assert last().passes[0].matches == 0
    with torch.no_grad():
        both(x, w, v)
    assert last().passes[0].matches == 1


NOT_DIFFERENTIATED = {
    "compared": lambda y: y > 0,
    "detached": lambda y: y.detach().clamp(-1, 1).nan_to_num(0),
    "an index": lambda y: y.argmax(-1, keepdim=True),
    "its shape": lambda y: torch.ones_like(y),
}


@pytest.mark.parametrize("case", NOT_DIFFERENTIATED)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_given_no_gradient_in_eager_is_given_none(engine: str, case: str) -> None:
    """Zeros would have an optimizer decay the weight, and infinity times them is NaN."""

    def run(x, w, v):
        return torch.relu(x @ w) * NOT_DIFFERENTIATED[case](x @ v)

    def given():
        x, w, v = (torch.linspace(-1, 2, 16).view(4, 4).roll(n) for n in range(3))
        return [
            each.requires_grad_() for each in (x, w, v.index_fill(0, torch.tensor(0), torch.inf))
        ]

    both = compiled(run, engine, passes=["merge_parallel_linears"], on_pass_error="raise")
    grads = []
    for function in (both, run):
        args = given()
        function(*args).sum().backward()
        grads.append([each.grad for each in args])
    assert grads[0][2] is None
    torch.testing.assert_close(grads[0][:2], grads[1][:2])
    with torch.no_grad():
        both(*given())
    assert last().passes[0].matches == 1


def test_products_that_are_written_elsewhere_are_given_gradients() -> None:
    """What is written to in place is read by other names, too."""

    def run(x, w, v):
        y = torch.zeros(2, 4, 4)
        y[0].copy_((x @ w).relu())
        y[1].copy_((x @ v).relu())
        return y * 2

    x, w, v = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    both = compiled(run, "aot_eager", passes=["merge_parallel_linears"], on_pass_error="raise")
    got, wanted = (torch.autograd.grad(f(x, w, v).sum(), (x, w, v)) for f in (both, run))
    torch.testing.assert_close(got, wanted)
    assert last().passes[0].matches == 1


def test_a_view_that_cannot_be_one_any_more_is_a_reshape() -> None:
    """Pieces of a joint product have gaps, which ``view`` refuses to close."""

    def run(x, w, v):
        return ((x @ w).view(-1) * (x @ v).view_as(x.new_empty(16))).relu()

    args = [torch.randn(4, 4) for _ in range(3)]
    assert matches(run, *args, name="merge_parallel_linears") == 1


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("merge_parallel_linears", {"min_products": 1}, "min_products is at least 2, not 1"),
        ("fold_constants", {"max_bytes": -1}, "max_bytes is at least 0, not -1"),
    ],
)
def test_least_numbers_are_checked(name: str, fields: dict[str, int], said: str) -> None:
    """One product alone is nothing to merge; no constant is smaller than nothing."""
    with pytest.raises(Exception, match=said) as caught:
        matches(repeats, torch.ones(2), name=name, **fields)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), OptionError)


def test_the_table_lists_what_ships() -> None:
    """Each name stands for a class of that name."""
    assert set(NAMES) <= set(PASSES.names())


@pytest.mark.parametrize("name", PASSES.names())
def test_every_pass_keeps_the_contract(name: str) -> None:
    """Documented, frozen, with a stable fingerprint that covers its parameters."""
    cls = PASSES.get(name)
    assert cls.name == name
    assert cls.keeps_numbers
    assert (cls.__doc__ or "").splitlines()[0].endswith(".")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().name = "other"
    assert cls().uuid() == cls().uuid()
    assert cls().uuid()
    known = {each.name for each in dataclasses.fields(cls)}
    assert set(OTHER.get(name, {})) == known
    assert all(cls(**{k: v}).uuid() != cls().uuid() for k, v in OTHER.get(name, {}).items())


@pytest.mark.parametrize("name", PASSES.names())
def test_every_pass_leaves_what_it_does_not_match(name: str) -> None:
    """Not a node of the graph is touched."""
    assert matches(lambda x: torch.sin(x) + 1, torch.randn(3), name=name) == 0
    assert not last().passes[0].changed


@pytest.mark.parametrize("name", PASSES.names())
def test_every_pass_keeps_its_word_on_numbers(name: str) -> None:
    """The graph that it leaves is compared with eager where the policy verifies."""
    make, shape, _ = CASES[name]
    options = {"passes": [name], "on_pass_error": "raise", "verify": "compile"}
    compiled(make(), "aot_eager", **options)(torch.randn(shape))
    assert last().passes[0].changed
    assert last().attempts[0].engine["verified"]["rewritten_graph"] == "compared with eager"


@pytest.mark.parametrize("name", PASSES.names())
def test_every_pass_has_nothing_left_to_do(name: str) -> None:
    """A second run matches nothing."""
    make, shape, places = CASES[name]
    compiled(make(), "eager", passes=[name, name], on_pass_error="raise")(torch.randn(shape))
    assert [each.matches for each in last().passes] == [places, 0]


@pytest.mark.parametrize("engine", [*thorough("inductor"), "onnxrt", "aot_eager"])
def test_products_are_merged_within_a_region_of_autocast(engine: str) -> None:
    """In its dtype, with the same gradients to that precision."""
    module = Attention()

    def region(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    x = torch.randn(6, 5, 8, requires_grad=True)
    got = compiled(region, engine, passes=list(NAMES), on_pass_error="raise")(x)
    wanted = region(x)
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
    grads = [torch.autograd.grad(each.float().square().sum(), x)[0] for each in (got, wanted)]
    error = (grads[0] - grads[1]).abs().max() / grads[1].abs().max()
    assert error < 0.03
    assert {each.name: each.matches for each in last().passes}["merge_parallel_linears"] == 1


def of_passes(module: str) -> set[str]:
    """The modules of graphs and passes that one imports; none for the base of all passes."""
    tree = ast.parse(Path(sys.modules[module].__file__).read_text())
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    names = {name for f in froms for name in (f.module, *(f"{f.module}.{a.name}" for a in f.names))}
    rooms = ("composer.graphs.", "composer.passes.")
    return {n for n in names if n in sys.modules and n.startswith(rooms)} - {GraphPass.__module__}


@pytest.mark.parametrize("cls", [*map(PASSES.get, NAMES), LowerPrecision, QuantizeProducts])
def test_fingerprint_covers_the_modules_that_a_pass_is_made_of(cls: type[GraphPass]) -> None:
    """A change of any of them gives the pass another key."""
    found, left = set(), {cls.__module__}
    while left:
        left = set().union(*map(of_passes, left)) - found
        found |= left
    assert found <= set(cls.depends_on)
