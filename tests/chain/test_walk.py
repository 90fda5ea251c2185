"""The chain: order, isolation of candidates from each other, classification, the eager fallback."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import re
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import Any

import engines
import pytest
import torch
from common import compiled, in_threads, last
from engines import honest
from torch._dynamo.exc import BackendCompilerFailed, SkipFrame, TensorifyScalarRestartAnalysis
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import composer
from composer import Reason, Status
from composer.backends import BACKENDS, find_backend
from composer.backends.base import Backend, Build
from composer.backends.dynamo import NamedBackend
from composer.errors import (
    CandidateError,
    ChainExhausted,
    FallbackWarning,
    PassError,
    Refusal,
    UnknownNameError,
)
from composer.testing import FakeBackend


def cosine(x):
    return torch.cos(x) + 1


def statuses() -> list[tuple[str, str, str | None]]:
    return [(a.backend, a.status, a.reason) for a in last().attempts]


def test_order_given_is_order_tried() -> None:
    """The first that is accepted serves; those behind it are not tried."""
    x = torch.randn(3)
    result = compiled(cosine, engines.raises, honest, engines.returns_none)(x)
    torch.testing.assert_close(result, cosine(x))
    assert statuses() == [("raises", "failed", "build_failed"), ("honest", "succeeded", None)]
    assert last().chosen == "honest"


@pytest.mark.parametrize(
    ("engine", "status", "reason"),
    [
        (engines.raises, Status.FAILED, Reason.BUILD_FAILED),
        (engines.out_of_memory, Status.FAILED, Reason.OUT_OF_MEMORY),
        (engines.lacks_a_package, Status.UNAVAILABLE, Reason.NOT_INSTALLED),
        (engines.returns_none, Status.REJECTED, Reason.RETURNED_ORIGINAL),
        (engines.returns_text, Status.REJECTED, Reason.OUTPUT_MISMATCH),
        ("nobody_registers_this", Status.UNAVAILABLE, Reason.NOT_REGISTERED),
    ],
)
def test_every_refusal_has_its_status_and_reason(engine, status, reason) -> None:
    """And the eager fallback answers."""
    x = torch.randn(3)
    with pytest.warns(composer.errors.FallbackWarning):
        result = compiled(cosine, engine)(x)
    assert torch.equal(result, cosine(x))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == (status, reason)
    assert last().chosen == "eager"


@pytest.mark.parametrize(
    "selected",
    [{}, {"strict": True, "on_exhausted": "raise"}, {"select": "fastest", "verify": "compile"}],
)
def test_graph_that_computes_nothing_runs_on_eager_in_silence(selected: dict[str, Any]) -> None:
    """No engine is asked, and nobody is warned: such a graph ends most compiled training steps."""
    engine = FakeBackend(name="never_asked")
    x = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = compiled(lambda x: x.detach().view(-1), engine, **selected)(x)
    assert result.data_ptr() == x.data_ptr()
    assert engine.compiles == 0
    assert statuses() == [("eager", "succeeded", None)]
    assert last().attempts[0].message == "the graph computes nothing"
    assert last().chosen == "eager"


def test_an_exception_is_kept_whole() -> None:
    """Type, message and traceback, down to the engine's own line."""
    compiled(cosine, engines.raises)(torch.ones(2))
    (attempt,) = last().attempts
    assert attempt.error_type == "RuntimeError"
    assert attempt.message == "no such kernel"
    assert "engines.py" in attempt.traceback
    assert attempt.seconds > 0


@pytest.fixture
def without_collections():
    """No collection of garbage: what is gone was let go of."""
    gc.disable()
    yield
    gc.enable()


class Greedy:
    """An engine that takes memory and is not accepted; ``memory`` tells whether that is held."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.memory: weakref.ref[torch.Tensor] | None = None

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        large = torch.zeros(1000)
        self.memory = weakref.ref(large)
        if self.way == "runs wrongly":
            return lambda *args: [each + large[0] + 1 for each in gm.forward(*args)]
        if self.way == "raises in a function":

            def raises() -> None:
                raise RuntimeError(f"no such kernel for {large.shape}")

            raises()
        if self.way == "declines":
            composer.errors.refuse(Status.DECLINED, Reason.UNSUPPORTED_OP, "no")
        try:
            raise KeyError(large.shape)
        except KeyError as error:
            raise RuntimeError("no such kernel") from (error if self.way == "chains" else None)


@pytest.mark.parametrize(
    "way", ["raises", "raises in a function", "chains", "declines", "runs wrongly"]
)
def test_memory_of_a_failed_candidate_is_free_when_the_next_one_builds(
    way: str, without_collections: None
) -> None:
    """Its error is kept for the record, and no frame of it."""
    greedy, held = Greedy(way), []

    def next_one(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        held.append(greedy.memory())
        return honest(gm, inputs)

    compiled(cosine, greedy, next_one, verify="compile")(torch.ones(2))
    assert last().chosen == "next_one"
    assert held == [None]


def test_errors_of_an_exhausted_chain_have_their_lines_and_no_memory(
    without_collections: None,
) -> None:
    """What the program itself was handling meanwhile keeps its local variables."""
    greedy = Greedy("chains")

    def program_fails() -> None:
        local = 3  # noqa: F841
        raise LookupError

    try:
        program_fails()
    except LookupError as own:
        with pytest.raises(BackendCompilerFailed) as caught:
            compiled(cosine, greedy, on_exhausted="raise")(torch.ones(2))
        frame = own.__traceback__.tb_next.tb_frame
        assert frame.f_locals == {"local": 3}
    (error,) = caught.value.inner_exception.exceptions
    assert "raise RuntimeError(" in "".join(traceback.format_exception(error))
    assert isinstance(error.__cause__, KeyError)
    assert greedy.memory() is None


@pytest.mark.parametrize("engine", ["aot_eager", "onnxrt", "openvino", "inductor"])
def test_a_size_that_is_read_from_a_tensor_is_a_dynamic_shape(engine: str) -> None:
    """Dynamo passes the tensor on; what traces the graph does not know its number."""

    def program(x, n):
        return x.new_zeros(n, 2) + 1

    x, n = torch.ones(3), torch.tensor(4)
    assert torch.equal(compiled(program, engine)(x, n), program(x, n))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "dynamic_shape")
    assert "x.new_zeros(n, 2)" in attempt.message


def test_a_plain_no_has_no_traceback() -> None:
    """A decline is no error."""
    compiled(cosine, "nobody_registers_this")(torch.ones(2))
    assert last().attempts[0].traceback == ""


def dropping(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(torch.sin(x), 0.5, train=True)


def twice_dropping(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(dropping, x, use_reentrant=False).cos()


def selecting(x: torch.Tensor) -> torch.Tensor:
    saved = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    return checkpoint(dropping, x, use_reentrant=False, context_fn=saved)


def seeded_gradient(f: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    return gradient


@pytest.mark.parametrize("body", [dropping, twice_dropping, selecting])
@pytest.mark.parametrize("engine", ["eager", engines.raises, FakeBackend("raises", at=1)])
def test_floor_draws_the_random_numbers_of_a_checkpoint_once(body, engine) -> None:
    """The gradient is that of the mask that the forward had, as in eager."""

    def f(x):
        return checkpoint(body, x, use_reentrant=False)

    x = torch.randn(64, requires_grad=True)
    assert torch.equal(seeded_gradient(compiled(f, engine), x), seeded_gradient(f, x))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("engine", ["eager", engines.raises])
def test_floor_lets_a_checkpoint_write_to_its_buffers(engine, depth: int) -> None:
    """As in eager, and as torch's own backend ``eager`` (2.13) does not."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    twin = copy.deepcopy(net)

    def step(net: torch.nn.Module, x: torch.Tensor, depth: int = depth) -> torch.Tensor:
        inner = net if depth == 1 else functools.partial(step, net, depth=depth - 1)
        return checkpoint(inner, x, use_reentrant=False)

    x = torch.randn(3, 4)
    compiled(lambda x: step(net, x), engine)(x).square().sum().backward()
    step(twin, x).square().sum().backward()
    for mine, eagers in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, eagers.grad)
    assert [each.tolist() for each in net.buffers()] == [each.tolist() for each in twin.buffers()]


class Residual(torch.nn.Module):
    """A block that is to be compiled once, however often a model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("engine", "serves"),
    [("eager", "eager"), (engines.raises, "eager"), ("inductor", "inductor"), ("onnxrt", "onnxrt")],
)
def test_regions_that_are_compiled_once_are_any_engines(engine, serves, training: bool) -> None:
    """The eager fallback has their backward, and engines that read ONNX take what is in them."""
    model = torch.nn.Sequential(*[Residual() for _ in range(3)])
    twin = copy.deepcopy(model)
    x = torch.randn(3, 8)
    with torch.set_grad_enabled(training):
        got, expected = compiled(model, engine)(x), twin(x)
    torch.testing.assert_close(got, expected)
    if training:
        got.sum().backward()
        expected.sum().backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    assert last().chosen == serves
    assert last().attempts[-1].coverage in (None, 1.0)


@pytest.mark.parametrize("engine", ["eager", "onnxrt"])
def test_a_checkpoint_may_stand_beside_a_region_that_is_compiled_once(engine: str) -> None:
    """Both are calls of nested graphs, and an engine gets the one as it is."""
    up, normed = Residual(), torch.nn.BatchNorm1d(8)
    x = torch.randn(3, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(normed, up(up(x)), use_reentrant=False)

    got = torch.autograd.grad(compiled(step, engine)(x).square().sum(), up.parameters())
    expected = torch.autograd.grad(step(x).square().sum(), up.parameters())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert last().chosen == engine


def test_floor_is_bit_for_bit_eager() -> None:
    """Same operations on the same values, however many engines failed before."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
    x = torch.randn(32, 64)
    result = compiled(model, engines.raises, engines.ruins_the_graph)(x)
    assert torch.equal(result, model(x))


def test_a_ruined_graph_changes_nothing_for_the_next() -> None:
    """Each candidate has a clone of its own."""
    x = torch.randn(5)
    result = compiled(cosine, engines.ruins_the_graph, honest)(x)
    torch.testing.assert_close(result, cosine(x))
    assert last().chosen == "honest"


def test_a_ruined_nested_graph_changes_nothing_for_the_floor() -> None:
    """Branches of ``torch.cond`` are cloned as well."""

    def branch(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.ones(4)
    assert torch.equal(compiled(branch, engines.ruins_the_graph)(x), torch.sin(x))


def test_ruined_example_inputs_change_nothing() -> None:
    """Each candidate has copies of the inputs; views of one memory share the copy's."""
    base = torch.randn(8)
    before = base.clone()

    def add(a, b):
        return a + b

    result = compiled(add, engines.ruins_the_inputs, honest)(base[:4], base[4:])
    assert torch.equal(base, before)
    torch.testing.assert_close(result, before[:4] + before[4:])


@pytest.mark.parametrize("engine", [engines.ruins_a_weight, engines.assigns_a_weight])
def test_a_candidate_that_changes_a_weight_is_rejected(engine) -> None:
    """Weights are not copied; their version tells, or their memory."""
    compiled(torch.nn.Linear(3, 3), engine, honest)(torch.ones(1, 3))
    assert statuses()[0] == (engine.__name__, "rejected", "mutated_inputs")
    assert last().chosen == "honest"


@pytest.mark.parametrize("engine", [engines.assigns_a_weight, engines.turns_a_weight])
def test_a_candidate_that_changes_a_weight_of_the_graphs_own_is_rejected(engine) -> None:
    """A graph of a direct call holds its weights as attributes."""
    gm, x = torch.fx.symbolic_trace(torch.nn.Linear(3, 3)), torch.ones(1, 3)
    torch._dynamo.lookup_backend("composer")(gm, [x], options={"chain": [engine, honest]})
    assert statuses()[0] == (engine.__name__, "rejected", "mutated_inputs")


def test_a_candidate_that_changes_an_inference_tensor_is_rejected() -> None:
    """It has no version, but memory."""

    def assigns(gm, example_inputs):
        for weight in gm.parameters():
            weight.data = weight.data * 2
        return lambda x: gm.forward(x) + 0

    with torch.inference_mode():
        gm, x = torch.fx.symbolic_trace(torch.nn.Linear(3, 3)), torch.ones(1, 3)
        torch._dynamo.lookup_backend("composer")(gm, [x], options={"chain": [assigns, "eager"]})
    assert statuses()[0] == ("assigns", "rejected", "mutated_inputs")


def loaded_meanwhile(model: torch.nn.Module, state: dict[str, torch.Tensor]):
    """An honest backend; while it compiles, another thread loads a state."""

    def slow(gm, example_inputs):
        other = threading.Thread(target=model.load_state_dict, args=(state,))
        other.start()
        other.join()
        return honest(gm, example_inputs)

    return slow


def test_a_weight_that_another_thread_writes_to_meanwhile_is_not_blamed_on_the_engine() -> None:
    """Nobody can tell the two apart: the message names both."""
    model = torch.nn.Linear(3, 3)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    result = compiled(model, loaded_meanwhile(model, state), honest)(torch.ones(1, 3))
    assert torch.equal(result, torch.zeros(1, 3))
    assert "another thread of the program" in last().attempts[0].message


def test_a_state_that_another_thread_loads_meanwhile_is_loaded_whole() -> None:
    """Buffers that were put back to what they were would belong to the weights of before."""
    model = torch.nn.BatchNorm1d(3).eval()
    state = {name: torch.full_like(value, 5) for name, value in model.state_dict().items()}
    result = compiled(model, loaded_meanwhile(model, state), honest)(torch.ones(2, 3))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    torch.testing.assert_close(result, model(torch.ones(2, 3)))


def test_a_backend_that_warms_up_leaves_the_buffers_as_they_were() -> None:
    """Batch norm's statistics move unseen in a warm-up run; they are put back."""

    def fails_warm(gm, example_inputs):
        gm(*example_inputs)
        raise RuntimeError("failed after a warm-up")

    def warm(gm, example_inputs):
        gm(*example_inputs)
        return honest(gm, example_inputs)

    ours, theirs = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    x = torch.randn(6, 4)
    compiled(ours, fails_warm, warm, honest)(x)
    theirs(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    assert ours.num_batches_tracked == 1
    assert [reason for *_, reason in statuses()] == ["build_failed", "mutated_inputs", None]


def test_composer_does_not_stand_in_its_own_chain() -> None:
    """It would nest itself."""
    with pytest.raises(BackendCompilerFailed, match="its own chain"):
        compiled(cosine, "composer")(torch.ones(2))


def test_a_parameter_written_through_a_direct_call_is_seen() -> None:
    """The graph module holds it, not the inputs."""

    def writes(gm, example_inputs):
        with torch.no_grad():
            next(gm.parameters()).add_(0)
        return honest(gm, example_inputs)

    gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    backend = torch._dynamo.lookup_backend("composer")
    backend(gm, [torch.ones(2)], options={"chain": [writes, honest]})
    assert statuses()[0] == ("writes", "rejected", "mutated_inputs")


def test_conjugated_inputs_are_copied_too() -> None:
    """A candidate that writes to them does not reach the user's tensor."""
    x = torch.randn(3, dtype=torch.complex64).conj()
    before = x.clone()
    result = compiled(lambda x: x * 2, engines.ruins_the_inputs)(x)
    assert torch.equal(x, before)
    assert torch.equal(result, before * 2)


def test_an_error_without_words_is_named_by_its_type() -> None:
    """A bare assertion says at least what it is."""

    def asserts(gm, example_inputs):
        raise AssertionError

    with pytest.warns(composer.errors.FallbackWarning, match="AssertionError"):
        compiled(cosine, asserts)(torch.ones(2))
    assert "AssertionError" in str(composer.report())
    assert repr(composer.report()) == str(composer.report())


def test_a_changed_graph_counts_as_work() -> None:
    """Changing the graph and returning its forward is what many backends do."""
    x = torch.randn(3)
    result = compiled(cosine, engines.cosine_to_sine)(x)
    torch.testing.assert_close(result, torch.sin(x) + 1)
    assert last().chosen == "cosine_to_sine"


def test_eager_in_mid_chain_ends_it() -> None:
    """Accepted as a candidate, bit for bit eager."""
    x = torch.randn(3)
    assert torch.equal(compiled(cosine, engines.raises, "eager", honest)(x), cosine(x))
    assert statuses()[1:] == [("eager", "succeeded", None)]
    assert last().chosen == "eager"


def test_any_name_dynamo_knows_may_stand_in_the_chain() -> None:
    """``aot_eager`` and ``ts`` are Dynamo's own."""
    x = torch.randn(3)
    for name in ("aot_eager", "ts"):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(cosine, name)(x), cosine(x))
        assert last().chosen == name


def test_module_and_function_may_stand_in_the_chain() -> None:
    """``module:function``, as in an entry point."""
    compiled(cosine, "engines:honest")(torch.ones(2))
    assert last().chosen == "engines:honest"


def test_options_reach_a_callable() -> None:
    """As the keyword ``options``."""
    seen = []

    def engine(gm, example_inputs, *, options):
        seen.append(options)
        return honest(gm, example_inputs)

    compiled(cosine, {"backend": engine, "options": {"level": 3}})(torch.ones(2))
    assert seen == [{"level": 3}]


def test_slips_in_names_raise_all_at_once() -> None:
    """A slip is the user's own mistake, never a reason to fall back."""
    with pytest.raises(BackendCompilerFailed, match=r"'inductor'.*'onnxrt'") as caught:
        compiled(cosine, "indcutor", "onxrt")(torch.ones(2))
    assert isinstance(caught.value.inner_exception, UnknownNameError)
    assert composer.reports() == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("ort", "onnxrt"), ("ORT", "onnxrt"), ("onnxruntime", "onnxrt"), ("onnx", "onnxrt")),
        *(("trt", "tensorrt"), ("torch_tensorrt", "tensorrt"), ("Torch-TensorRT", "tensorrt")),
        *(("TensorRT", "tensorrt"), ("OpenVINO", "openvino"), ("torch_inductor", "inductor")),
        ("dynamo:aot_egaer", "dynamo:aot_eager"),
    ],
)
def test_another_word_for_an_engine_raises_with_its_name(name: str, meant: str) -> None:
    """It would run eager, with nothing but a hint in the record."""
    said = f"unknown backend {name!r}; did you mean {meant!r}?"
    with pytest.raises(BackendCompilerFailed, match=re.escape(said)) as caught:
        compiled(cosine, name, honest)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, UnknownNameError)


@pytest.mark.parametrize("name", ["vendor_xyz", "eagerly", "cudagraph_trees"])
def test_name_that_is_like_no_other_may_be_another_machines(name: str) -> None:
    """The chain goes on, and nothing is suggested that may be wrong."""
    compiled(cosine, name, honest)(torch.ones(2))
    assert last().attempts[0].reason == "not_registered"
    assert "did you mean" not in last().attempts[0].message


def test_dynamo_before_a_name_is_what_dynamo_has_by_it() -> None:
    """Whatever composer has by it; composer itself cannot be."""
    compiled(cosine, "dynamo:aot_eager")(torch.ones(2))
    assert last().chosen == "dynamo:aot_eager"
    backend = find_backend("dynamo:inductor")
    assert type(backend) is NamedBackend
    assert type(find_backend("inductor")) is not NamedBackend
    with pytest.raises(UnknownNameError, match="its own chain"):
        find_backend("dynamo:composer")


@pytest.mark.parametrize("slip", ["eagre", "onnxtr", "onnxtt", "tensotrt", "inductro", "aot_egaer"])
def test_one_slip_of_the_pen_raises(slip: str) -> None:
    """However short the name is: two letters that swapped are two fifths of ``eager``."""
    with pytest.raises(BackendCompilerFailed, match="did you mean") as caught:
        compiled(cosine, slip, honest)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, UnknownNameError)


def test_a_short_name_that_nobody_knows_is_no_slip() -> None:
    """Of three letters one is a third."""
    compiled(cosine, "tsm", honest)(torch.ones(2))
    assert last().attempts[0].reason == "not_registered"


def test_a_path_that_cannot_be_imported_raises() -> None:
    """It was meant for this process."""
    with pytest.raises(BackendCompilerFailed, match="cannot be imported"):
        compiled(cosine, "no_such_package:engine")(torch.ones(2))


def test_strict_raises_at_the_first_that_is_not_accepted(recwarn) -> None:
    """With the attempt on the error and in the record; an error needs no warning."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(cosine, engines.raises, honest, strict=True)(torch.ones(2))
    error = caught.value.inner_exception
    assert len(recwarn) == 0
    assert isinstance(error, CandidateError)
    assert error.attempt.reason is Reason.BUILD_FAILED
    assert statuses() == [("raises", "failed", "build_failed")]


def test_strict_is_silent_when_the_first_is_accepted() -> None:
    """Nothing was refused."""
    compiled(cosine, honest, engines.raises, strict=True)(torch.ones(2))
    assert last().chosen == "honest"


def test_exhausted_chain_raises_every_error_when_asked_to() -> None:
    """An exception group with the engines' own exceptions, and their attempts."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(cosine, engines.raises, engines.out_of_memory, on_exhausted="raise")(torch.ones(2))
    error = caught.value.inner_exception
    assert isinstance(error, ChainExhausted)
    assert [type(e) for e in error.exceptions] == [RuntimeError, torch.OutOfMemoryError]
    assert [a.backend for a in error.attempts] == ["raises", "out_of_memory"]
    assert isinstance(error.split(RuntimeError)[0], ChainExhausted)


def test_errors_can_be_sent_to_another_process() -> None:
    """With all that they carry, as a pool of processes does."""
    errors = []
    for fields in ({"strict": True}, {"on_exhausted": "raise"}):
        torch.compiler.reset()
        with pytest.raises(BackendCompilerFailed) as caught:
            compiled(cosine, "nobody_has_this", **fields)(torch.ones(2))
        errors.append(caught.value.inner_exception)
    errors += [
        Refusal(Status.DECLINED, Reason.POLICY, "no"),
        PassError("fuse", "outputs", "one is gone", before=["fold"]),
    ]
    for error in errors:
        error.add_note("on rank 1")
        twin = pickle.loads(pickle.dumps(error))
        assert (type(twin), str(twin)) == (type(error), str(error))
        assert vars(twin).keys() == vars(error).keys() > {"__notes__"}
    assert pickle.loads(pickle.dumps(errors[0])).attempt == errors[0].attempt


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_system_exit_pass_through(stop) -> None:
    """A signal handler may have raised them."""

    def engine(gm, example_inputs):
        raise stop

    with pytest.raises(stop):
        compiled(cosine, engine, honest)(torch.ones(2))


def test_skip_frame_passes_through_to_dynamo() -> None:
    """The frame runs without Dynamo, as its backend asked."""

    def engine(gm, example_inputs):
        raise SkipFrame("not this one")

    assert torch.equal(compiled(cosine, engine)(torch.ones(2)), cosine(torch.ones(2)))
    assert composer.reports() == ()


def test_restart_analysis_passes_through_to_dynamo() -> None:
    """Dynamo starts the frame again; the second time the engine is content."""
    calls = []

    def engine(gm, example_inputs):
        calls.append(1)
        if len(calls) == 1:
            raise TensorifyScalarRestartAnalysis
        return honest(gm, example_inputs)

    compiled(cosine, engine)(torch.ones(2))
    assert len(calls) == 2
    assert len(composer.reports()) == 1


def test_backward_is_compiled_within_the_attempt() -> None:
    """An engine that fails in the backward fails its attempt, and the next one trains."""
    from torch._dynamo.backends.common import aot_autograd

    def forward_only(gm, example_inputs):
        compiled_before = []

        def compiler(gm, example_inputs):
            compiled_before.append(1)
            if len(compiled_before) == 2:
                raise RuntimeError("no backward here")
            return gm.forward

        return aot_autograd(fw_compiler=compiler)(gm, example_inputs)

    x = torch.ones(3, requires_grad=True)
    compiled(cosine, forward_only, honest)(x).sum().backward()
    assert statuses()[0][0] == "forward_only"
    assert last().attempts[0].message == "no backward here"
    torch.testing.assert_close(x.grad, -torch.sin(torch.ones(3)))


def test_one_warning_per_distinct_reason(recwarn: pytest.WarningsRecorder) -> None:
    """Ten graphs that fail alike warn once, and ``reset`` starts anew."""
    for size in range(1, 4):
        torch.compiler.reset()
        compiled(cosine, engines.raises)(torch.ones(size))
    assert len(recwarn) == 1, [str(each.message) for each in recwarn]
    assert "raises failed (build_failed): no such kernel" in str(recwarn[0].message)
    assert recwarn[0].filename == __file__
    composer.reset()
    torch.compiler.reset()
    compiled(cosine, engines.raises)(torch.ones(2))
    assert len(recwarn) == 2


def test_an_absent_engine_of_the_default_chain_is_no_news(recwarn) -> None:
    """Nobody asked for TensorRT by name; asked for by name it warns."""
    from composer.system import warned
    from composer.telemetry import notices

    compiled(cosine, "tensorrt", honest)(torch.ones(2))
    assert len(recwarn) == 1
    warned.forget_warnings()
    notices.warn_of_fallbacks(last(), asked_by_name=False)
    assert len(recwarn) == 1


def test_a_graph_on_the_floor_is_news_whatever_the_reason(recwarn) -> None:
    """Every engine of the default chain may be absent; then eager runs, and that is said."""
    from composer.system import warned
    from composer.telemetry import notices

    compiled(cosine, "tensorrt")(torch.ones(2))
    warned.forget_warnings()
    notices.warn_of_fallbacks(last(), asked_by_name=False)
    assert len(recwarn) == 2


def test_attempts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """INFO for every attempt, WARNING for the fallback."""
    with caplog.at_level(logging.INFO, logger="composer"):
        compiled(cosine, engines.raises, honest)(torch.ones(2))
    levels = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "composer"]
    assert [level for level, _ in levels] == ["INFO", "INFO", "WARNING"]
    assert "honest succeeded" in levels[1][1]


def test_an_unavailable_candidate_takes_under_five_milliseconds() -> None:
    """The attempt's own clock, best of five, since other work runs on this machine too."""
    seconds = []
    for _ in range(5):
        torch.compiler.reset()
        compiled(cosine, "tensorrt", "nobody_registers_this", "eager")(torch.ones(2))
        seconds.append(max(a.seconds for a in last().attempts[:2]))
    assert min(seconds) < 0.005


def test_two_threads_compile_at_once() -> None:
    """Every thread has right results, every graph its report."""
    wrong = []
    start = threading.Barrier(2)

    def work(scale: int) -> None:
        def function(x):
            return torch.cos(x) * scale

        f = compiled(function, engines.raises, honest)
        start.wait()
        for size in (2, 3, 4):
            x = torch.randn(size)
            if not torch.allclose(f(x), function(x)):
                wrong.append((scale, size))

    in_threads(work, (2, 3))
    assert wrong == []
    assert {r.chosen for r in composer.reports()} == {"honest"}


def test_compiling_inside_a_compiled_functions_first_call() -> None:
    """An engine may itself use ``torch.compile`` with composer."""

    def nested(gm, example_inputs):
        inner = compiled(lambda x: x - 1, honest)
        engine = honest(gm, example_inputs)
        return lambda *args: [inner(out) + 1 for out in engine(*args)]

    x = torch.randn(3)
    torch.testing.assert_close(compiled(cosine, nested)(x), cosine(x))
    assert [r.chosen for r in composer.reports()] == ["nested", "honest"]


def test_equal_options_do_not_recompile() -> None:
    """The backend is one stable object; Dynamo compares options by value."""
    options = {"chain": ["aot_eager"]}
    x = torch.randn(3)
    for _ in range(3):
        torch.compile(cosine, backend="composer", options=dict(options))(x)
    assert len(composer.reports()) == 1
    assert last().runtime.calls == 3


def test_other_options_do_recompile() -> None:
    """Another chain is another compile."""
    x = torch.randn(3)
    compiled(cosine, "aot_eager")(x)
    compiled(cosine, "eager")(x)
    assert [r.chosen for r in composer.reports()] == ["aot_eager", "eager"]


def test_reports_are_bounded() -> None:
    """The last 1,000 are kept."""
    session = composer.session.current()
    compiled(cosine, "eager")(torch.ones(1))
    for _ in range(1500):
        session.keep(last())
    assert len(composer.reports()) == 1000


def test_calls_are_counted_from_many_threads() -> None:
    """None is lost."""
    f = compiled(cosine, "eager")
    x = torch.ones(2)
    f(x)
    in_threads(lambda _: [f(x) for _ in range(500)], range(4))
    assert last().runtime.calls == 2001
    assert last().runtime.calls == 2001


def test_time_in_the_report_covers_the_attempts() -> None:
    """Seconds of the whole are at least those of the parts."""

    def slow(gm, example_inputs):
        time.sleep(0.05)
        return honest(gm, example_inputs)

    compiled(cosine, slow)(torch.ones(2))
    assert last().seconds >= last().attempts[0].seconds >= 0.05


def test_options_for_a_function_without_options_raise() -> None:
    """The user's own mistake, not the engine's failure."""
    with pytest.raises(BackendCompilerFailed, match="takes no options="):
        compiled(cosine, {"backend": engines.raises, "options": {"level": 3}})(torch.ones(2))
    with pytest.raises(BackendCompilerFailed, match="backend 'eager': unknown option 'level'"):
        compiled(cosine, {"backend": "eager", "options": {"level": 3}})(torch.ones(2))


def test_a_warning_made_an_error_is_raised_at_every_compile() -> None:
    """Until somebody hears it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", composer.errors.FallbackWarning)
        for _ in range(2):
            with pytest.raises(BackendCompilerFailed, match="no such kernel"):
                compiled(cosine, engines.raises)(torch.ones(2))


def test_nobody_serves_a_graph_whose_compile_raised() -> None:
    """The record does not claim that eager did."""
    with pytest.raises(BackendCompilerFailed):
        compiled(cosine, engines.raises, on_exhausted="raise")(torch.ones(2))
    assert last().chosen == ""
    assert "raised an error" in str(composer.report())


class Honest(Backend):
    def build(self, request):
        return Build(honest(request.gm, request.example_inputs))


def test_a_backend_class_may_stand_in_a_chain() -> None:
    """Itself or by its path, so that an author can try it before publishing it."""
    for spelled in (Honest, f"{__name__}:Honest"):
        torch.compiler.reset()
        compiled(cosine, spelled)(torch.ones(2))
        assert last().attempts[0].status == "succeeded"


@pytest.mark.parametrize(("name", "package"), [("openxla", "torch_xla"), ("tvm", "tvm")])
def test_a_backend_of_dynamos_whose_package_is_missing_is_not_built(
    name: str, package: str
) -> None:
    """It would say so itself, of openxla behind AOTAutograd's trace of the graph."""
    compiled(cosine, name, honest)(torch.ones(2))
    assert statuses()[0] == (name, "unavailable", "not_installed")
    assert f"needs the package {package!r}" in last().attempts[0].message


@pytest.mark.parametrize("name", ["openxla", "openxla_eval", "tvm"])
def test_dynamos_backends_that_need_a_package_are_still_there(name: str) -> None:
    assert name in torch._dynamo.list_backends(())


@pytest.mark.parametrize("value", ["no_such_module:Engine", "json:Engine"])
def test_a_registered_backend_that_cannot_be_imported_is_unavailable(monkeypatch, value) -> None:
    """A third party's fault is not the user's."""
    monkeypatch.setitem(BACKENDS._table, "broken", value)
    compiled(cosine, "broken", honest)(torch.ones(2))
    assert statuses()[0] == ("broken", "unavailable", "not_installed")
    assert last().chosen == "honest"


def test_a_registered_backend_whose_import_or_making_fails_is_unavailable(
    tmp_path, monkeypatch
) -> None:
    """However it does: a vendor's library that is not there is an ``OSError``."""
    (tmp_path / "broken_vendor.py").write_text("raise OSError('libfoo.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)

    class NoDriver(Honest):
        def __init__(self) -> None:
            raise RuntimeError("no driver")

    monkeypatch.setattr(sys.modules[__name__], "NoDriver", NoDriver, raising=False)
    for value, said in (
        ("broken_vendor:Engine", "OSError: libfoo.so"),
        (f"{__name__}:NoDriver", "RuntimeError: no driver"),
    ):
        torch.compiler.reset()
        monkeypatch.setitem(BACKENDS._table, "broken", value)
        compiled(cosine, "broken", honest)(torch.ones(2))
        assert statuses()[0] == ("broken", "unavailable", "not_installed")
        assert said in last().attempts[0].message
        assert last().chosen == "honest"


class Importing(Backend):
    """An engine whose build meets an error of an import."""

    packages = ("my-engine", "my-kernels")
    error: ImportError

    def build(self, request):
        raise RuntimeError("no engine") from self.error


@pytest.mark.parametrize("missing", ["my_engine", "my_kernels"])
def test_missing_package_of_the_engine_is_not_installed(missing, monkeypatch) -> None:
    """The default chain does not warn of it where another engine serves."""
    monkeypatch.setattr(
        Importing, "error", ModuleNotFoundError("No module", name=missing), raising=False
    )
    compiled(cosine, Importing, honest)(torch.ones(2))
    assert statuses()[0][1:] == ("unavailable", "not_installed")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'helper' from 'my_engine'", name="my_engine"),
        ModuleNotFoundError("No module named 'my_engine.helpers'", name="my_engine.helpers"),
        ModuleNotFoundError("No module named 'tabulate'", name="tabulate"),
    ],
)
def test_other_error_of_an_import_is_a_failure_that_the_default_chain_warns_of(
    error, monkeypatch
) -> None:
    """The engine is installed, and has a fault."""
    monkeypatch.setattr(Importing, "error", error, raising=False)
    monkeypatch.setitem(BACKENDS._table, "tensorrt", f"{__name__}:Importing")
    monkeypatch.setitem(BACKENDS._table, "inductor", f"{__name__}:Honest")
    with pytest.warns(FallbackWarning, match="tensorrt failed"):
        compiled(cosine)(torch.ones(2))
    assert statuses() == [("tensorrt", "failed", "build_failed"), ("inductor", "succeeded", None)]


def test_options_of_a_name_that_takes_none_are_the_users_error() -> None:
    """Named as the chain does. Torch's own of a compiler would take them, and do nothing."""
    torch._dynamo.register_backend(lambda gm, inputs: gm.forward, name="of_two_arguments")
    for name in ("of_two_arguments", "aot_eager", "ts", "cudagraphs", "pre_dispatch_eager"):
        torch.compiler.reset()
        chain = [{"backend": name, "options": {"levl": 3}}]
        with pytest.raises(
            BackendCompilerFailed, match=f"OptionError: backend '{name}' takes no options"
        ):
            compiled(cosine, *chain)(torch.ones(2))


def breaks_at_call(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    def run(*args: Any) -> Any:
        raise RuntimeError("boom")

    return run


@pytest.mark.parametrize("name", [":engine", "engines:", ":"])
def test_half_of_a_path_is_a_mistake(name: str) -> None:
    """Not one of an import."""
    with pytest.raises(BackendCompilerFailed, match=f"backend '{name}' is not of the form"):
        compiled(cosine, name)(torch.ones(2))


def test_callables_of_one_name_are_told_apart() -> None:
    """As those that one function makes: what one did puts no other into quarantine."""

    def made(function: Any) -> Any:
        def engine(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            return function(gm, inputs)

        return engine

    f = compiled(cosine, made(breaks_at_call), made(honest))
    for _ in range(3):
        f(torch.ones(2))
    assert [each.status for each in last().attempts] == ["failed", "succeeded"]


def test_callable_named_as_the_floor_is_an_engine_like_any_other() -> None:
    """It is answered for, and its record does not say that the eager fallback served."""

    def eager(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return breaks_at_call(gm, inputs)

    x = torch.ones(2)
    torch.testing.assert_close(compiled(cosine, eager)(x), cosine(x))
    assert statuses() == [(f"{__name__}.eager", "failed", "raised_at_runtime")]
    assert last().chosen == "eager"


@pytest.mark.filterwarnings("ignore::composer.errors.FallbackWarning")
def test_size_that_only_the_data_tell_is_said_in_a_sentence() -> None:
    """Torch's own text is a call, a traceback that says ``None``, and advice on another tool."""
    gm = torch.fx.symbolic_trace(lambda x, n: torch.nn.functional.pad(x, (0, n.item())))
    x, n = torch.ones(2, 3), torch.tensor(2)
    run = torch._dynamo.lookup_backend("composer")(gm, [x, n], options={"chain": ["aot_eager"]})
    assert run(x, n).shape == (2, 5)
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "dynamic_shape")
    call = "aten._local_scalar_dense.default"
    assert attempt.message == f"it needs a number that only the data tell: {call}"
