"""What users write, through real engines: the same results as eager, one report a graph."""

from __future__ import annotations

import copy

import pytest
import torch
from common import compiled, last, thorough
from torch.autograd import forward_ad as fwd

import composer

CHAINS = [*thorough((("inductor",),)), ("onnxrt",), ("openvino",), ("aot_eager",)]

pytestmark = pytest.mark.slow


@pytest.fixture(params=CHAINS, ids=lambda chain: chain[0])
def chain(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


def check(function, *args, chain, dynamic=None, calls=2):
    """Compare every call with eager on copies of the inputs; return the compiled function."""
    f = compiled(function, *chain, dynamic=dynamic)
    for _ in range(calls):
        theirs = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        ours = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        torch.testing.assert_close(f(*ours), function(*theirs))
        torch.testing.assert_close(ours, theirs)
    return f


def test_simple_graph_runs_on_the_engine_asked_for(chain) -> None:
    """And every call is counted."""
    check(lambda x: torch.relu(x) * 2 + 1, torch.randn(4, 5), chain=chain)
    assert last().chosen == chain[0]
    assert last().runtime.calls == 2


def _writes_to_rows(x):
    def row(r):
        r.add_(1)
        y = r * 2
        y += r
        return y.sin()

    return torch.func.vmap(row)(x)


def _differentiates_a_write(x):
    def loss(t):
        y = t * 2
        y.mul_(t)
        return y.sin().sum()

    return torch.func.grad(loss)(x), torch.func.vmap(torch.func.grad(loss))(x)


@pytest.mark.parametrize("function", [_writes_to_rows, _differentiates_a_write])
def test_transforms_of_what_writes_in_place(function, chain) -> None:
    """The tensors that ``torch.func`` makes have no storage to be asked for."""
    check(function, torch.randn(3, 4), chain=chain)
    assert last().chosen == chain[0]


def test_graph_break_gives_two_graphs_and_two_reports(chain) -> None:
    """Both named by the function that was broken."""

    def broken(x):
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)

    check(broken, torch.randn(3), chain=chain)
    assert [r.label for r in composer.reports()] == ["1 [0/0]", "2 [1/0]"]
    assert {r.model for r in composer.reports()} == {broken.__module__ + "." + broken.__qualname__}


def test_recompile_for_another_dtype_adds_a_report(chain) -> None:
    """One report a compiled graph."""
    f = compiled(lambda x: x * 2 + 1, *chain)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.int64):
            x = torch.ones(3, dtype=dtype)
            torch.testing.assert_close(f(x), x * 2 + 1)
    assert [r.dtype for r in composer.reports()] == ["float32", "float64", "int64"]


def test_dynamic_batch_compiles_once(chain) -> None:
    """Any batch size on one graph."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    f = compiled(model, *chain, dynamic=True)
    with torch.no_grad():
        for batch in (2, 3, 7, 64):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(f(x), model(x))
    assert len(composer.reports()) == 1
    assert last().dynamic


def test_sizes_used_as_values(chain) -> None:
    """Symbolic integers reach the engine and come back."""

    def scale(x, n):
        return x * x.shape[0] + n, x.shape[0] * 2

    f = compiled(scale, *chain, dynamic=True)
    for batch, n in ((3, 5), (4, 7)):
        x = torch.randn(batch, 2)
        result, doubled = f(x, n)
        torch.testing.assert_close(result, scale(x, n)[0])
        assert doubled == batch * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(chain, mode) -> None:
    """Under ``no_grad`` and ``inference_mode``."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    with mode():
        check(model, torch.randn(2, 3, 8, 8), chain=chain)
    assert last().chosen == chain[0]
    assert not last().training


def test_tangents_are_eagers(chain) -> None:
    """In forward mode no engine serves, also where one did before."""
    w = torch.randn(4, 4)

    def function(x):
        return torch.tanh(x @ w)

    f = compiled(function, *chain)
    x, tangent = torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(f(x), function(x))
    with fwd.dual_level():
        dual = fwd.make_dual(x, tangent)
        result = f(dual)
        torch.testing.assert_close(fwd.unpack_dual(result), fwd.unpack_dual(function(dual)))
    torch.testing.assert_close(f(x), function(x))
    first, *others = composer.reports()
    # From torch 2.14 on Dynamo gives up a function that is called with tangents.
    assert (first.chosen, first.runtime.calls) == (chain[0], 2 if others else 1)
    for report in others:
        assert (report.chosen, report.attempts[0].reason) == ("eager", "training_graph")
        assert report.runtime.calls == 1


def test_autocast(chain) -> None:
    """bfloat16 products inside of the graph."""
    model = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    with torch.no_grad():
        result = compiled(run, *chain)(x)
        assert result.dtype is torch.bfloat16
        torch.testing.assert_close(result, run(x), rtol=2e-2, atol=2e-2)


def test_mutated_input(chain) -> None:
    """The caller's tensor is changed as in eager."""

    def accumulate(total, x):
        total.add_(x)
        return total * 2

    check(accumulate, torch.zeros(3), torch.randn(3), chain=chain)


def test_mutated_buffer(chain) -> None:
    """Batch norm's running statistics move as in eager, also without grad."""
    ours, theirs = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    f = compiled(ours, *chain)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(16, 4)
            torch.testing.assert_close(f(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.num_batches_tracked, theirs.num_batches_tracked)


def test_output_that_is_a_view_of_the_input(chain) -> None:
    """Writing to the output writes to the input."""
    f = compiled(lambda x: (x[1:], x.t(), x + 1), *chain)
    x = torch.zeros(3, 3)
    view, transposed, _ = f(x)
    view.fill_(1)
    assert x.sum() == 6
    assert transposed.data_ptr() == x.data_ptr()


def test_outputs_that_share_memory_do_so_still(chain) -> None:
    """Writing to one output is seen in the other, or the engine declines."""

    def twice(x):
        y = x * 2
        return y, y.view(-1), y[1]

    a, b, c = compiled(twice, *chain)(torch.ones(2, 2))
    b.fill_(5)
    assert a.sum() == 20
    assert c.sum() == 10


def test_strides_of_outputs_are_eagers(chain) -> None:
    """A transposed result is laid out as eager lays it out."""
    f = compiled(lambda x: (x * 2).transpose(0, 1), *chain)
    x = torch.randn(3, 5)
    torch.testing.assert_close(f(x), (x * 2).transpose(0, 1))
    assert f(x).stride() == (x * 2).transpose(0, 1).stride()


def test_channels_last(chain) -> None:
    """Inputs and outputs keep their memory format."""
    conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    with torch.no_grad():
        result = compiled(conv, *chain)(x)
        torch.testing.assert_close(result, conv(x))
        assert result.is_contiguous(memory_format=torch.channels_last)


def test_outputs_that_are_not_tensors(chain) -> None:
    """Constants, strings, ``None`` and nested structures."""
    f = compiled(lambda x: {"sum": x.sum(), "name": "x", "none": None, "list": [x + 1, 3]}, *chain)
    x = torch.randn(3)
    result = f(x)
    torch.testing.assert_close((result["sum"], result["list"][0]), (x.sum(), x + 1))
    assert (result["name"], result["none"], result["list"][1]) == ("x", None, 3)


def test_bool_integer_and_empty_tensors(chain) -> None:
    """Every dtype a mask or an index has, and nothing at all."""

    def mask(x, index, keep):
        return x[index], keep & (x > 0), x[:0] + 1, index + 1

    args = torch.randn(4), torch.tensor([2, 0]), torch.tensor([True, False, True, True])
    check(mask, *args, chain=chain)


def test_inductor_does_at_once_what_the_others_do_one_by_one() -> None:
    """Writes to an input and a buffer, shared memory, strides, layouts, masks; for two sizes."""
    norm = torch.nn.BatchNorm1d(4)
    twin = copy.deepcopy(norm)

    def program(norm, total, x, keep):
        total.add_(x)
        y = norm(total) * 2
        return total[1:], y, y.view(-1), (y + 1).transpose(0, 1), x[:0], keep & (x > 0), None, "x"

    run = compiled(program, "inductor", dynamic=True)
    with torch.no_grad():
        for size in (3, 5):
            total, x = torch.randn(size, 4), torch.randn(4, size * 2).t()[::2]
            keep, copied = torch.rand(size, 4) > 0.5, total.clone()
            part, whole, flat, *rest = run(norm, total, x, keep)
            expected = program(twin, copied, x, keep)
            torch.testing.assert_close((part, whole, flat, *rest[:3]), expected[:6])
            assert (rest[3], rest[4]) == (None, "x")
            torch.testing.assert_close((total, norm.running_var), (copied, twin.running_var))
            assert rest[0].stride() == expected[3].stride()
            part.fill_(7)
            flat.fill_(5)
            assert (total[1:] == 7).all()
            assert (whole == 5).all()
    assert [(each.chosen, each.runtime.calls) for each in composer.reports()] == [("inductor", 2)]


def test_graph_without_tensor_inputs(chain) -> None:
    """Factories only."""
    check(lambda: torch.arange(6).reshape(2, 3) * 2, chain=chain)


def test_the_same_tensor_twice(chain) -> None:
    """Two arguments, one object."""
    f = compiled(lambda a, b: a * 2 + b, *chain)
    x = torch.randn(3)
    torch.testing.assert_close(f(x, x), x * 3)


def test_noncontiguous_and_expanded_inputs(chain) -> None:
    """Strides of inputs do not change values."""
    check(
        lambda a, b: a + b, torch.randn(4, 6)[::2, ::3], torch.randn(1, 2).expand(2, 2), chain=chain
    )


def test_training_gradients_are_those_of_plain_torch_compile() -> None:
    """Five optimizer steps through the default chain: the same losses and gradients, bitwise."""
    losses, gradients = [], []
    for backend in ("composer", "inductor"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        f = torch.compile(model, backend=backend)
        data = torch.randn(5, 16, 8)
        steps = []
        for x in data:
            optimizer.zero_grad()
            loss = f(x).square().mean()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert composer.reports()[0].training
    assert composer.reports()[0].chosen == "inductor"


class _Stops(torch.fx.Interpreter):
    """An engine's run of a graph that ends at its sine."""

    def call_method(self, target, args, kwargs):
        if target == "sin":
            raise RuntimeError("no kernel for a sine")
        return super().call_method(target, args, kwargs)


def _stops_while_it_builds(gm, example_inputs):
    return _Stops(gm).run(*example_inputs)


def _stops_at_its_calls(gm, _):
    return lambda *args: _Stops(gm).run(*args)


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
@pytest.mark.parametrize("broken", [_stops_while_it_builds, _stops_at_its_calls])
@pytest.mark.parametrize("options", [{}, {"verify": "compile"}, {"select": "fastest"}], ids=str)
def test_engine_that_stops_within_a_region_leaves_grad_mode(broken, options) -> None:
    """What follows would be built, and run, without gradients."""
    layer = torch.nn.Linear(3, 3)

    def f(x):
        y = layer(x)
        with torch.no_grad():
            scale = x.sin().sum()
        return y * scale

    x = torch.ones(2, 3)
    run = compiled(f, broken, "aot_eager", **options)
    for _ in range(3):
        y = run(x)
        assert y.requires_grad
        torch.testing.assert_close(y, f(x))
    assert last().attempts[0].status == "failed"
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("chain", [["eager"], ["aot_eager"], ["onnxrt"]], ids=str)
def test_error_of_the_program_within_a_region_leaves_grad_mode(chain) -> None:
    """As in eager, so that a program that catches it goes on with gradients."""
    layer = torch.nn.Linear(3, 3)

    def f(x, i):
        with torch.no_grad():
            row = layer.weight[i]
        return layer(x) * row

    run = compiled(f, *chain)
    with pytest.raises(IndexError, match="out of"):
        run(torch.ones(2, 3), torch.tensor([7]))
    assert torch.is_grad_enabled()
    assert run(torch.ones(2, 3), torch.tensor([1])).requires_grad
