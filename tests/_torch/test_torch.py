"""One test per name borrowed from torch's private side: an upgrade fails with what moved."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import os
import pkgutil
import random
import signal
import subprocess
import sys
import traceback
import types
import weakref
from typing import Any

import pytest
import torch
from common import fault_of, needs_torch, thorough, upstream
from engines import honest
from torch._dynamo import convert_frame
from torch._functorch import compile_utils
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._prims.rng_prims import run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._triton import has_triton_package

from composer import _torch
from composer.graphs import clones


def capture(function, *args, dynamic=None, backend=None):
    """What ``probe(gm, example_inputs)`` returns inside a compile of ``function``."""
    seen = []

    def spy(gm, example_inputs):
        seen.append(backend(gm, example_inputs))
        return gm.forward

    torch.compile(function, backend=spy, dynamic=dynamic)(*args)
    return seen


def test_lookup_backend_raises_invalid_backend_for_a_name_nobody_registered() -> None:
    """The registry's error is the one we catch."""
    with pytest.raises(_torch.dynamo.InvalidBackend):
        _torch.dynamo.lookup_backend("nobody_registers_this")


def test_kinds_of_devices_say_whether_this_process_is_a_bad_fork() -> None:
    """All of those that are asked; what one says after a fork needs a card."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        assert device._is_in_bad_fork() is False
    assert not _torch.compiles.is_in_bad_fork()


def test_list_backends_includes_the_debugging_ones() -> None:
    """Slips of debugging backends are recognised too."""
    assert {"inductor", "aot_eager", "eager", "composer", "onnxrt"} <= set(
        _torch.dynamo.list_backends()
    )


def test_registered_backend_is_a_function_and_loads_no_entry_point() -> None:
    """``None`` for a name that nobody registered."""
    torch._dynamo.lookup_backend("aot_eager")
    assert callable(_torch.dynamo.registered_backend("aot_eager"))
    assert _torch.dynamo.registered_backend("nobody's") is None


def test_torch_itself_registers_neither_onnxrt_nor_tensorrt() -> None:
    """The placeholders are commented out; were they back, composer's table had to change."""
    assert _torch.dynamo.lookup_backend("onnxrt").__module__ == "composer.backends.onnxrt"
    with pytest.raises(_torch.dynamo.InvalidBackend):
        _torch.dynamo.lookup_backend("tensorrt")


def test_compile_id_is_dynamos_and_none_outside() -> None:
    """``"0/0"`` inside of the first compile."""
    assert _torch.dynamo.compile_id() is None
    assert capture(torch.sin, torch.ones(2), backend=lambda *_: _torch.dynamo.compile_id()) == [
        "0/0"
    ]


TRACE = """
import os, pathlib, sys
import torch
from composer import _torch
print(_torch.dynamo.structured_trace_is_on())
_torch.dynamo.trace_artifact("found_it", "string", "a text", "3/1")
_torch.dynamo.trace_artifact("and_this", "json", "[1]", "direct")
folder = pathlib.Path(os.environ.get("TORCH_TRACE", "nowhere"))
print("".join(log.read_text() for log in folder.glob("*.log")))
"""


def test_structured_trace_takes_artifacts(tmp_path, fresh_python) -> None:
    """A line with the name and the compile id, then the text; without an id where there is none."""
    is_on, log = fresh_python(TRACE, env={"TORCH_TRACE": str(tmp_path)}).stdout.split("\n", 1)
    assert is_on == "True"
    assert '{"artifact": {"name": "found_it", "encoding": "string"}, "frame_id": 3, ' in log
    assert '"frame_compile_id": 1' in log
    assert "\ta text\n" in log
    assert '"name": "and_this", "encoding": "json"}, "stack"' in log


def test_structured_trace_is_off_by_default(run_python) -> None:
    """Even before torch has taken its handler away."""
    assert run_python(TRACE).stdout.split() == ["False"]


def test_traced_frame_is_none_outside_of_a_compile() -> None:
    """A direct call of a backend has no frame."""
    assert _torch.dynamo.traced_frame() is None


def test_traced_frame_is_the_users_code() -> None:
    """Code, locals and module of the function being compiled."""

    def double(x):
        return x * 2

    ((code, scope, module),) = capture(
        double, torch.ones(2), backend=lambda *_: _torch.dynamo.traced_frame()
    )
    assert code is double.__code__
    assert set(scope) == {"x"}
    assert module == __name__


def test_traced_frame_after_a_graph_break_is_the_same_code() -> None:
    """Dynamo's resume functions lead back to the user's."""

    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    frames = capture(broken, torch.ones(2), backend=lambda *_: _torch.dynamo.traced_frame())
    assert [code for code, _, _ in frames] == [broken.__code__] * 2
    assert "x" in frames[1][1]


def test_called_frame_is_that_of_what_was_compiled_behind_a_break_in_what_it_calls() -> None:
    """Where Dynamo traces the inner function's frame by itself."""

    class Inner(torch.nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x * 2

    inner = Inner()

    def outer(x):
        return inner(x + 1) + 1

    def frames(*_):
        return _torch.dynamo.traced_frame()[0], _torch.dynamo.called_frame()[0]

    seen = capture(outer, torch.ones(2), backend=frames)
    assert {called for _, called in seen} == {outer.__code__}
    assert {traced for traced, _ in seen} == {outer.__code__, Inner.forward.__code__}
    assert _torch.dynamo.called_frame() is None


def test_is_generated_tells_the_code_of_dynamo_from_the_users() -> None:
    """The frame in which a compiled graph is called runs Dynamo's copy of the function."""
    seen: list[list[types.CodeType]] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Any:
        def run(*args: Any) -> Any:
            stack = traceback.walk_stack(sys._getframe())
            seen.append([frame.f_code for frame, _ in stack])
            return gm(*args)

        return run

    def double(x):
        return x * 2

    torch.compile(double, backend=backend)(torch.ones(2))
    generated = [code for code in seen[0] if _torch.dynamo.is_generated(code)]
    assert [code.co_name for code in generated] == ["double"]
    assert not _torch.dynamo.is_generated(double.__code__)


def test_is_static_input_marks_parameters_and_buffers_only() -> None:
    """Dynamo's mark tells weights from inputs."""
    seen = capture(
        torch.nn.BatchNorm1d(3).eval(),
        torch.ones(2, 3),
        backend=lambda gm, _: [
            _torch.dynamo.is_static_input(n) for n in gm.graph.find_nodes(op="placeholder")
        ],
    )
    assert sorted(seen[0]) == [False, True, True, True, True]


@upstream
def test_dynamo_still_keeps_sources_outside_of_meta() -> None:
    """The attributes that ``carry_source_metadata`` re-attaches; gone, the function can go."""

    def probe(gm, _):
        sources = all(hasattr(n, "_dynamo_source") for n in gm.graph.find_nodes(op="placeholder"))
        return sources, hasattr(gm, "_param_name_to_source"), hasattr(gm, "_source_to_user_stacks")

    assert capture(torch.sin, torch.ones(2), backend=probe) == [(True, True, True)]


def test_a_mode_forgets_the_tensors_that_it_has_met() -> None:
    """No weak reference is left at them."""
    mode, tensor = FakeTensorMode(), torch.ones(2)
    fake = mode.from_tensor(tensor)
    assert weakref.getweakrefs(tensor)
    assert weakref.getweakrefs(tensor.untyped_storage())
    _torch.fakes.forget_met(mode)
    assert not weakref.getweakrefs(tensor)
    assert mode.from_tensor(tensor) is not fake


def test_copies_of_a_graph_have_no_real_inputs() -> None:
    """Dynamo's own graph has some until its compile is over."""

    def left(gm, _):
        twin = clones.clone_graph(gm)
        return [
            ["grapharg" in node.meta for node in each.graph.find_nodes(op="placeholder")]
            for each in (gm, twin)
        ]

    assert capture(torch.sin, torch.ones(2), backend=left) == [[[True], [False]]]


def test_share_fake_gives_the_copy_the_originals_fake() -> None:
    """AOTAutograd fakes by identity; the copy must meet the original's symbols."""

    def probe(gm, example_inputs):
        (original,) = (v for v in example_inputs if isinstance(v, torch.Tensor))
        copy = original.clone()
        _torch.fakes.share_fake(original, copy)
        mode = torch._guards.TracingContext.get().fake_mode
        return mode.from_tensor(copy) is mode.from_tensor(original), str(
            mode.from_tensor(copy).shape
        )

    ((same, shape),) = capture(torch.sin, torch.ones(3), dynamic=True, backend=probe)
    assert same
    assert "s" in shape


def test_share_fake_outside_of_a_compile_does_nothing() -> None:
    """A direct call has no fake mode."""
    _torch.fakes.share_fake(torch.ones(2), copy := torch.zeros(2))
    assert copy.sum() == 0


def test_fake_of_fixed_size_is_what_aotautograd_meets() -> None:
    """It gives a tensor that Dynamo has not seen symbols of its own, where sizes are dynamic."""

    def probe(gm, example_inputs):
        other, unknown = torch.ones(3, 5), torch.ones(3, 5)
        fake = _torch.fakes.fake_of_fixed_size(other)
        mode = torch._guards.TracingContext.get().fake_mode
        return mode.from_tensor(other) is fake, list(fake.shape), str(mode.from_tensor(unknown))

    ((same, sizes, unknown),) = capture(torch.sin, torch.ones(3, 4), dynamic=True, backend=probe)
    assert same
    assert sizes == [3, 5]
    assert "s" in unknown.partition("size=")[2]
    assert _torch.fakes.fake_of_fixed_size(torch.ones(2)) is None


def test_a_placeholder_that_was_added_needs_a_word_on_its_source() -> None:
    """``None`` will do; only where the others have one."""

    def add(captured, example_inputs):
        gm = clones.clone_graph(captured)
        known = gm.graph.find_nodes(op="placeholder")[-1]
        with gm.graph.inserting_after(known):
            added = gm.graph.placeholder("more")
        with pytest.raises(AssertionError, match="must have _dynamo_source"):
            honest(gm, [*example_inputs, torch.ones(2)])
        _torch.sources.carry_no_source(known, added)
        return honest(gm, [*example_inputs, torch.ones(2)])(torch.zeros(2), torch.ones(2))

    ((got,),) = capture(torch.cos, torch.zeros(2), backend=add)
    assert torch.equal(got, torch.ones(2))
    node, added = torch.fx.Graph().placeholder("a"), torch.fx.Graph().placeholder("b")
    _torch.sources.carry_no_source(node, added)
    assert not hasattr(added, "_dynamo_source")


def test_what_float32_is_computed_in_is_told_and_put_back(newer_precision: None) -> None:
    """By either way of saying it, and by each backend; the word is empty where it is none."""
    newer = _torch.modes.float32_precision()
    assert newer[0] == ""
    torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    other = _torch.modes.float32_precision()
    assert other != newer
    torch.set_float32_matmul_precision("high")
    word = _torch.modes.float32_precision()
    assert word[0] == "high"
    for each in (newer, other, word):
        _torch.modes.set_float32_precision(each)
        assert _torch.modes.float32_precision() == each


def test_autocasts_name_each_device_that_has_one() -> None:
    """With the dtype; none outside of a region."""
    assert _torch.modes.autocasts() == []
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.modes.autocasts() == [("cpu", torch.bfloat16)]


def test_multiplies_bf16_asks_torch_which_arithmetic_there_is(monkeypatch) -> None:
    """One kind of instruction is enough."""
    assert isinstance(_torch.processor.multiplies_bf16(), bool)
    for found in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cpu, "get_capabilities", lambda found=found: {"amx_bf16": found})
            assert _torch.processor.multiplies_bf16() is found


def test_storage_id_is_shared_by_views_and_copy_storage_is_apart() -> None:
    """The two storage helpers agree with torch on what memory is."""
    x = torch.ones(4)
    assert _torch.tensors.storage_id(x[1:]) == _torch.tensors.storage_id(x)
    twin = _torch.tensors.copy_storage(x.untyped_storage())
    assert twin.data_ptr() != x.untyped_storage().data_ptr()
    assert twin.nbytes() == 16


def test_versions_are_put_back() -> None:
    """A view has the version of its base, and a later write counts from the old version."""
    x = torch.zeros(4)
    x.add_(1)
    x[:2].add_(1)
    _torch.tensors.put_back_versions([(x, 1), (torch.ones(1), 0)])
    assert (x._version, x[:2]._version) == (1, 1)
    x.add_(1)
    assert x._version == 2


def test_memory_is_gone_when_nobody_has_it_any_more() -> None:
    """Whatever becomes of the tensor that it was asked for."""
    tensor = torch.ones(3)
    gone, other = _torch.tensors.memory_gone(tensor), tensor.detach()
    tensor.data = torch.zeros(3)
    assert not gone()
    del other
    assert gone()
    assert not _torch.tensors.memory_gone(tensor)()


def test_storage_id_looks_into_the_tensors_of_transforms() -> None:
    """A row under ``vmap``, and what ``grad`` follows, within each other too."""
    x = torch.ones(2, 4)
    seen = []

    def note(row: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.tensors.storage_id(row))
        return row.sum()

    torch.func.vmap(note)(x)
    torch.func.grad(note)(x)
    torch.func.vmap(torch.func.grad(note))(x)
    assert seen == [_torch.tensors.storage_id(x)] * 3


def test_settled_forward_of_a_lazy_graph_module_is_generated_code() -> None:
    """Not ``_lazy_forward``, which goes through ``__call__`` each time."""
    names = capture(
        torch.sin, torch.ones(2), backend=lambda gm, _: _torch.sources.settled_forward(gm).__name__
    )
    assert names == ["forward"]


def test_undisabled_finds_the_callable_within() -> None:
    """``torch.compiler.disable`` keeps the original where we look for it."""

    def run(x):
        return x

    assert _torch.breaks.undisabled(_torch.breaks.disabled(run)) is run
    assert _torch.breaks.undisabled(run) is run
    module = torch.nn.Linear(2, 2)
    assert _torch.breaks.undisabled(torch.compiler.disable(module)) is module
    compiled = torch.compile(module, backend="eager")
    assert _torch.breaks.undisabled(compiled) is compiled


def test_undisabled_leaves_a_compiled_function_alone() -> None:
    """``torch.compile`` keeps its original in the same place; off with it, off with the engine."""
    function = torch.compile(lambda x: x + 1, backend="eager")
    assert _torch.breaks.undisabled(function) is function


def test_dynamo_takes_our_wrapper_off_before_it_puts_on_its_own() -> None:
    """One wrapper a call, not two: each costs as much as composer's whole guard."""
    once = _torch.breaks.disabled(lambda x: x)
    assert _torch.breaks.undisabled(_torch.breaks.disabled(once)) is _torch.breaks.undisabled(once)


def test_backward_lowering_at_once_compiles_the_backward_in_the_backend_call() -> None:
    """Without the patch the backward compiles at the first ``.backward()``."""
    stages = []

    def compiler(gm, example_inputs):
        stages.append("compiled")
        return gm.forward

    def backend(gm, example_inputs):
        from torch._dynamo.backends.common import aot_autograd

        with _torch.aot.backward_lowering_at_once():
            return aot_autograd(fw_compiler=compiler)(gm, example_inputs)

    torch.compile(torch.sin, backend=backend)(torch.ones(2, requires_grad=True))
    assert stages == ["compiled", "compiled"]


def test_backend_of_cuda_graphs_raises_where_it_can_make_none() -> None:
    """By itself it runs the graph without one (torch 2.13)."""
    backend = torch._dynamo.lookup_backend("cudagraphs")
    assert type(backend).__module__ == _torch.inductor.CUDAGRAPHS
    with (
        _torch.inductor.cudagraphs_or_error(),
        pytest.raises(Exception, match="skipping cudagraphs due to"),
    ):
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    torch.compiler.reset()
    assert torch.compile(torch.sin, backend=backend)(torch.ones(2)).isfinite().all()


def test_inductor_config_is_what_torch_compile_would_use() -> None:
    """Modes stand for Inductor's own settings."""
    assert _torch.inductor.inductor_config(None, {}) == {}
    assert _torch.inductor.inductor_config("max-autotune-no-cudagraphs", {})["max_autotune"] is True
    assert _torch.inductor.inductor_config(None, {"freezing": True}) == {"freezing": True}
    with pytest.raises(RuntimeError, match="Unexpected type"):
        _torch.inductor.inductor_config(None, {"freezing": "yes"})


def test_constants_of_inductors_code_are_let_go() -> None:
    """Torch keeps the modules of code that it loaded, but for those loaded within."""
    from torch._inductor.codecache import PyCodeCache

    key, path = PyCodeCache.write("def call():\n    return weight\n")
    with _torch.inductor.constants_let_go():
        module = PyCodeCache.load_by_key_path(key, path, attrs={"weight": 1})
        assert module in PyCodeCache.modules
    assert module not in PyCodeCache.modules
    assert module.__name__ not in sys.modules
    assert module.call() == 1


def test_fakes_met_are_those_of_the_compile_with_its_symbols() -> None:
    """What is compiled for them later has the symbols, and one fake mode."""
    met = []

    def probe(gm, inputs):
        met.extend(_torch.fakes.fakes_met(inputs))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=probe, dynamic=True)(torch.ones(5))
    symbol, fake = met
    assert isinstance(symbol, torch.SymInt)
    assert fake.shape[0].node.expr == symbol.node.expr
    with _torch.compiles.recompiling(met):
        assert _torch.fakes.fakes_met(met)[1] is fake
    (outside,) = _torch.fakes.fakes_met([torch.ones(2)])
    assert isinstance(outside, _torch.fakes.FakeTensor)


def test_the_lock_of_compiles_may_be_taken_twice_by_one_thread() -> None:
    """Code is made anew under it, which compiles, which takes it."""
    with _torch.compiles.compile_lock, _torch.compiles.compiling():
        assert _torch.compiles.compile_lock._is_owned()


def test_inductor_options_are_listed() -> None:
    """The names that a slip is compared with."""
    assert "freezing" in _torch.inductor.inductor_options()


def test_is_marked_by_program_tells_caches_from_what_modules_hold() -> None:
    """Dynamo's own marks are on parameters, buffers and other tensors of modules."""
    marked: list[bool] = []
    cache, linear = torch.ones(3), torch.nn.Linear(3, 3)
    linear.register_buffer("shift", torch.ones(3))
    linear.scale = torch.ones(3)
    torch._dynamo.mark_static_address(cache)

    def probe(gm, inputs):
        placeholders = gm.graph.find_nodes(op="placeholder")
        marked.extend(map(_torch.dynamo.is_marked_by_program, placeholders))
        return [each is cache for each in inputs]

    def f(x, entries):
        return linear(x * linear.scale + linear.shift) + entries["keys"]

    assert capture(f, torch.ones(3), {"keys": cache}, backend=probe) == [marked]
    assert (marked.count(True), len(marked)) == (1, 6)


def test_owner_of_buffer_is_the_module_that_dynamo_read_it_from() -> None:
    """``None`` for parameters and inputs, and outside of a compile."""
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).eval()
    placeholders = []

    def probe(gm, _):
        placeholders.extend(gm.graph.find_nodes(op="placeholder"))
        return [_torch.dynamo.owner_of_buffer(node) for node in placeholders]

    ((*owners,),) = capture(norm, torch.ones(2, 3), backend=probe)
    assert sum(owner is norm[0] for owner in owners) == 2
    assert owners.count(None) == 3
    assert all(_torch.dynamo.owner_of_buffer(node) is None for node in placeholders)
    assert isinstance(norm[0], _torch.tensors.BATCH_NORMS)


def test_is_random_number_knows_what_python_draws() -> None:
    """At each call, and Dynamo passes it as float64, whatever it captured before torch 2.15."""
    found, passed = [], []

    def probe(gm, example_inputs):
        nodes = gm.graph.find_nodes(op="placeholder")
        pairs = zip(nodes, example_inputs, strict=True)
        found.extend((_torch.dynamo.is_random_number(node), value.dtype) for node, value in pairs)
        return lambda *args: passed.extend(each.dtype for each in args) or gm(*args)

    torch.compile(lambda x: x + random.uniform(0, 1), backend=probe)(torch.ones(2))
    with fault_of("torch", before="2.15"):
        assert (True, torch.float32) in found
    assert [is_drawn for is_drawn, _ in found].count(True) == 1
    assert set(passed) == {torch.float32, torch.float64}


def test_hint_is_the_first_calls_size() -> None:
    """A symbolic size remembers the value it was captured with."""

    def probe(gm, _):
        symbols = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        return [_torch.symbols.hint(s) for s in symbols if isinstance(s, torch.SymInt)]

    assert capture(torch.sin, torch.ones(5), dynamic=True, backend=probe) == [[5]]
    assert _torch.symbols.hint(7) == 7


def test_hint_is_that_of_the_call_for_which_a_graph_is_compiled_again() -> None:
    """And the first call's again when that is over."""

    def probe(gm, _):
        return gm

    (gm,) = capture(lambda x: x.view(-1, 2).sin(), torch.ones(6, 4), dynamic=True, backend=probe)
    nodes = gm.graph.find_nodes(op="placeholder")
    size = next(n.meta["example_value"] for n in nodes if n.type is not torch.Tensor)
    later = [8 if isinstance(n.meta["example_value"], torch.SymInt) else None for n in nodes]
    with _torch.compiles.recaptured(
        gm, [torch.ones(8, 4) if each is None else each for each in later]
    ):
        assert _torch.symbols.hint(size) == 8
    assert _torch.symbols.hint(size) == 6


def test_mutated_inputs_are_empty_outside_of_a_compile() -> None:
    """Nothing was traced, nothing is known to be written to."""
    assert _torch.aot.mutated_inputs() == frozenset()


def test_aot_compile_and_mutated_inputs_see_what_the_graph_writes_to() -> None:
    """AOTAutograd's metadata name the written inputs while its compiler runs."""
    seen = []

    def add_in_place(x, y):
        y.add_(x)
        return y * 2

    def compiler(gm, fakes):
        seen.append(_torch.aot.mutated_inputs())
        return gm.forward

    def backend(gm, example_inputs):
        same = dict.fromkeys(("forward", "backward", "inference"), compiler)
        same["partition"] = _torch.aot.min_cut
        return _torch.aot.aot_compile(gm, example_inputs, **same, decompositions={})

    x, y = torch.ones(2), torch.ones(2)
    result = torch.compile(add_in_place, backend=backend)(x, y)
    assert seen == [frozenset({1})] or seen == [frozenset({0})]
    assert torch.equal(result, torch.full((2,), 4.0))


def test_copied_back_says_which_output_is_an_inputs_new_value() -> None:
    """While AOTAutograd's compiler runs, and nothing outside of it."""
    seen = []

    def writes(x, y):
        y.add_(x)
        x.mul_(2)
        return y * 2

    def compiler(gm, fakes):
        (returned,) = gm.graph.find_nodes(op="output")
        inputs = [node.meta["val"].shape for node in gm.graph.find_nodes(op="placeholder")]
        outputs = [node.meta["val"].shape for node in returned.args[0]]
        seen.append([(outputs[at], inputs[i]) for at, i in _torch.aot.copied_back().items()])
        return _torch.aot.boxed(gm.forward)

    def backend(gm, example_inputs):
        same = dict.fromkeys(("forward", "backward", "inference"), compiler)
        same["partition"] = _torch.aot.min_cut
        return _torch.aot.aot_compile(gm, example_inputs, **same, decompositions={})

    with torch.no_grad():
        torch.compile(writes, backend=backend)(torch.ones(3, 1), torch.ones(3, 2))
    (pairs,) = seen
    assert sorted(pairs) == [((3, 1), (3, 1)), ((3, 2), (3, 2))]
    assert _torch.aot.copied_back() == {}


def test_sizes_are_the_same_where_the_graph_says_so_and_no_guard_is_added() -> None:
    """Numbers, and symbols that are one expression."""
    environment = ShapeEnv()
    a, b = (environment.create_unbacked_symint() for _ in range(2))
    assert _torch.symbols.is_same_size(a + 1, 1 + a)
    assert not _torch.symbols.is_same_size(a, b)
    assert not _torch.symbols.is_same_size(a, 3)
    assert (_torch.symbols.is_same_size(3, 3), _torch.symbols.is_same_size(3, 4)) == (True, False)
    assert environment.guards == []


def test_aot_compile_makes_a_forward_and_a_backward_before_it_returns() -> None:
    """In this order, functional, and called with one list each."""
    stages = []

    def stage(name):
        def compiler(gm, fakes):
            stages.append(name)
            return _torch.aot.boxed(gm.forward)

        return compiler

    def backend(gm, example_inputs):
        stages.append("asked")
        names = ("forward", "backward", "inference")
        compilers = {name: stage(name) for name in names} | {"partition": _torch.aot.min_cut}
        compiled = _torch.aot.aot_compile(gm, example_inputs, **compilers, decompositions={})
        stages.append("done")
        return compiled

    x = torch.ones(2, requires_grad=True)
    torch.compile(torch.sin, backend=backend)(x).sum().backward()
    assert stages == ["asked", "forward", "backward", "done"]
    torch.testing.assert_close(x.grad, torch.cos(x.detach()))


def test_argument_reads_a_schemas_value() -> None:
    """Given by position, by name, or left to its default."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    add = torch.ops.aten.add.Tensor
    assert _torch.operators.argument(graph.call_function(add, (x, x)), "alpha") == 1
    assert _torch.operators.argument(graph.call_function(add, (x, x), {"alpha": 3}), "alpha") == 3
    assert _torch.operators.argument(graph.call_function(add, (x, x)), "other") is x
    assert _torch.operators.argument(graph.call_function(add, (x, x)), "dropout_p") is None


def test_untraced_calls_are_not_recorded() -> None:
    """Nor decomposed: a decomposition asks what the operator itself gives."""

    def sine(x: torch.Tensor) -> torch.Tensor:
        with _torch.canonical.untraced():
            torch.sin(x)
        return torch.cos(x)

    table = {torch.ops.aten.sin.default: sine}
    made = proxy_tensor.make_fx(torch.sin, table, tracing_mode="fake")(torch.ones(3))
    _, called, _ = made.graph.nodes
    assert called.target is torch.ops.aten.cos.default


def test_onnx_translator_knows_what_the_exporter_knows() -> None:
    """Registry, decompositions, and the batch norm that torchlib exports wrongly."""
    translator = _torch.exporter.OnnxTranslator()
    aten = torch.ops.aten
    assert _torch.operators.registry_name(aten.relu.default) in translator.translated
    assert _torch.operators.registry_name(aten.nonzero_static.default) not in translator.translated
    assert aten.silu_backward.default in _torch.exporter.onnx_decompositions(translator.known)
    assert callable(
        _torch.operators.decomposition_of(aten._native_batch_norm_legit_functional.default)
    )
    assert _torch.operators.operator_name(aten.relu.default) == "aten::relu"
    assert _torch.operators.operator_name(len) == ""
    assert _torch.operators.is_view(aten.view.default)
    assert not _torch.operators.is_view(aten.relu.default)


@pytest.mark.slow
def test_table_made_without_the_exporter_is_the_exporters_own() -> None:
    """The same operators with the same functions, by words that tell all of them apart."""
    from torch.onnx._internal.exporter import _decomp, _registration

    with _torch.exporter._quiet(_registration.logger):
        registry = _registration.ONNXRegistry.from_torchlib()
    known = _decomp.get_onnx_implemented_overloads(registry)
    words = frozenset(map(_torch.operators.registry_name, known))
    assert len(words) == len(set(known))
    assert _torch.exporter.OnnxTranslator().known >= words
    theirs = _decomp.create_onnx_friendly_decomposition_table(set(known))
    ours = _torch.exporter.onnx_decompositions(words)
    assert ours.keys() == theirs.keys()
    assert all(map(_same_function, ours.values(), map(theirs.__getitem__, ours)))


def _same_function(a: Any, b: Any) -> bool:
    """Torch makes a new partial each time for an operator that decomposes by itself."""
    return a is b or (a.func.__code__, a.keywords) == (b.func.__code__, b.keywords)


def test_functions_of_torch_have_a_path_and_no_others() -> None:
    """Builtins, Python functions, those chosen by a flag; not what stands in their place."""
    functional = torch.nn.functional
    assert _torch.operators.path_in_torch(functional.layer_norm) == "torch.nn.functional.layer_norm"
    assert _torch.operators.path_in_torch(functional.max_pool2d) == "torch.nn.functional.max_pool2d"
    assert _torch.operators.path_in_torch(functional.gelu) == "torch._C._nn.gelu"
    assert _torch.operators.path_in_torch(operator.add) == "_operator.add"
    assert _torch.operators.path_in_torch(torch.relu) not in (
        None,
        _torch.operators.path_in_torch(torch.tanh),
    )

    @functools.wraps(functional.layer_norm)
    def pretender(*args: Any) -> None: ...

    assert _torch.operators.path_in_torch(pretender) is None
    assert _torch.operators.path_in_torch(test_functions_of_torch_have_a_path_and_no_others) is None
    assert _torch.operators.path_in_torch(functools.partial(torch.relu)) is None


def test_methods_of_tensors_are_torchs_own_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in C and in Python; not what somebody puts in their place, or what is none."""
    assert _torch.operators.is_method_of_torch("view")
    assert _torch.operators.is_method_of_torch("__add__")
    assert _torch.operators.is_method_of_torch("norm")
    assert not _torch.operators.is_method_of_torch("shape")
    monkeypatch.setattr(torch.Tensor, "norm", lambda x: x)
    assert not _torch.operators.is_method_of_torch("norm")


def test_modes_that_watch_are_seen() -> None:
    """Of functions and of operators."""
    assert not _torch.modes.is_watched()
    with torch.device("cpu"):
        assert _torch.modes.is_watched()
    with _torch.fakes.FakeTensorMode():
        assert _torch.modes.is_watched()


def test_errors_of_the_systems_compiler_are_told() -> None:
    """That it failed, or that there is none; nothing else of Inductor's."""
    from torch._inductor import exc

    assert _torch.inductor.is_compilers(exc.CppCompileError(["g++"], "Python.h: No such file"))
    assert _torch.inductor.is_compilers(exc.InvalidCxxCompiler())
    assert not _torch.inductor.is_compilers(exc.SubgraphLoweringException())


def test_tracing_state_tells_settings_apart() -> None:
    """Grad mode, autocast, the choice of attention, AOTAutograd's own config; else it is equal."""
    from torch._functorch import config

    usual = _torch.aot.tracing_state()
    assert _torch.aot.tracing_state() == usual
    with torch.no_grad():
        assert _torch.aot.tracing_state() != usual
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.aot.tracing_state() != usual
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _torch.aot.tracing_state() != usual
    with config.patch(functionalize_rng_ops=True):
        assert _torch.aot.tracing_state() != usual


def test_tracing_state_tells_float32_apart(newer_precision: None) -> None:
    """By the newer settings as well, which decide numbers."""
    usual = _torch.aot.tracing_state()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert _torch.aot.tracing_state() != usual


@pytest.mark.parametrize(
    ("function", "nothing"),
    [
        (lambda x: (torch.relu(x),), True),
        (lambda x: (x.add_(1) * 2,), False),
        (lambda x: (torch.relu(x), x.view(-1)), False),
    ],
    ids=["pure", "writes", "a view of an input"],
)
def test_aot_adds_nothing_to_pure_functions(function: Any, nothing: bool) -> None:
    """It does where an input is written to, and where an output looks at one."""
    told: list[bool] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        outputs = len(gm.graph.find_nodes(op="output")[0].args[0])

        def compiler(functional: torch.fx.GraphModule, _: Any) -> Any:
            told.append(_torch.aot.aot_adds_nothing(outputs))
            return _torch.aot.boxed(functional.forward)

        return _torch.aot.aot_compile(
            *(gm, inputs),
            forward=compiler,
            backward=compiler,
            inference=compiler,
            partition=_torch.aot.min_cut,
            decompositions={},
        )

    assert not _torch.aot.aot_adds_nothing(1)
    torch.compile(function, backend=backend)(torch.ones(2, 3))
    assert told == [nothing]


def test_guards_on_sizes_are_counted() -> None:
    """One more after a question about a symbol; none where all sizes are numbers."""
    counts: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        counts.append(_torch.symbols.guards_on(values))
        assert values[-1].shape[0] < 100
        counts.append(_torch.symbols.guards_on(values))
        return gm.forward

    torch.compile(torch.relu, backend=backend, dynamic=True)(torch.ones(5))
    assert counts[1] == counts[0] + 1
    assert _torch.symbols.guards_on([torch.ones(3), 4]) == 0


def test_questions_about_sizes_may_set_no_guards() -> None:
    """Within ``without_guards`` the answer is that of the first call."""
    told: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        size = values[-1].shape[0]
        before = _torch.symbols.guards_on(values)
        with _torch.symbols.without_guards(size):
            told.append(bool(size < 100))
        told.append(_torch.symbols.guards_on(values) - before)
        assert size < 100
        told.append(_torch.symbols.guards_on(values) - before)
        return gm.forward

    torch.compile(torch.relu, backend=backend, dynamic=True)(torch.ones(5))
    assert told == [True, 0, 1]


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (2, 1, 3)])
def test_empty_allocates_as_torch_does(shape) -> None:
    """Shape, strides and dtype; memory of its own at every call."""
    make = _torch.tensors.empty(shape, torch.bool, torch.device("cpu"))
    made, expected = make(), torch.empty(shape, dtype=torch.bool)
    assert (made.shape, made.stride(), made.dtype) == (shape, expected.stride(), torch.bool)
    assert _torch.tensors.storage_id(made) != _torch.tensors.storage_id(make())


def test_honest_engine_of_the_tests_is_not_the_graph_itself() -> None:
    """The fake that stands for success does real work."""
    x = torch.ones(3)
    assert torch.equal(torch.compile(torch.cos, backend=honest)(x), torch.cos(x))


def test_fresh_compiles_take_nothing_from_the_caches() -> None:
    """Neither of Inductor nor of AOTAutograd; both stand as before behind it."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    def caches():
        return functorch_config.enable_autograd_cache, inductor_config.fx_graph_cache

    before = caches()
    with _torch.inductor.fresh_compiles():
        assert caches() == (False, False)
    assert caches() == before


def test_schemas_say_what_shares_memory_and_what_is_written() -> None:
    """A view shares, a sum does not; ``add_`` writes to its first argument."""
    aten = torch.ops.aten
    assert _torch.operators.shares_memory(aten.view.default)
    assert not _torch.operators.shares_memory(aten.sum.default)
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert _torch.operators.written_by(graph.call_function(aten.add_.Tensor, (x, y))) == [x]
    assert _torch.operators.written_by(graph.call_function(aten.add.Tensor, (x, y))) == []
    assert _torch.operators.written_by(
        graph.call_function(aten._foreach_add_.List, ([x, y], [y, x]))
    ) == [
        x,
        y,
    ]


def test_operators_over_lists_are_loops_over_plain_ones() -> None:
    """The operators that write to the lists are not among them: graphs hold none."""
    aten, loops = torch.ops.aten, _torch.operators.loops_over_lists()
    assert len(loops) > 70
    assert aten._foreach_add_.List not in loops
    trace = proxy_tensor.make_fx(lambda xs: torch._foreach_add(xs, [1.0, 2.0]), loops)
    graph = trace([torch.ones(2), torch.ones(3)]).graph
    calls = graph.find_nodes(op="call_function", target=aten.add.Scalar)
    assert [call.args[1] for call in calls] == [1.0, 2.0]


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (1, 0, 2)])
def test_order_of_memory_is_that_of_a_new_tensor_like_another(order) -> None:
    """Of one with gaps and a repeated dimension, too."""
    x = torch.empty_permuted((3, 4, 5), order)
    for each in (x, x[:, 1:], x[:1].expand(3, -1, -1)):
        made = torch.empty_permuted(each.shape, _torch.tensors.order_of_memory(each))
        assert made.stride() == torch.empty_like(each).stride()


@needs_torch("2.12", "Dynamo leaves the operator as it is")
def test_dynamo_makes_one_operator_of_a_scaled_product_that_is_added() -> None:
    """Where a tensor is written to; eager computes it in two steps."""
    found = []

    def look(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        operator = _torch.operators.multiply_add()
        found.extend(gm.graph.find_nodes(op="call_function", target=operator))
        return gm

    x = torch.ones(2)
    torch.compile(lambda x: x.clone().addcmul_(x, x, value=0.3), backend=look)(x)
    assert len(found) == 1
    assert torch.equal(found[0].target(x, x * 0.1, x), x * 0.1 + x)


def test_checkpoint_ends_its_second_forward_by_an_exception() -> None:
    """It is raised where the last tensor is saved that the backward wants."""
    raised = []

    def saves(x):
        try:
            return x.sin()
        except Exception as error:
            raised.append(type(error))
            raise

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(saves, x, use_reentrant=False).sum().backward()
    assert raised == [_torch.modes.StopRecomputation]


def test_what_is_saved_as_it_is_meets_no_hook() -> None:
    """Also where hooks are forbidden, as they are within ``torch.func``."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda kept: kept):
        with _torch.modes.without_save_hooks():
            x.sin()
        assert seen == []
        x.sin()
        assert len(seen) == 1
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no"),
        _torch.modes.without_save_hooks(),
    ):
        x.sin()


def test_modes_that_were_set_are_put_back_after_an_error() -> None:
    """Grad mode, autocast, the levels of transforms and tangents, and whether hooks may be set.

    How deep autocast is nested, too: else its copies of weights would never be let go of.
    """
    asked = torch._C._autograd

    @_torch.modes.restored_modes()
    def half_a_graph():
        torch._C._set_grad_enabled(False)
        torch._C._set_fwd_grad_enabled(False)
        torch.autocast("cpu", torch.float16, cache_enabled=False).__enter__()
        held = torch.autograd.grad_mode._enter_inference_mode(True)
        within = torch.autograd.grad_mode._enter_inference_mode(True)
        assert torch.is_inference_mode_enabled(), (held, within)
        torch._C._functorch._vmap_increment_nesting(2, "error")
        torch._C._enter_dual_level()
        asked._saved_tensors_hooks_disable("no")
        raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        half_a_graph()
    assert torch.is_grad_enabled()
    assert torch._C._is_fwd_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    assert torch.autocast_decrement_nesting() == -1
    assert torch.autocast_increment_nesting() == 0
    assert not torch.is_inference_mode_enabled()
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert asked._saved_tensors_hooks_is_enabled()
    with forward_ad.dual_level():  # a second one would be refused
        pass


def test_forward_mode_is_seen_and_compiled_anew_for() -> None:
    """Outside of a compile there is nothing to compile anew."""
    seen = []

    def backend(gm, _):
        seen.append(_torch.modes.is_forward_mode())
        _torch.modes.compile_anew_in_forward_mode()
        return gm.forward

    function = torch.compile(torch.sin, backend=backend)
    for _ in range(2):
        function(torch.ones(2))
        with forward_ad.dual_level():
            function(torch.ones(2))
    assert seen == [False, True]
    _torch.modes.compile_anew_in_forward_mode()


def test_modes_that_a_graph_sets_are_told_from_what_it_computes() -> None:
    """No graph without any has its forward wrapped."""

    def set_by(function):
        (found,) = capture(
            function,
            torch.ones(2),
            backend=lambda gm, _: any(
                _torch.modes.sets_modes(node.target) for node in gm.graph.nodes
            ),
        )
        return found

    def regions(x):
        with torch.no_grad():
            return x.sin()

    assert set_by(regions)
    assert set_by(torch.func.vmap(torch.sin))
    assert not set_by(torch.sin)


def test_hooks_are_off_for_a_while_and_in_order_after() -> None:
    """A handle that was given before still takes its own hook off."""
    heard = []
    x = torch.ones(2, requires_grad=True)
    first = x.register_hook(lambda _: heard.append(1))
    x.register_hook(lambda _: heard.append(2))
    with _torch.modes.own_backward([x]):
        x.sin().sum().backward()
    assert heard == []
    x.sin().sum().backward()
    first.remove()
    x.sin().sum().backward()
    assert heard == [1, 2, 2]


def test_operators_say_by_their_schema_whether_they_may_write() -> None:
    """One whose overload is open does if any of them does, but for ``out`` where none is given."""
    graph, aten = torch.fx.Graph(), torch.ops.aten
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for target in (aten.add_.Tensor, aten.add_):
        assert _torch.operators.may_write_by_schema(graph.call_function(target, (x, y)))
    for target in (aten.add.Tensor, aten.add, torch.add):
        assert not _torch.operators.may_write_by_schema(graph.call_function(target, (x, y)))
    assert _torch.operators.may_write_by_schema(graph.call_function(aten.add, (x, y), {"out": x}))


def test_sources_are_named_for_new_buffers_only() -> None:
    """Of a graph of Dynamo's; any other has no sources at all."""
    gm = torch.fx.GraphModule({}, torch.fx.Graph())
    gm.register_buffer("b", torch.ones(1))
    _torch.sources.name_sources(gm)
    assert not hasattr(gm, "_param_name_to_source")
    gm._param_name_to_source = {"a": "theirs"}
    _torch.sources.name_sources(gm)
    assert gm._param_name_to_source["a"] == "theirs"
    assert gm._param_name_to_source["b"].name == "b"


def test_a_lazy_graph_module_generates_its_code_when_called() -> None:
    """Editing and recompiling it costs nothing; it answers as any other."""
    graph = torch.fx.Graph()
    node = graph.call_function(torch.sin, (graph.placeholder("x"),))
    graph.output(node)
    gm = _torch.sources.lazy_graph_module({}, graph, "Named")
    assert type(gm)._needs_recompile()
    node.target = torch.cos
    gm.recompile()
    assert type(gm)._needs_recompile()
    assert torch.equal(gm(torch.ones(2)), torch.cos(torch.ones(2)))
    assert not type(gm)._needs_recompile()


def double(x):
    return x * 2


class Doubles(torch.nn.Module):
    def forward(self, x):
        return x * 2


def test_compiled_as_reads_what_torch_compile_was_given() -> None:
    """From a function, a module, and a module compiled in place; None from anything else."""
    given = {"backend": "composer", "options": {"chain": ["eager"]}}
    function = _torch.breaks.compiled_as(
        torch.compile(double, dynamic=True, fullgraph=True, **given)
    )
    assert (function.original, function.name) == (double, "composer")
    assert function.backend is _torch.dynamo.lookup_backend("composer")
    assert function.options == {"chain": ["eager"]}
    assert (function.mode, function.dynamic, function.fullgraph) == (None, True, True)
    model = Doubles()
    assert _torch.breaks.compiled_as(torch.compile(model, **given)).original is model
    model.compile(**given)
    assert _torch.breaks.compiled_as(model).original.__self__ is model
    assert _torch.breaks.compiled_as(torch.compile(double)).name == "inductor"
    tuned = torch.compile(double, backend="composer", mode="max-autotune")
    assert _torch.breaks.compiled_as(tuned).mode == "max-autotune"
    assert _torch.breaks.compiled_as(torch.compile(double, backend=honest)).backend is honest
    for other in (double, Doubles(), torch.compiler.disable(double), torch.sin, len):
        assert _torch.breaks.compiled_as(other) is None


def test_graph_breaks_are_told_until_the_block_ends() -> None:
    """Message, the traced frames with the innermost last, and whether the function was given up."""

    def broken(x):
        torch._dynamo.graph_break()
        return x.sin()

    def looped(x):
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    def generates(x):
        yield x.sin()

    told, twice = [], []
    with _torch.breaks.graph_breaks_to(lambda *args: told.append(args)):
        with _torch.breaks.graph_breaks_to(lambda *args: twice.append(args)):
            torch.compile(broken, backend="eager")(torch.ones(2))
        torch.compile(looped, backend="eager")(torch.ones(2))
        torch.compile(generates, backend="eager")(torch.ones(2))
    torch.compiler.reset()
    torch.compile(broken, backend="eager")(torch.ones(2))
    assert len(twice) == 1
    assert [(stack[-1].name, skipped) for _, stack, skipped in told] == [
        ("broken", False),
        ("looped", False),
        ("looped", True),
        ("generates", True),
    ]
    assert all(stack[-1].filename == __file__ for _, stack, _ in told)
    assert told[0][0].startswith("Call to `torch._dynamo.graph_break()`\n  Explanation: ")
    assert "\n\n  Developer debug context" in told[0][0]


def test_frames_without_a_graph_are_told_with_their_backend(monkeypatch) -> None:
    """Those that are given up, and the program's own that are skipped or hold nothing."""

    def looped(x):
        for _ in range(2):
            x = x.sin() * helper(2)
            torch._dynamo.graph_break()
        return x

    def helper(number):
        return number + 1

    def adds(number):
        return number + 1

    def disabled_within(x):
        return unseen(x)

    unseen = torch.compiler.disable(double)
    told: list[_torch.breaks.Uncaptured] = []
    converts = torch._dynamo.convert_frame.CatchErrorsWrapper
    monkeypatch.setattr(converts, "__call__", converts.__call__)  # taken back after the test
    _torch.breaks.when_uncaptured(told.append)
    for function, given in ((looped, torch.ones(2)), (adds, 1), (disabled_within, torch.ones(2))):
        torch.compile(function, backend=honest)(given)
    torch.compile(Doubles(), backend=honest)(torch.ones(2))
    assert [each.frame[0].co_name for each in told] == ["looped", "adds", "disabled_within"]
    assert {each.backend for each in told} == {honest}
    assert [each.stack[-1].name for each in told] == ["looped", "adds", "disabled_within"]
    assert [each.given_up for each in told][::2] == [True, False]
    assert all(each.message for each in told[::2])


def test_what_was_given_up_is_tried_again_and_what_was_compiled_stays() -> None:
    """Dynamo leaves code alone, for every backend, once it has given it up."""

    def looped(x):
        for _ in range(2):
            x = x.sin()
            torch._dynamo.graph_break()
        return x

    compiles = []

    def backend(gm, example_inputs):
        compiles.append(gm)
        return gm.forward

    kept = torch.compile(double, backend=backend)
    kept(torch.ones(2))
    given_up = []
    with _torch.breaks.graph_breaks_to(lambda *args: given_up.append(args[2])):
        for _ in range(2):
            torch.compile(looped, backend="eager")(torch.ones(2))
        once = sum(given_up)
        _torch.breaks.forget_given_up()
        torch.compile(looped, backend="eager")(torch.ones(2))
    assert (once, sum(given_up)) == (1, 2)
    kept(torch.ones(2))
    assert len(compiles) == 1


def test_captured_graphs_are_those_of_every_backend() -> None:
    """Counted since the process started; a reset changes nothing."""
    before = _torch.dynamo.captured_graphs()
    torch.compile(double, backend="eager")(torch.ones(2))
    torch.compiler.reset()
    torch.compile(double, backend="composer", options={"chain": ["eager"]})(torch.ones(2))
    assert _torch.dynamo.captured_graphs() == before + 2


@pytest.mark.parametrize(
    "operator",
    [torch.ops.aten.add.Tensor, torch.ops.aten.sin.default, torch.ops.aten.add, "cond"],
)
def test_operators_are_found_by_their_path(operator) -> None:
    """Overloads, packets, and those that take functions; a plain function is none."""
    operator = torch.ops.higher_order.cond if operator == "cond" else operator
    path = _torch.operators.operator_path(operator)
    assert path is not None
    assert pkgutil.resolve_name(path) is operator
    assert _torch.operators.operator_path(torch.sin) is None


def test_operators_that_quantize_are_loaded_when_they_are_needed() -> None:
    """By a module of their own, which torch does not import by itself."""
    _torch.operators.load_quantizing()
    assert _torch.operators.can_quantize()
    x = torch.tensor([-1.0, 0.0, 1.0])
    quantized = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.5, 1, 0, 255, torch.uint8)
    assert quantized.tolist() == [0, 1, 3]


def test_operator_of_a_triton_kernel_has_no_path() -> None:
    """Its kernel is a number in a table of this process."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    with pytest.raises(TypeError, match="only this process knows"):
        _torch.operators.operator_path(triton_kernel_wrapper_mutation)


def test_lasting_metadata_has_the_line_and_the_mark_of_weights() -> None:
    """By which a copy of the graph knows its weights."""
    net = torch.nn.Linear(2, 2)

    def backend(gm, example_inputs):
        kept = [_torch.sources.lasting_metadata(node) for node in gm.graph.nodes]
        copy = torch.fx.Graph().placeholder("x")
        copy.meta.update(next(each for each in kept if "tensor_dict" in each))
        return _torch.dynamo.is_static_input(copy), any("stack_trace" in each for each in kept)

    assert capture(lambda x: net(x).sin(), torch.ones(1, 2), backend=backend) == [(True, True)]


def test_inductor_compiles_a_branch_as_if_captured() -> None:
    """Outside of a compile it fails on such a graph without the context; with it, it need not."""
    found = []
    torch.compile(branch, backend=lambda gm, inputs: found.append(gm) or gm.forward)(torch.ones(2))
    inputs = [torch.ones(2)]
    with _torch.compiles.as_if_captured(inputs):
        compiled = _torch.dynamo.lookup_backend("inductor")(found[0], inputs)
    assert torch.equal(compiled(*inputs)[0], torch.ones(2).sin())


def branch(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def test_graph_that_is_compiled_again_counts_as_a_compile() -> None:
    """Other threads may call compiled functions while FX traces in it."""
    import threading

    called = torch.compile(double, backend="eager")
    called(torch.ones(2))
    answers: list[torch.Tensor] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: answers.append(called(torch.ones(2))))
        thread.start()
        thread.join()
        return x

    gm = torch.fx.symbolic_trace(double)
    with _torch.compiles.recaptured(gm, [torch.ones(2)]):
        assert not torch.compiler.is_compiling()
        torch.fx.symbolic_trace(traced)
    assert torch.equal(answers[0], double(torch.ones(2)))


@upstream
def test_compiled_function_refuses_to_run_while_fx_traces_in_another_thread() -> None:
    """The quirk behind ``_calls_allowed``; when this fails, it can go."""
    import threading

    called = torch.compile(double, backend="eager")
    called(torch.ones(2))
    errors: list[str] = []

    def call() -> None:
        try:
            called(torch.ones(2))
        except RuntimeError as error:
            errors.append(str(error))

    def traced(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return x

    torch.fx.symbolic_trace(traced)
    with fault_of("torch", before="2.14"):
        assert errors
        assert "using FX to symbolically trace" in errors[0]


def test_reset_of_torch_is_told_once_each_time_that_it_is_asked_for() -> None:
    """Torch's own way tells a backend of the first reset only."""
    told: list[int] = []

    def note() -> None:
        told.append(1)

    for _ in range(2):
        _torch.dynamo.at_next_reset(note)
        _torch.dynamo.at_next_reset(note)
        torch.compiler.reset()
    torch.compiler.reset()
    assert len(told) == 2


def test_compiling_holds_dynamos_lock_and_leaves_the_flag_of_all_threads() -> None:
    """A program reads the flag in other threads, which do not compile."""
    from torch._dynamo.convert_frame import compile_lock

    with _torch.compiles.compiling():
        assert not torch.compiler.is_compiling()
        assert compile_lock._is_owned()


def test_group_member_is_none_for_a_process_alone() -> None:
    """As it is for most."""
    assert _torch.ranks.world_size() == 1
    assert _torch.ranks.group_member() is None


def test_group_member_has_the_store_of_the_default_group() -> None:
    """Keys of ours stand below a prefix of ours, next to torch's own."""
    from torch import distributed
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    store = distributed.HashStore()
    distributed.init_process_group("fake", store=store, rank=1, world_size=3)
    try:
        member = _torch.ranks.group_member()
        assert member is not None
        assert (member.rank, member.world, _torch.ranks.world_size()) == (1, 3, 3)
        below = member.store_below("composer/3")
        assert below.compare_set("key", "", "first") == b"first"
        assert below.compare_set("key", "", "second") == b"first"
        assert (below.check(["key"]), below.check(["other"])) == (True, False)
        assert (below.add("count", 0), below.add("count", 1)) == (0, 1)
        assert any(key.endswith("composer/3/key") for key in store.list_keys())
    finally:
        distributed.destroy_process_group()


def test_operator_namespace_tells_collectives() -> None:
    """Dynamo's graphs hold packets, AOTAutograd's overloads."""
    packet = torch.ops._c10d_functional.all_reduce
    assert _torch.operators.operator_namespace(packet) == "_c10d_functional"
    assert _torch.operators.operator_namespace(packet.default) == "_c10d_functional"
    assert _torch.operators.operator_namespace(torch.ops.aten.add) == "aten"
    assert _torch.operators.operator_namespace(torch.sin) == ""


def test_kinds_of_inductors_passes_are_known_with_and_without_their_base() -> None:
    """From torch 2.13 on they have one, and a kind that is told of inference."""
    from torch._inductor import custom_graph_pass

    base = getattr(custom_graph_pass, "CustomPassBase", object)
    assert all(issubclass(kind, base) for kind in _torch.inductor.CUSTOM_PASSES)
    assert issubclass(
        _torch.inductor.CustomInferenceAwareGraphPass, _torch.inductor.CustomGraphPass
    )
    if hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):
        own = custom_graph_pass.CustomInferenceAwareGraphPass
        assert _torch.inductor.CustomInferenceAwareGraphPass is own


def test_backwards_are_guarded_where_they_meet_autograd() -> None:
    """With the functional graph that each was compiled from; only within, and on this thread."""
    seen: list[_torch.backwards.BuiltBackward] = []

    def guard(built: _torch.backwards.BuiltBackward):
        seen.append(built)
        return _torch.aot.takes_a_list(lambda args: [2 * each for each in built.compiled(args)])

    x = torch.randn(3, requires_grad=True)
    with (
        _torch.backwards.backwards_by(guard),
        _torch.aot.backward_lowering_at_once(),
        _torch.aot.without_donated_buffers(),
    ):
        inside = torch.compile(torch.sin, backend="aot_eager")
        inside(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.cos())
    (built,) = seen
    graph = built.graph()
    assert graph is not None
    operators = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert operators == ["aten.cos.default", "aten.mul.Tensor"]
    assert (built.exact, built.donated) == (False, ())
    outside = torch.compile(torch.cos, backend="aot_eager")
    outside(x).sum().backward()
    assert len(seen) == 1


def test_a_programs_fake_tensors_are_told_from_the_compiles_own() -> None:
    """Dynamo hands over the program's as they are; what it compiles with is of its own mode."""
    told: list[bool] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        values = [*example_inputs, _torch.fakes.fake_of_fixed_size(torch.ones(3))]
        told.extend(map(_torch.fakes.is_users_fake, values))
        return gm.forward

    program = torch.compile(torch.sin, backend=backend)
    program(torch.ones(3))
    assert told == [False, False]
    with _torch.fakes.FakeTensorMode() as mode:
        program(mode.from_tensor(torch.ones(3)))
    assert told == [False, False, True, False]


def test_a_backward_knows_whether_its_graph_is_kept() -> None:
    """It is asked for while autograd runs, on autograd's thread."""
    told: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda gradient: told.append(_torch.backwards.keeps_graph()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert told == [True, False]


def test_a_backwards_own_graph_is_found_on_what_was_compiled() -> None:
    """AOTAutograd's wrappers carry the mark on."""
    seen: list[_torch.backwards.BuiltBackward] = []

    def guard(built: _torch.backwards.BuiltBackward):
        seen.append(built)
        return built.compiled

    def plain(functional, _):
        return _torch.aot.boxed(functional.forward)

    def marked(functional, _):
        return _torch.backwards.compiled_from(functional, plain(functional, _))

    def backend(gm, example_inputs):
        return _torch.aot.aot_compile(
            gm,
            example_inputs,
            forward=plain,
            backward=marked,
            inference=plain,
            partition=_torch.aot.min_cut,
            decompositions={},
        )

    with _torch.backwards.backwards_by(guard):
        torch.compile(torch.sin, backend=backend)(torch.ones(2, requires_grad=True))
    assert seen[0].exact


@pytest.mark.parametrize("free", [True, False])
def test_a_buffer_kept_for_free_is_added_to_twice(free: bool) -> None:
    """Torch's own fault; ``keeping_no_weights_for_free`` can go when both are right."""
    linear, total = torch.nn.Linear(8, 8), torch.nn.Buffer(torch.zeros(8))

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.total = linear, total

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            return self.linear(x) * self.total

    x = torch.randn(3, 8)
    with contextlib.nullcontext() if free else _torch.aot.keeping_no_weights_for_free():
        torch.compile(Counting(), backend="aot_eager")(x).sum().backward()
    expected = x.sum(0).outer(x.sum(0))
    assert torch.allclose(linear.weight.grad, expected, atol=1e-5) is not free


@pytest.mark.parametrize("partition", [_torch.aot.min_cut, min_cut_rematerialization_partition])
def test_what_is_drawn_again_for_a_checkpoint_says_what_it_is(partition) -> None:
    """Torch's own partitioner does not; when it does, ``_describe_second_draws`` can go."""
    described = []

    def backward(functional, _):
        (drawn,) = functional.graph.find_nodes(op="call_function", target=run_with_rng_state)
        described.append("val" in drawn.meta and drawn.meta["val"].shape == (2, 3))
        return _torch.aot.boxed(functional.forward)

    def backend(gm, example_inputs):
        return _torch.aot.aot_compile(
            gm,
            example_inputs,
            forward=lambda functional, _: _torch.aot.boxed(functional.forward),
            backward=backward,
            inference=backward,
            partition=partition,
            decompositions={},
        )

    def noisy(x):
        return (torch.rand_like(x) * x.sin()).tanh()

    def program(x):
        return torch.utils.checkpoint.checkpoint(noisy, x, use_reentrant=False)

    torch.compile(program, backend=backend)(torch.ones(2, 3, requires_grad=True))
    assert described == [partition is _torch.aot.min_cut]


@pytest.mark.parametrize("partition", [_torch.aot.min_cut, min_cut_rematerialization_partition])
def test_draws_that_are_alike_are_kept_apart(partition) -> None:
    """Torch's own partitioner makes one of them; when not, ``_draws_kept_apart`` can go."""
    drawn = []

    def forward(functional, _):
        uniform = torch.ops.aten.uniform.default
        drawn.extend(functional.graph.find_nodes(op="call_function", target=uniform))
        return _torch.aot.boxed(functional.forward)

    def backend(gm, example_inputs):
        return _torch.aot.aot_compile(
            gm,
            example_inputs,
            forward=forward,
            backward=lambda functional, _: _torch.aot.boxed(functional.forward),
            inference=forward,
            partition=partition,
            decompositions={},
        )

    def noisy(x):
        return x * torch.zeros(3).uniform_() + torch.zeros(3).uniform_()

    known = compile_utils.rand_ops
    torch.compile(noisy, backend=backend)(torch.ones(3, requires_grad=True))
    if partition is _torch.aot.min_cut:
        assert len(drawn) == 2
    else:
        with fault_of("torch", before="2.14"):
            assert len(drawn) == 1
    assert compile_utils.rand_ops is known


WORKERS = """
import torch
from torch._inductor import async_compile
import composer
backend = BACKEND
options = {"chain": ["inductor"]} if backend == "composer" else None
if backend == "looked up":
    inductor = torch._dynamo.lookup_backend("inductor")
    backend = lambda gm, inputs: inductor(gm, inputs)
before = async_compile.maybe_warm_pool
torch._inductor.config.compile_threads = 2
torch.compile(lambda x: x.sin() + 1, backend=backend, options=options)(torch.ones(3))
assert async_compile.maybe_warm_pool is before
print(async_compile.AsyncCompile.process_pool.cache_info().currsize)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "pools"), [("composer", 0), *thorough(("inductor", 0), ("looked up", 1))]
)
def test_inductor_has_no_workers_for_a_cpu(run_python, backend: str, pools: int) -> None:
    """``torch.compile`` starts none; the day the looked-up one does not, neither need we care."""
    pools *= has_triton_package()
    script = WORKERS.replace("BACKEND", repr(backend))
    assert run_python(script).stdout.split() == [str(pools)]


def test_has_effect_is_true_of_what_gives_nothing_or_is_called_in_order() -> None:
    """AOTAutograd wraps some of those that give nothing."""
    assert _torch.operators.has_effect(torch.ops.aten._linalg_check_errors.default)
    assert _torch.operators.has_effect(torch.ops.aten._assert_scalar.default)
    assert _torch.operators.has_effect(torch.ops.higher_order.with_effects)
    assert not _torch.operators.has_effect(torch.ops.aten.sin.default)
    assert not _torch.operators.has_effect(torch.ops.higher_order.cond)


def test_draws_is_true_of_random_operators() -> None:
    """Their results are not the same when they run again."""
    assert _torch.operators.draws(torch.ops.aten.bernoulli.p)
    assert not _torch.operators.draws(torch.ops.aten.sin.default)
    assert _torch.operators.draws_itself(torch.ops.aten.exponential.default)
    assert not _torch.operators.draws_itself(torch.ops.aten.rrelu.default)
    assert not _torch.operators.draws_itself(torch.ops.aten.sin.default)


def test_sizes_tell_their_symbols_bounds_and_values() -> None:
    """Without a guard: a number, a symbol, an expression of one."""
    seen: list[torch.SymInt] = []

    def backend(gm: torch.fx.GraphModule, example_inputs):
        (x,) = (node for node in gm.graph.find_nodes(op="placeholder") if "x" in node.name)
        seen.extend(x.meta["example_value"].shape)
        return gm.forward

    x = torch.ones(6, 3)
    torch._dynamo.mark_dynamic(x, 0, min=4, max=40)
    torch.compile(lambda x: x * 2, backend=backend)(x)
    rows, columns = seen
    (name,) = _torch.symbols.symbols(rows)
    assert _torch.symbols.symbols(columns) == frozenset()
    assert _torch.symbols.symbol_facts(rows) == {name: (6, 4, 40)}
    assert _torch.symbols.size_with(rows * 2 + 1, {name: 10}) == 21
    assert [_torch.symbols.least(each) for each in (rows, rows - 7, -rows, 5)] == [4, -3, -40, 5]
    assert _torch.symbols.size_with(columns, {}) == 3


def test_a_size_that_depends_on_data_is_told_from_one_of_the_inputs() -> None:
    """Also where it is part of an expression."""
    seen: list[torch.SymInt] = []

    def backend(gm: torch.fx.GraphModule, example_inputs):
        (rows,) = (node for node in gm.graph.nodes if "nonzero" in node.name)
        (x,) = rows.all_input_nodes
        seen.extend((*rows.meta["example_value"].shape, *x.meta["example_value"].shape))
        return gm.forward

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(torch.nonzero, backend=backend, dynamic=True)(torch.ones(6))
    many, one, rows = seen
    sizes = (many, many * 2 + rows, rows, one)
    assert [*map(_torch.symbols.depends_on_data, sizes)] == [True, True, False, False]


def test_number_that_is_passed_in_has_no_bounds() -> None:
    """It may be negative, and of any size."""
    seen = []

    def backend(gm: torch.fx.GraphModule, example_inputs):
        seen.extend(each for each in example_inputs if isinstance(each, torch.SymInt))
        return gm.forward

    torch.compile(lambda x, n: x * n, backend=backend, dynamic=True)(torch.ones(2), 7)
    (number,) = (each for each in seen if _torch.symbols.hint(each) == 7)
    assert [*_torch.symbols.symbol_facts(number).values()] == [(7, None, None)]
    assert _torch.symbols.least(number) is None


def test_a_backend_can_be_registered_by_name() -> None:
    """And is then found by it."""
    from torch._dynamo.backends import registry

    def nothing(gm: torch.fx.GraphModule, example_inputs):
        return gm.forward

    try:
        _torch.dynamo.register_backend(nothing, name="composer_test")
        assert _torch.dynamo.lookup_backend("composer_test") is nothing
        assert "composer_test" in _torch.dynamo.list_backends()
    finally:
        for table in (registry._BACKENDS, registry._COMPILER_FNS):
            table.pop("composer_test", None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where a process can fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_forgets_a_compile_of_another_thread() -> None:
    """Its lock, and the flags that say so."""
    import threading

    compiles, may_end = threading.Event(), threading.Event()
    asked = torch.fx._symbolic_trace.is_fx_symbolic_tracing.__code__

    def compile_something() -> None:
        with _torch.compiles.compiling():
            compiles.set()
            assert may_end.wait(60)

    thread = threading.Thread(target=compile_something)
    thread.start()
    assert compiles.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(60)
        free = convert_frame.compile_lock.acquire(blocking=False)
        as_before = torch.fx._symbolic_trace.is_fx_symbolic_tracing.__code__ is asked
        os._exit(0 if free and as_before else 3)
    may_end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


class _OfChildren(torch.nn.Module):
    """Dynamo guards on the order of the children, because ``forward`` iterates over them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


@needs_torch("2.12", "there is a switch to be set")
def test_a_function_is_read_whose_guards_on_its_module_are_left_out() -> None:
    """Torch itself cannot read the guards on the order of keys, which no filter leaves out."""
    model, x = _OfChildren(), torch.randn(2, 4)

    def keep(guards):
        return [each.name.partition("[")[0] in ("", "x") for each in guards]

    with torch.no_grad():
        compiled = torch.compile(
            model.forward,
            backend="composer",
            fullgraph=True,
            options={"chain": ["eager"], "guard_filter_fn": keep},
        )
        data = _torch.files.function_as_bytes(compiled, [x])
        function = _torch.files.function_of_bytes(data)
        torch.testing.assert_close(function(model, x), model(x))
        with fault_of("torch"), pytest.raises(AttributeError, match="_Missing"):
            torch.compiler.load_compiled_function(io.BytesIO(data))


def test_inductor_keeps_what_it_compiles_in_another_folder(tmp_path) -> None:
    """For as long as it is asked to."""
    own = _torch.inductor.inductor_cache_dir()
    with _torch.inductor.caches_in(str(tmp_path)):
        assert _torch.inductor.inductor_cache_dir() == str(tmp_path)
    assert _torch.inductor.inductor_cache_dir() == own


TWO_THREADS = """
import threading, time, torch

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

def repeat(call):
    until = time.monotonic() + 5
    while time.monotonic() < until:
        call(weight)

weight = torch.nn.Parameter(torch.ones(2))
print("begins", flush=True)
for call in (Double.apply, lambda weight: weight * 2):
    threading.Thread(target=repeat, args=(call,)).start()
"""


@upstream
def test_two_threads_that_need_the_gradient_of_a_weight_wait_for_each_other() -> None:
    """Torch alone. When this fails, the section on threads in docs/how-to/train.md may go.

    One has the GIL and waits for the mutex of the weight's autograd data, the other has the mutex
    and waits for the GIL. Seen with 2.13.0 and 2.14.1.
    """
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begins\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        finally:
            process.kill()
