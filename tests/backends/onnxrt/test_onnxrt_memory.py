"""What goes into the engine and comes out of it: dtypes, layouts, sizes, kinds of tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as torch's own users write it
from common import compiled, fault_of, last, upstream
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import composer
from composer.backends.onnxrt import kernels, library
from composer.backends.onnxrt.native import why_not_native

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check(function, *args, chosen: str = "onnxrt", **options) -> None:
    """As eager: values, dtypes, shapes, strides."""
    run = compiled(function, "onnxrt", min_coverage=1.0, **options)
    for _ in range(2):
        torch.testing.assert_close(run(*args), function(*args), check_stride=True)
    assert last().chosen == chosen, last().attempts[0].message


DTYPES = {
    str(dtype): (
        lambda x: (torch.cat([x.t(), x.t()]), x.float() + 1),
        torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 0]]).to(dtype),
    )
    for dtype in (*FLOATS, *SIGNED, *UNSIGNED)
}


@pytest.mark.parametrize("case", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_dtype_goes_in_and_out(case, dynamic: bool) -> None:
    """By address, those that numpy does not know as well."""
    check(*case, dynamic=dynamic)


LACKING = {
    "float8 up": (lambda x: x.float() + 1, torch.ones(3).to(torch.float8_e5m2)),
    "float8 down": (lambda x: (x * 2).to(torch.float8_e4m3fn), torch.ones(3)),
    "bool reduced": (
        lambda x: x.scatter_reduce(0, torch.zeros(3, dtype=torch.int64), x, "amax"),
        torch.ones(3).bool(),
    ),
}


@pytest.mark.parametrize("case", LACKING.values(), ids=LACKING)
def test_what_has_no_kernel_stays_torchs(case) -> None:
    """The calls are named, and the rest of a graph could still be taken."""
    function, x = case
    check(function, x, chosen="eager")
    assert "ONNX Runtime has no kernel for" in last().attempts[0].message


@upstream
@pytest.mark.parametrize("case", LACKING)
def test_kernels_are_still_missing(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule ONNX Runtime refuses the model, or computes something else."""
    monkeypatch.setattr(kernels, "_no_kernel", lambda node, device: None)
    function, x = LACKING[case]
    before = "1.32" if case == "float8 down" else None
    with fault_of("onnxruntime", before=before), pytest.raises(AssertionError):
        check(function, x)


CASES = {
    "no dimensions": (lambda a, b: a * b + 1, torch.tensor(2.0), torch.tensor(3.0)),
    "no elements": (lambda a: a * 2 + 1, torch.zeros(0, 3)),
    "an unused input": (lambda a, b: a * 2, torch.ones(3), torch.ones(4)),
    "no input": (lambda: torch.ones(3).cumsum(0) * 2,),
    "one element repeated": (lambda a: a * 2, torch.randn(1, 4).expand(3, 4)),
    "every other column": (lambda a: a * 2, torch.randn(3, 8)[:, ::2]),
    "an offset": (lambda a: a * 2, torch.randn(3, 8)[1:]),
    "transposed": (lambda a: a * 2 + 1, torch.randn(3, 8).t()),
    "a transposed mask": (lambda a: ~a, (torch.randn(3, 8) > 0).t()),
    "channels last": (
        lambda a: F.conv2d(a, torch.ones(4, 3, 2, 2)),
        torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_odd_inputs(case, dynamic: bool) -> None:
    """Strides of the results are eager's, too."""
    check(*case, dynamic=dynamic)


def test_the_same_tensor_twice() -> None:
    """One memory behind two inputs."""
    x = torch.randn(3, 3)
    check(lambda a, b: a @ b, x, x)


def test_numbers_go_in_and_come_out() -> None:
    """Sizes and integers as symbols; with floating-point operands they become such."""
    x = torch.randn(5)
    check(lambda a, n: (a * n, a.shape[0] * n, n - a), x, 7, dynamic=True)


def test_an_input_that_is_written_to() -> None:
    """The graph is functional; the write comes afterwards."""
    x = torch.ones(3)
    run = compiled(lambda x: x.add_(1).relu() * 2, "onnxrt")
    torch.testing.assert_close(run(x), torch.full((3,), 4.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))


def fails(*args: object, **kwargs: object) -> object:
    raise TypeError("incompatible function arguments")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Have functions of ONNX Runtime's native module fail, as after a renamed argument."""

    def break_them(*paths: str) -> None:
        for path in paths:
            owner, _, name = path.rpartition(".")
            holder = attrgetter(owner)(library.native()) if owner else library.native()
            monkeypatch.setattr(holder, name, fails)
        why_not_native.cache_clear()

    yield break_them
    why_not_native.cache_clear()


NATIVE_CALLS = (
    *("OrtValueVector.push_back", "OrtValueVector.dlpack_at", "OrtValue.from_dlpack"),
    "InferenceSession.run_with_ortvaluevector",
    "InferenceSession.get_provider_graph_assignment_info",
)


@pytest.mark.parametrize("call", NATIVE_CALLS)
def test_native_call_that_fails_costs_speed_alone(call: str, broken) -> None:
    """The public API serves, and the record says so and why."""
    broken(call)
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    torch.testing.assert_close(compiled(model, "onnxrt")(x), model(x))
    assert last().chosen == "onnxrt"
    assert "by the public API" in last().attempts[0].engine["calls"] or "graph_assignment" in call


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", [*CASES.values(), *DTYPES.values()], ids=[*CASES, *DTYPES])
def test_public_api_gives_what_the_native_way_gives(case, dynamic: bool, broken) -> None:
    """Values, dtypes and strides, of every dtype and of odd inputs."""
    broken("OrtValueVector.push_back")
    check(*case, dynamic=dynamic)
    assert "by the public API" in last().attempts[0].engine["calls"]


class Named(torch.Tensor):
    """A subclass that adds nothing."""


SPECIAL = {
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "a subclass": lambda: torch.randn(3).as_subclass(Named),
    "nested": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_special_tensors_are_declined(make) -> None:
    """Named in the message, and eager's result."""
    x = make()
    result = compiled(lambda x: x * 2, "onnxrt")(x)
    assert type(result) is type(x)
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_dtype")
    assert type(x).__name__ in attempt.message


def direct(function, x):
    """A call of the backend without Dynamo, which captures no such tensors."""
    backend = torch._dynamo.lookup_backend("composer")
    graph = torch.fx.symbolic_trace(function)
    return backend(graph, [x], options={"chain": ["onnxrt"]})(x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
@pytest.mark.parametrize("seen", ["real before", "nothing before"])
def test_fake_tensors_are_declined(engine: str, seen: str) -> None:
    """A call with one has no data: the address that ONNX Runtime would read is null."""
    module, x = torch.nn.Linear(4, 4).eval(), torch.randn(3, 4)
    run = compiled(module, engine)
    if seen == "real before":
        run(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = run(mode.from_tensor(x))
    assert isinstance(result, FakeTensor)
    assert result.shape == (3, 4)
    assert (last().chosen, last().attempts[0].reason) == ("eager", "unsupported_dtype")
    torch.testing.assert_close(run(x), module(x))
    assert {each.chosen for each in composer.reports()} == {"eager", engine}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_declined(layout) -> None:
    """Eager answers."""
    doubled = direct(lambda x: x * 2, torch.eye(3).to_sparse(layout=layout))
    torch.testing.assert_close(doubled.to_dense(), torch.eye(3) * 2)
    assert last().attempts[0].reason == "unsupported_dtype"


def test_a_sparse_gradient_is_declined_in_the_words_of_a_user() -> None:
    """What torch computes with while it compiles is nothing that the program has."""
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    with torch.enable_grad():
        compiled(embedding, "onnxrt")(torch.tensor([1])).sum().backward()
    assert embedding.weight.grad.is_sparse
    said = "one of its tensors is a Tensor, torch.float32, torch.sparse_coo"
    assert last().attempts[0].message == said


def test_a_lazily_negated_tensor_is_declined_as_what_it_is() -> None:
    """Its dtype and layout are those of any other."""
    x = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(direct(lambda x: x * 2, x), torch.tensor([-4.0, 8.0]))
    assert last().attempts[0].reason == "unsupported_dtype"
    assert "negated lazily" in last().attempts[0].message


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_declined() -> None:
    """Eager answers."""
    x = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    torch.testing.assert_close(direct(lambda x: x.dequantize() * 2, x), torch.full((3,), 2.0))
    assert last().attempts[0].reason == "unsupported_dtype"
