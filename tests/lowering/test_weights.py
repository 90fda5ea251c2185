"""Bound weights: every change that torch makes is seen, and the quirks that this rests on."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from common import compiled, last, upstream
from torch import distributed
from torch._dynamo.utils import counters
from torch.utils import swap_tensors

import composer
from composer import _torch
from composer.errors import WeightsWarning
from composer.lowering.weights import by_address, samples
from composer.lowering.weights.bindings import BindingEngine
from composer.lowering.weights.statistics import find_witnesses
from composer.lowering.weights.watchable import watchable
from composer.testing import FakeBackend, settle


@upstream
def test_torch_fused_steps_do_not_raise_versions() -> None:
    """The quirk behind ``count_steps``; when this fails, the hook can go."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_address, "increment_version", lambda tensors: None)
        before = parameter._version
        optimizer.step()
    assert parameter._version == before
    assert not torch.equal(parameter, torch.ones(4))


@upstream
def test_torch_batch_norm_does_not_raise_versions_of_its_statistics() -> None:
    """But does that of the witness; when this fails, the witness can go."""
    norm = torch.nn.BatchNorm1d(4).train()
    mean, tracked = norm.running_mean._version, norm.num_batches_tracked._version
    norm(torch.randn(8, 4))
    assert norm.running_mean._version == mean
    assert norm.num_batches_tracked._version > tracked


@upstream
def test_torch_refuses_to_swap_what_has_weak_references() -> None:
    """The quirk behind ``forget_swapped``; when this fails, it can go."""
    weight, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))
    reference = weakref.ref(weight)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(weight, other)
    assert reference() is weight


SWAPPED: dict[str, dict[str, Any]] = {
    "inductor": {"chain": ["inductor"]},
    "frozen": {"chain": ["inductor"], "freeze": True},
    "onnxrt": {"chain": ["onnxrt"]},
    "openvino": {"chain": ["openvino"]},
    "bf16": {"chain": ["aot_eager"], "precision": "bf16"},
    "pass": {"chain": ["aot_eager"], "passes": ["fold_batch_norm"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", SWAPPED.values(), ids=SWAPPED)
def test_a_module_that_swaps_its_weights_is_converted(monkeypatch, options) -> None:
    """Nobody keeps weak references to the weights that would have torch refuse to swap them."""
    if "openvino" in options["chain"]:
        pytest.importorskip("openvino")
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).eval()
    f = torch.compile(model, backend="composer", options=options)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    bound = {"rtol": 0.05, "atol": 0.05} if "precision" in options else {}
    with torch.no_grad():
        f(torch.randn(3, 8))
        for dtype in (torch.float64, torch.float32):
            model.to(dtype)
            x = torch.randn(3, 8, dtype=dtype)
            torch.testing.assert_close(f(x), model(x), **bound)
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        torch.testing.assert_close(f(x), model(x), **bound)


BUILT_LATER: dict[str, dict[str, Any]] = {
    "successor": {"chain": [FakeBackend("raises", at=2), "aot_eager"]},
    "in the background": {
        "chain": [FakeBackend("slow", at=1, seconds=0.01), "aot_eager"],
        "select": {"by": "fastest", "background": True},
    },
}


@pytest.mark.slow
def test_a_program_that_holds_the_swap_itself_may_swap() -> None:
    """As ``from torch.utils import swap_tensors`` has it, before an engine was built."""
    model, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    f = compiled(model, "onnxrt")
    with torch.no_grad():
        f(x)
        swap_tensors(model.weight, torch.nn.Parameter(torch.randn(4, 8)))
        torch.testing.assert_close(f(x), model(x))


@pytest.mark.parametrize("options", BUILT_LATER.values(), ids=BUILT_LATER)
def test_weights_can_be_swapped_once_an_engine_was_built_behind_dynamos_compile(options) -> None:
    """What a later compile has met is forgotten, as torch does behind its own."""
    model = torch.nn.Linear(8, 4)
    f, x = torch.compile(model, backend="composer", options=options), torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(3):
            f(x)
        settle()
        assert composer.reports()[-1].attempts[-1].backend == "aot_eager"
        torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.randn(4, 8)))
        torch.testing.assert_close(f(x), model(x))


@pytest.mark.slow
def test_a_fused_step_is_seen() -> None:
    """The next call has the new weights."""
    model, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    f = compiled(model, "onnxrt")
    with torch.no_grad():
        f(x)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(f(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["step", "engine"])
def test_a_compiled_fused_step_is_seen(first: str) -> None:
    """Whether the step was compiled before an engine bound a weight, or after."""
    model, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    f = compiled(model, "onnxrt")

    def train() -> None:
        model(x).square().mean().backward()
        step()

    for each in (train,) if first == "step" else ():
        each()
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(f(x), model(x))
        train()


def test_a_compiled_step_that_is_not_fused_has_no_more_breaks() -> None:
    """Dynamo traces the hook, and finds nothing to do."""
    by_address.count_steps()
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([weight], lr=0.1, foreach=True)
    counters["graph_break"].clear()
    torch.compile(lambda: optimizer.step(), backend="aot_eager")()
    assert not torch.equal(weight, torch.ones(4))
    assert not any("versions mean nothing" in why for why in counters["graph_break"])


@pytest.fixture
def _alone(tmp_path):
    """The only rank of a group."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@upstream
@pytest.mark.usefixtures("_alone")
def test_torch_collectives_do_not_raise_versions() -> None:
    """The quirk behind ``receives_parameters``; when this fails, it can go."""
    weight = torch.nn.Parameter(torch.ones(4))
    before = weight._version
    with torch.no_grad():
        distributed.broadcast(weight, 0)
        distributed.all_reduce(weight)
    assert weight._version == before


@pytest.mark.usefixtures("_alone")
def test_parameters_that_other_ranks_update_are_seen() -> None:
    """Which of them were, a rank does not know: all may have been, whoever has their gradients."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    tensors = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(tensors, torch.optim.SGD, lr=0.1)
    bound = by_address.BoundWeights(dict(enumerate(tensors)))
    optimizer.step()
    assert bound.changed(tensors) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("how", ["dynamo", "direct"])
def test_statistics_moved_by_an_eager_forward_are_seen(how, numpy, monkeypatch) -> None:
    """By their values, or by the witness where those are not read, as on a GPU."""
    monkeypatch.setattr(samples, "_HAS_NUMPY", numpy)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        if how == "dynamo":
            f = compiled(model, "onnxrt")
        else:
            backend = torch._dynamo.lookup_backend("composer")
            f = backend(torch.fx.symbolic_trace(model), [x], options={"chain": ["onnxrt"]})
        for _ in range(3):
            torch.testing.assert_close(f(x), model(x))
            model.train()(torch.randn(16, 3, 8, 8) * 3 + 1)
            model.eval()
    assert last().chosen == "onnxrt"


class WrittenOut(torch.nn.Module):
    """Reads a batch norm's statistics by operators of its own."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        if self.training:
            return self.norm(x)
        return (x - self.norm.running_mean) * torch.rsqrt(self.norm.running_var + self.norm.eps)


@pytest.mark.slow
@pytest.mark.parametrize("witness", [True, False])
@pytest.mark.parametrize("how", ["method", "closure"])
@pytest.mark.parametrize("chain", ["onnxrt", "openvino", "frozen"])
def test_statistics_read_by_a_norm_that_is_written_out_are_seen(
    chain: str, how: str, witness: bool
) -> None:
    """They are moved by the batch norm that owns them, with or without counting its batches."""
    if chain == "openvino":
        pytest.importorskip("openvino")
    engine = "inductor" if chain == "frozen" else chain
    model, x = WrittenOut().eval(), torch.randn(8, 4)
    if not witness:
        model.norm.num_batches_tracked = None
    f = compiled(model if how == "method" else lambda x: model(x), engine, freeze=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(f(x), model(x))
            model.train()(torch.randn(16, 4) * 3 + 1)
            model.eval()
    assert last().chosen == engine


class OwnCall(torch.nn.Module):
    """Calls ``F.batch_norm`` itself, for which the norm counts no batch."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        norm = self.norm
        statistics, affine = (norm.running_mean, norm.running_var), (norm.weight, norm.bias)
        return torch.nn.functional.batch_norm(x, *statistics, *affine, self.training, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("chain", ["onnxrt", "openvino", "frozen"])
def test_statistics_that_the_programs_own_call_moves_are_seen(chain, numpy, monkeypatch) -> None:
    """They are compared by value; where they are not read, as on a GPU, they are inputs."""
    if chain == "openvino":
        pytest.importorskip("openvino")
    monkeypatch.setattr(samples, "_HAS_NUMPY", numpy)
    engine = "inductor" if chain == "frozen" else chain
    model, x = OwnCall().eval(), torch.randn(3, 4)
    f = compiled(model, engine, freeze=True)
    with torch.no_grad():
        for scale in range(1, 5):
            for _ in range(2):
                torch.testing.assert_close(f(x), model(x))
            model.train()(torch.randn(8, 4) * 3 * scale + 2)
            model.eval()
    assert last().chosen == engine


class OwnStatistics(torch.nn.Module):
    """Batch norm over buffers of its own: nothing beside them tells of a change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        training = self.training
        return torch.nn.functional.batch_norm(x, self.mean, self.var, training=training) + 1


@pytest.mark.slow
def test_statistics_that_no_norm_owns_are_seen() -> None:
    """They are compared by value at every call."""
    model, x = OwnStatistics().eval(), torch.randn(8, 4)
    f = compiled(model, "onnxrt")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(f(x), model(x))
            model.train()(torch.randn(16, 4) * 3 + 1)
            model.eval()
    assert last().chosen == "onnxrt"


@pytest.mark.parametrize("in_a_row", [True, False])
def test_another_object_of_equal_value_has_another_identity(monkeypatch, in_a_row) -> None:
    """One element or several, whatever stands there instead, and how the identities are read."""
    assert by_address._in_a_row(), "another interpreter's tuples: identities take a little longer"
    monkeypatch.setattr(by_address, "_IN_A_ROW", in_a_row)
    assert by_address.identities(()) == by_address.identities(())
    for shape in ((1,), (), (3,), (2, 2)):
        bound = torch.ones(shape)
        known = by_address.identities((None, bound))
        assert by_address.identities((None, bound)) == known
        assert by_address.identities((None, torch.ones(shape))) != known
        assert by_address.identities((None, torch.zeros(5))) != known


def test_a_witness_of_several_weights_is_looked_at_once() -> None:
    """And tells of all of them."""
    tensors, witness = {0: torch.ones(3), 1: torch.ones(3)}, torch.zeros(())
    members = by_address.WeightSet(list(tensors.values()), dict.fromkeys(tensors, witness), id)
    bound = by_address.BoundWeights(tensors, members)
    assert bound.unchanged((*tensors.values(),))
    witness.add_(1)
    assert not bound.unchanged((*tensors.values(),))
    assert bound.changed((*tensors.values(),)) == {0, 1}
    assert len(bound._distinct) == 1


TAKEN_IN: dict[str, dict[str, Any]] = {
    "onnxrt": {"chain": ["onnxrt"]},
    "openvino": {"chain": ["openvino"]},
    "frozen": {"chain": ["inductor"], "freeze": True},
    "bf16": {"chain": ["aot_eager"], "precision": "bf16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["before", "later"])
@pytest.mark.parametrize("options", TAKEN_IN.values(), ids=TAKEN_IN)
def test_weights_that_other_processes_may_write_to_stay_inputs(options, shared) -> None:
    """Such a write raises no version here, no more than this one does."""
    if "openvino" in options["chain"]:
        pytest.importorskip("openvino")
    model, x = torch.nn.Linear(16, 16), torch.randn(3, 16)
    f = torch.compile(model, backend="composer", options=options)
    bound = {"rtol": 0.05, "atol": 0.05} if "precision" in options else {}
    with torch.no_grad():
        if shared == "later":
            f(x)
        model.share_memory()
        for _ in range(2):
            torch.testing.assert_close(f(x), model(x), **bound)
            model.weight.data.mul_(2)
    assert last().chosen == options["chain"][0]


@pytest.mark.slow
@pytest.mark.parametrize("options", TAKEN_IN.values(), ids=TAKEN_IN)
def test_parts_of_one_vector_stay_inputs(options) -> None:
    """A write to the vector raises no version of theirs."""
    if "openvino" in options["chain"]:
        pytest.importorskip("openvino")
    model, x = torch.nn.Linear(16, 16), torch.randn(3, 16)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    f = torch.compile(model, backend="composer", options=options)
    bound = {"rtol": 0.05, "atol": 0.05} if "precision" in options else {}
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(f(x), model(x), **bound)
            vector.mul_(-2)
    assert last().chosen == options["chain"][0]


def test_parts_that_nobody_has_the_whole_of_are_bound() -> None:
    """As what was loaded in one piece and cut, or a window of which torch made one number more."""
    weight = torch.randn(12, 4)
    parts = dict(enumerate(torch.nn.Parameter(each) for each in weight.chunk(3)))
    window = torch.hann_window(400)
    assert watchable({**parts, 3: window}).keys() == {3}
    del weight
    assert watchable({**parts, 3: window}).keys() == {0, 1, 2, 3}


def test_memory_of_what_is_bound_is_not_given_to_other_values() -> None:
    """They would lie at the old address. Memory of that size has pages of its own."""
    weight = torch.nn.Parameter(torch.randn(4096, 4096))
    bound, address = by_address.BoundWeights({0: weight}), weight.data_ptr()
    weight.data = torch.empty(0)
    weight.data = torch.randn(4096, 4096)
    assert weight.data_ptr() != address
    assert not bound.unchanged((weight,))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["data", "numpy"])
def test_a_write_that_no_version_tells_of_is_seen_after_refresh(how) -> None:
    """However often: it is no reason to take the weight for one that changes all the time."""
    model, x = torch.nn.Linear(64, 64), torch.randn(3, 64)
    f = compiled(model, "onnxrt")
    with torch.no_grad():
        f(x)
        for _ in range(6):
            version = model.weight._version
            if how == "data":
                model.weight.data.mul_(1.5)
            else:
                model.weight.detach().numpy()[:] *= 1.5
            assert model.weight._version == version
            composer.refresh()
            torch.testing.assert_close(f(x), model(x))
    assert last().chosen == "onnxrt"
    (alive,) = (each for each in by_address._bound.values() if not each.expired)
    assert alive.unchanged((model.weight, model.bias))


def merge(model: torch.nn.Module) -> None:
    """As peft merges an adapter."""
    model.weight.data += torch.full((64, 1), 0.1) @ torch.full((1, 64), 0.1)


def swap_in(model: torch.nn.Module) -> None:
    """As averages of weights are swapped in."""
    model.weight.data.copy_(torch.randn(64, 64))


def overwrite(model: torch.nn.Module) -> None:
    model.weight.detach().numpy()[:] *= 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain", "write", "dtype"),
    [
        ("onnxrt", merge, torch.float32),
        ("onnxrt", merge, torch.bfloat16),
        ("onnxrt in bf16", swap_in, torch.float32),
        ("onnxrt", swap_in, torch.float32),
        ("onnxrt", overwrite, torch.float32),
        ("openvino", merge, torch.float32),
        ("inductor", merge, torch.float32),
    ],
)
def test_a_write_that_no_version_tells_of_is_found_by_elements(
    monkeypatch, chain, write, dtype
) -> None:
    """The call that follows sees it, however often; a warning says so if no version tells of it."""
    monkeypatch.setattr(by_address, "PATIENCE", 0.0)
    # Else a processor with products in bfloat16 has bfloat16 stay torch's.
    monkeypatch.setattr(_torch.processor, "multiplies_bf16", lambda: False)
    engine, _, precision = chain.partition(" in ")
    if chain == "openvino":
        pytest.importorskip("openvino")
    model = torch.nn.Linear(64, 64, dtype=dtype)
    f = compiled(model, engine, freeze=True, precision=precision or "fp32")
    x = torch.randn(3, 64, dtype=dtype)
    with torch.no_grad():
        f(x)
        for number in range(4):
            version = model.weight._version
            write(model)
            assert model.weight._version == version
            torch.testing.assert_close(f(x), model(x), rtol=5e-2, atol=5e-2)
            warned = pytest.warns(WeightsWarning, match="raises no version")
            with warned if number == 0 else contextlib.nullcontext():
                f(x)
    assert (last().chosen, last().runtime.fallbacks) == (engine, 0)


@pytest.mark.slow
def test_a_write_under_way_in_another_thread_is_no_reason_to_warn(monkeypatch, recwarn) -> None:
    """Torch raises the version behind it; until then only the elements tell."""
    model, x = torch.nn.Linear(64, 64), torch.randn(3, 64)
    f = compiled(model, "onnxrt")
    with torch.no_grad():
        f(x)
        model.weight.data.mul_(2)
        torch.testing.assert_close(f(x), model(x))
        torch.autograd.graph.increment_version(model.weight)
        monkeypatch.setattr(by_address, "PATIENCE", 0.0)
        for _ in range(3):
            torch.testing.assert_close(f(x), model(x))
    (alive,) = (each for each in by_address._bound.values() if not each.expired)
    assert alive.changed((model.weight, model.bias)) == frozenset()
    assert set(alive._states) == {0, 1}, "the weights are bound again"
    assert not [each for each in recwarn if each.category is WeightsWarning]
    assert last().runtime.fallbacks == 0


@pytest.mark.slow
def test_memory_of_what_is_bound_may_be_resized() -> None:
    """As FSDP does between calls; behind ``Tensor.numpy()`` torch lets nobody."""
    model, x = torch.nn.Linear(64, 64), torch.randn(3, 64)
    f = compiled(model, "onnxrt")
    with torch.no_grad():
        f(x)
        storage, values = model.weight.untyped_storage(), model.weight.clone()
        for _ in range(2):
            storage.resize_(0)
            storage.resize_(values.nbytes)
            model.weight.copy_(values)
            torch.testing.assert_close(f(x), model(x))
    assert (last().chosen, last().runtime.fallbacks) == ("onnxrt", 0)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 200])
def test_elements_of_each_weight_take_turns(number) -> None:
    """A write to all weights is found at the next call, one to a single weight within a round."""
    weights = {i: torch.nn.Parameter(torch.ones(64, i + 1)) for i in range(number)}
    found = samples.Samples(weights)
    assert not any(found.show_a_write() for _ in range(2 * number))
    weights[number // 2].data.mul_(2)
    assert any(found.show_a_write() for _ in range(number))
    assert found.changed() == {number // 2}
    for each in weights.values():
        each.data.mul_(0.9)
    assert all(found.show_a_write() for _ in range(number))


@pytest.mark.parametrize("number", [1, 2, 4, 7, 200])
def test_each_element_has_its_turn(number: int) -> None:
    """A write to the second half of one weight is found as well."""
    weights = {i: torch.nn.Parameter(torch.ones(64)) for i in range(number)}
    found = samples.Samples(weights)
    weights[0].data[32:] *= 2
    assert any(found.show_a_write() for _ in range(8 * number))


def test_an_element_that_a_factor_changes_is_chosen() -> None:
    """A zero stays zero in a weight that is scaled."""
    weight = torch.nn.Parameter(torch.zeros(800))
    weight.data[100::101] = 1.0
    weight.data[100] = 1.0
    found = samples.Samples({0: weight})
    weight.data.mul_(2)
    assert found.show_a_write()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (16, 2, 3, 3)])
def test_elements_are_read_of_any_dense_tensor(dtype, shape) -> None:
    """In whatever order it lies; of one with gaps, which are nobody's, none."""
    weight = torch.zeros(shape, dtype=dtype)
    if weight.dim() == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(weight, requires_grad=False)
    conjugate = torch.zeros(4, dtype=torch.complex64).conj()
    found = samples.Samples({0: torch.zeros(8, 8)[:, :3], 1: conjugate, 2: weight})
    assert found.changed() == frozenset()
    assert not found.show_a_write()
    weight.data.fill_(1)
    assert found.changed() == {2}
    assert found.show_a_write()


@pytest.mark.parametrize("chain", ["onnxrt", "openvino"])
def test_what_a_module_keeps_and_lets_grow_stays_an_input(chain: str) -> None:
    """Dynamo marks a module's tensor as static although it takes its size to be dynamic."""

    class Growing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4, 4)
            self.kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            self.kept = y if self.kept is None else torch.cat([self.kept, y])[-5:]
            return self.kept * 2

    model = Growing()
    twin = copy.deepcopy(model)
    run = compiled(model, chain)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 4)
            torch.testing.assert_close(run(x), twin(x))
    assert {each.chosen for each in composer.reports()} == {chain}


class WritesToAddresses(torch.optim.Optimizer):
    """As the kernels of other packages do, which raise no version."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in (each for each in group["params"] if each.grad is not None):
                each.detach().numpy()[...] -= each.grad.numpy()


def test_steps_of_other_packages_optimizers_are_seen() -> None:
    """Whatever kernel they have."""
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    optimizer = WritesToAddresses(model.parameters())
    f = compiled(model, "onnxrt")
    with torch.no_grad():
        f(x)
    model(x).sum().backward()
    before = model.weight.clone()
    others = torch.nn.Linear(2, 2)
    optimizer.param_groups[0]["params"] += others.parameters()
    versions = [each._version for each in others.parameters()]
    optimizer.step()
    assert [each._version for each in others.parameters()] == versions
    assert not torch.equal(model.weight, before)
    with torch.no_grad():
        torch.testing.assert_close(f(x), model(x))


def test_parts_of_a_frozen_vector_are_inputs() -> None:
    """After ``gc.freeze()`` nobody tells what else lies over the memory of a weight."""
    model, x = torch.nn.Linear(16, 16), torch.randn(3, 16)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    statistic = torch.ones(2)
    assert find_witnesses({0: statistic}) == {}
    gc.freeze()
    try:
        assert find_witnesses({0: statistic}) == {0: None}
        f = compiled(model, "onnxrt")
        with torch.no_grad():
            f(x)
            vector.mul_(-2)
            torch.testing.assert_close(f(x), model(x))
    finally:
        gc.unfreeze()


def test_tensors_without_a_version_are_not_watched() -> None:
    """Inference tensors have none, so that a write to one would go unseen."""
    with torch.inference_mode():
        unseen = torch.ones(3)
    seen = torch.ones(3)
    assert watchable({0: unseen, 1: seen}) == {1: seen}


EMA_ENGINES: dict[str, dict[str, Any]] = {
    "onnxrt": {"chain": ["onnxrt"]},
    "openvino": {"chain": ["openvino"]},
    "inductor": {"chain": ["inductor"], "freeze": True},
    "onnxrt, dynamic": {"chain": ["onnxrt"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EMA_ENGINES)
def test_a_moving_average_is_evaluated_by_its_present_weights(case, monkeypatch) -> None:
    """The first of twelve updates through ``.data`` in a tight loop makes the weights inputs."""
    options = EMA_ENGINES[case]
    if options["chain"] == ["openvino"]:
        pytest.importorskip("openvino")
    monkeypatch.setattr(by_address, "PATIENCE", 3600.0)
    layers = [torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.GELU()]
    model = torch.nn.Sequential(*copy.deepcopy(layers), *copy.deepcopy(layers)).eval()
    f = torch.compile(
        model,
        backend="composer",
        dynamic="dynamic" in case,
        options={**options, "on_runtime_error": "raise"},
    )
    builds = []
    with torch.no_grad():
        f(torch.randn(4, 16))
        monkeypatch.setattr(BindingEngine, "_bind", _counted(BindingEngine._bind, builds))
        for _ in range(12):
            for each in model.parameters():
                each.data.mul_(0.9).add_(torch.randn_like(each), alpha=0.1)
            x = torch.randn(4, 16)
            torch.testing.assert_close(f(x), model(x))
    assert len(builds) <= 2, "once as inputs, and no more"
    assert last().chosen == options["chain"][0]


def _counted(function, calls: list[Any]):
    def call(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return call
