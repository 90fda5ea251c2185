"""Facts about a captured graph: names, copies, the key."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import types
from typing import Any

import pytest
import torch
from common import compiled, last
from torch.testing._internal.two_tensor import TwoTensor

import composer
from composer import _torch
from composer.graphs import capture, clones
from composer.graphs.keys import graph_key, with_key


class Child(torch.nn.Module):
    def forward(self, x):
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)


class Parent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x * 2


class Heir(Parent):
    """Inherits ``forward``; reports must still say Heir."""


def models() -> list[str]:
    return [report.model for report in composer.reports()]


def test_model_is_the_root_modules_class_after_graph_breaks_too() -> None:
    """The class, not the base that defines ``forward``."""
    compiled(Heir(), "eager")(torch.ones(2, 3))
    assert models() == [f"{__name__}.Heir"] * 2


def test_model_of_a_torch_module() -> None:
    """Dynamo traces a frame of its own around it."""
    compiled(torch.nn.Linear(3, 3), "eager")(torch.ones(2, 3))
    assert models() == ["torch.nn.modules.linear.Linear"]


def test_model_of_a_torch_function_is_its_name() -> None:
    """It has no frame in Python."""
    compiled(torch.cos, "eager")(torch.ones(2, 3))
    assert models() == ["torch.cos"]


def test_model_of_a_function_is_its_qualified_name() -> None:
    """Also when its first argument is a module."""

    def step(model, x):
        return model(x)

    compiled(step, "eager")(torch.nn.Linear(3, 3), torch.ones(2, 3))
    name = "test_model_of_a_function_is_its_qualified_name.<locals>.step"
    assert models() == [f"{__name__}.{name}"]


class Doubling:
    def __call__(self, x):
        return x * 2


def test_model_of_an_object_that_can_be_called_is_its_class() -> None:
    """Dynamo traces a frame of its own around it, as around torch's modules."""
    compiled(Doubling(), "eager")(torch.ones(2, 3))
    assert models() == [f"{__name__}.Doubling"]


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(torch.nn.Module):
    @decorated
    def forward(self, x):
        return x + 1


def new_forward(module, x):
    return x * 2


def bound() -> torch.nn.Module:
    module = Child()
    module.forward = types.MethodType(new_forward, module)
    return module


def patched() -> torch.nn.Module:
    module = Child()
    module.forward = functools.update_wrapper(
        functools.partial(new_forward, module), module.forward
    )
    return module


@pytest.mark.parametrize("make", [Decorated, bound, patched])
def test_model_under_decorators_and_patches_is_still_the_class(make) -> None:
    """``*args`` wrappers, a method bound to the instance, a partial as accelerate makes it."""
    module = make()
    compiled(module, "eager")(torch.ones(2))
    assert models() == [f"{__name__}.{type(module).__name__}"]


def test_model_of_a_partial_is_its_function() -> None:
    """Not Dynamo's frame around it."""
    compiled(functools.partial(new_forward, 1), "eager")(torch.ones(2))
    assert models() == [f"{__name__}.new_forward"]


def test_model_may_be_named_by_option() -> None:
    """The user's own word wins."""
    compiled(torch.sin, "eager", model="encoder")(torch.ones(2))
    assert models() == ["encoder"]


def test_model_compiled_in_place() -> None:
    """``module.compile()`` is ``torch.compile`` as well."""
    child = Child()
    child.compile(backend="composer", options={"chain": ["eager"]})
    child(torch.ones(2))
    assert models() == [f"{__name__}.Child"] * 2


def test_facts_of_a_graph() -> None:
    """Device, dtype, operations, and inputs without the weights."""
    compiled(Parent(), "eager", dynamic=True)(torch.ones(2, 3))
    report = composer.reports()[0]
    assert (report.device, report.dtype, report.nodes) == ("cpu", "float32", 1)
    assert report.training
    assert report.dynamic
    assert [(i.kind, i.dtype) for i in report.inputs] == [("symbol", ""), ("tensor", "float32")]
    assert report.inputs[1].shape[1] == 3
    assert isinstance(report.inputs[1].shape[0], str)


def test_training_needs_grad_mode_and_a_tensor_that_requires_it() -> None:
    """``model.eval()`` or not."""
    model = torch.nn.Linear(3, 3).eval()
    compiled(model, "eager")(torch.ones(2, 3))
    assert last().training
    with torch.no_grad():
        compiled(model, "eager")(torch.ones(2, 3))
    assert not last().training


def test_copies_keep_strides_offsets_and_shared_memory() -> None:
    """And the originals are out of reach."""
    base = torch.arange(12.0)
    inputs = [base[:6].reshape(2, 3).t(), base[3:], base, "text", 3]
    copies = clones.copy_inputs(inputs, keep=frozenset({2}))
    assert copies[2:] == inputs[2:]
    assert copies[0].stride() == (1, 3)
    assert torch.equal(copies[0], inputs[0])
    copies[1][0] = 100
    assert copies[0][0, 1] == 100
    assert base[3] == 3


def test_part_of_a_large_storage_is_copied_alone() -> None:
    """A slice of a mapped file costs what the slice takes, and is laid out as it was."""
    file = torch.empty(1 << 29, dtype=torch.float32, device="cpu")  # touched nowhere else
    x = file[1000:1120].view(10, 12).t()[:, 2:8]
    x.copy_(torch.randn(12, 6))
    (copied,) = clones.copy_inputs([x], keep=frozenset())
    assert torch.equal(copied, x)
    assert (copied.stride(), copied.untyped_storage().nbytes()) == (x.stride(), 288)
    one, other = clones.copy_inputs([torch.zeros(20)[:10], x], keep=frozenset({0}))
    assert one.untyped_storage().nbytes() == 80
    other.zero_()
    assert x.abs().sum() > 0


def test_parts_of_a_large_storage_that_meet_share_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to one of them is read in the other."""
    monkeypatch.setattr(clones, "_LARGE", 16)
    base = torch.arange(100.0)
    one, other = clones.copy_inputs([base[2:6], base[4:8]], keep=frozenset())
    one.fill_(-1.0)
    assert other.tolist() == [-1.0, -1.0, 6.0, 7.0]


def test_copies_of_leaves_are_leaves() -> None:
    """With their own ``requires_grad``."""
    x = torch.ones(3, requires_grad=True)
    (copy,) = clones.copy_inputs([x], keep=frozenset())
    assert copy.is_leaf
    assert copy.requires_grad
    assert copy.data_ptr() != x.data_ptr()


def test_copies_under_inference_mode_are_usual_tensors() -> None:
    """An engine may read their version counter."""
    with torch.inference_mode():
        (copy,) = clones.copy_inputs([torch.ones(2)], keep=frozenset())
    assert not copy.is_inference()
    assert copy.sum() == 2


def test_clone_shares_tensors_and_nothing_else() -> None:
    """Editing the clone leaves the original's code as it was."""
    gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    before = gm.code
    clone = clones.clone_graph(gm)
    assert clones.same_graph(clone, gm)
    assert clone.get_parameter("0.weight") is gm.get_parameter("0.weight")
    for node in clone.graph.find_nodes(op="call_module", target="1"):
        node.replace_all_uses_with(node.args[0])
        clone.graph.erase_node(node)
    clone.recompile()
    assert gm.code == before
    assert not clones.same_graph(clone, gm)


def test_clone_leaves_the_modes_of_modules_as_they_are() -> None:
    """A traced graph has the program's own leaf modules, each in a mode of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    gm = torch.fx.symbolic_trace(model)
    model.eval()
    clone = clones.clone_graph(gm)
    assert (clone.training, model[1].training) == (gm.training, False)
    run = torch._dynamo.lookup_backend("composer")(
        gm, [x := torch.randn(8, 4)], options={"chain": ["aot_eager"]}
    )
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert not model[1].training


@pytest.mark.parametrize("engine", ["onnxrt", "composer_openvino", "composer"])
@pytest.mark.parametrize("returns", [lambda y: y, lambda y: {"a": [y, y + 1]}, lambda y: (y,)])
@torch.no_grad()
def test_an_engine_called_directly_returns_what_the_graph_does(engine: str, returns) -> None:
    """AOTAutograd takes flat tuples, as Dynamo's graphs return them."""
    gm = torch.fx.symbolic_trace(lambda x: returns(x.relu().exp()))
    x = torch.randn(3, 4)
    got = torch._dynamo.lookup_backend(engine)(gm, [x])(x)
    wanted = gm(x)
    torch.testing.assert_close(tuple(got) if isinstance(wanted, tuple) else got, wanted)
    if isinstance(got, dict):
        assert type(got) is dict
        got["b"] = got["a"].pop()


@pytest.mark.parametrize("engine", ["onnxrt", "openvino", "inductor", "aot_eager", "none"])
@torch.no_grad()
def test_a_number_that_python_draws_is_what_the_graph_was_captured_for(engine: str) -> None:
    """Dynamo passes it as float64, and engines read that by address as float32 (torch 2.13)."""

    def program(x):
        return x * random.uniform(0, 1) + random.uniform(5, 6)

    run, x = compiled(program, engine), torch.randn(4, 4)
    for seed in range(3):
        random.seed(seed)
        wanted = program(x)
        random.seed(seed)
        torch.testing.assert_close(run(x), wanted)
    assert last().chosen == ("eager" if engine == "none" else engine)
    assert last().runtime.fallbacks == 0


@pytest.mark.parametrize("engine", ["onnxrt", "composer_openvino"])
@torch.no_grad()
def test_an_engine_that_serves_alone_is_given_it_as_well(engine: str) -> None:
    """By its own name, which composer is not asked about."""
    run, x = torch.compile(lambda x: x * random.uniform(0, 1), backend=engine), torch.randn(4)
    random.seed(0)
    wanted = x * random.uniform(0, 1)
    random.seed(0)
    torch.testing.assert_close(run(x), wanted)


class Incomparable(torch.Tensor):
    """As quantized weights are, which know few operators."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.isclose:
            raise NotImplementedError("isclose")
        return super().__torch_function__(function, types, args, kwargs)


def test_parameter_of_a_class_of_its_own_is_no_buffer() -> None:
    """It is neither copied nor compared."""
    weight = torch.nn.Parameter(torch.ones(2).as_subclass(Incomparable), requires_grad=False)
    request = capture.read_request(torch.fx.symbolic_trace(lambda w: w + 1), [weight])
    buffers = clones.Buffers(dataclasses.replace(request, weights=frozenset({0})))
    assert not buffers.restore()


def test_words_of_the_settings_are_not_taken_for_symbols() -> None:
    """Such as those of a quantized dtype."""
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    settings = [f"dtype={each}" for each in ("u8", "u4", "s1")]
    assert len({graph_key(gm, each) for each in settings}) == 3


def key(function, *args, **options) -> str:
    torch.compiler.reset()
    compiled(function, "eager", **options)(*args)
    return last().graph_key


X = torch.ones(2, 3)
VARIANTS = {
    "constant": (lambda x: x + 2, X),
    "argument": (lambda x: torch.sum(x, dim=1), X),
    "other argument": (lambda x: torch.sum(x, dim=0), X),
    "shape": (lambda x: x + 1, torch.ones(2, 4)),
    "dtype": (lambda x: x + 1, torch.ones(2, 3, dtype=torch.float64)),
    "stride": (lambda x: x + 1, torch.ones(3, 2).t()),
    "requires grad": (lambda x: x + 1, torch.ones(2, 3, requires_grad=True)),
    "two tensors in one": (lambda x: x + 1, TwoTensor(torch.ones(2, 3), torch.ones(2, 3))),
    "complex": (lambda x: x + 1, torch.ones(2, 3) + 0j),
    "conjugate": (lambda x: x + 1, (torch.ones(2, 3) + 0j).conj()),
    "to be negated": (lambda x: x + 1, torch._neg_view(torch.ones(2, 3))),
}


def test_key_is_a_hash_of_the_graph_not_of_names() -> None:
    """Two spellings of one graph have one key."""
    assert key(lambda x: x + 1, X) == key(lambda y: y + 1, torch.zeros(2, 3))
    assert len(key(lambda x: x + 1, X)) == 64


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_key_changes_with_everything_that_matters(variant) -> None:
    """Arguments, shapes, dtypes, strides."""
    assert key(*variant) != key(lambda x: x + 1, X)


def test_keys_of_all_variants_differ() -> None:
    """No two collide."""
    assert len({key(*variant) for variant in VARIANTS.values()}) == len(VARIANTS)


def test_key_changes_with_the_policy_but_not_with_the_name() -> None:
    """Options are part of it; what the user calls the model is not."""
    plain = key(lambda x: x + 1, X)
    loud = [{name: "raise"} for name in ("on_exhausted", "on_pass_error", "on_runtime_error")]
    sampled = [{"verify": "sample"}, {"verify": {"when": "sample", "every": 7}}]
    keys = {plain, *(key(lambda x: x + 1, X, **options) for options in (*loud, *sampled))}
    assert len(keys) == 6
    assert key(lambda x: x + 1, X, model="other name") == plain


def test_key_tells_a_number_that_the_graph_is_made_for_from_one_that_varies() -> None:
    """What fails for a symbol that is 1 is not remembered of other numbers."""
    torch.compiler.reset()
    repeated = compiled(lambda x, n: x[:n] * n, "eager", dynamic=True)
    for number in (1, 2):
        repeated(X, number)
    one, many = (each.graph_key for each in composer.reports()[-2:])
    assert one != many


@pytest.mark.parametrize("other", [torch.ones(4, 3), torch.ones(2, 3, dtype=torch.float64)])
def test_key_of_a_graph_without_dynamo_changes_with_its_inputs(other) -> None:
    """Nothing but the inputs says what such a graph is compiled for."""
    backend = torch._dynamo.lookup_backend("composer")

    def direct_key(x: torch.Tensor) -> str:
        gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Softmax(1)))
        backend(gm, [x], options={"chain": ["eager"]})
        return last().graph_key

    assert direct_key(X) == direct_key(torch.zeros(2, 3))
    assert direct_key(X) != direct_key(other)


def test_key_is_equal_in_another_process(run_python, fresh_python) -> None:
    """Whatever the hash seed."""
    code = (
        "import torch, composer\n"
        "f = torch.compile(lambda x: torch.nn.functional.gelu(x @ x.t()), backend='composer',"
        " options={'chain': ['eager']}, dynamic=True)\n"
        "f(torch.ones(3, 4)); print(composer.reports()[0].graph_key)"
    )
    seeded = fresh_python(code, env={"PYTHONHASHSEED": "2"})
    keys = {run_python(code).stdout, seeded.stdout}
    assert len(keys) == 1
    assert len(keys.pop().strip()) == 64
    assert os.environ.get("PYTHONHASHSEED") != "2"


def test_ranks_know_a_graph_by_a_key_without_the_numbers_of_their_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has a GPU of its own; without other ranks there is no such key."""

    def keys(*devices: Any) -> Any:
        gm = torch.fx.symbolic_trace(lambda x: tuple(x.to(each) for each in devices))
        request = with_key(capture.read_request(gm, [torch.ones(2)]), None, "", "")
        return request.graph_key, request.key_among_ranks

    assert keys("cuda:1")[1] == ""
    monkeypatch.setattr(_torch.ranks, "world_size", lambda: 2)
    for kind in (str, torch.device):
        zero, one = (keys(kind(f"cuda:{number}")) for number in (0, 1))
        assert zero[0] != one[0]
        assert zero[1] == one[1]
    assert keys("cuda:0", "cuda:0")[1] != keys("cuda:0", "cuda:1")[1]
    assert keys("cuda:2", "cuda:3")[1] == keys("cuda:0", "cuda:1")[1]
