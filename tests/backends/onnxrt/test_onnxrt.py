"""The ONNX Runtime engine: weights by address and never stale, honest about what it cannot do."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from common import compiled, last, upstream
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._python_dispatch import TorchDispatchMode
from weight_changes import CHANGES

import composer
from composer import _torch
from composer.backends import find_backend
from composer.backends.onnxrt import OnnxRuntimeEngine, session
from composer.backends.onnxrt.session import session_options
from composer.backends.onnxrt.settings import Settings
from composer.errors import OptionError, Refusal
from composer.graphs.capture import read_request
from composer.lowering.export.onnx import to_onnx
from composer.system.distribution import install

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("inference")]


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def test_all_wrong_options_are_named_at_once() -> None:
    """A name, a value and a slip within an entry."""
    config = {"session.intra_op.allow_spining": "0"}
    options = {"thread": 2, "graph_optimization_level": "most", "session_config": config}
    with pytest.raises(OptionError) as caught:
        OnnxRuntimeEngine().settings(options)
    for wrong in ("'thread'", "'most'", "allow_spining"):
        assert wrong in str(caught.value)


def test_works_by_itself_without_composers_chain() -> None:
    """``torch.compile(m, backend="onnxrt")``, as before torch removed its own."""
    model, x = mlp(), torch.randn(3, 8)
    f = torch.compile(model, backend="onnxrt", options={"threads": 1})
    torch.testing.assert_close(f(x), model(x))
    assert composer.reports() == ()


def test_newer_settings_of_float32_are_no_obstacle(newer_precision: None) -> None:
    """Torch has no word for them, and raises where it is asked for one."""
    model, x = mlp(), torch.randn(3, 8)
    torch.testing.assert_close(compiled(model, "onnxrt")(x), model(x))
    assert last().chosen == "onnxrt"


def test_the_record_says_what_ran() -> None:
    """Version, providers, threads, and the whole graph covered."""
    compiled(mlp(), {"backend": "onnxrt", "options": {"threads": 1}})(torch.randn(3, 8))
    (attempt,) = last().attempts
    assert attempt.coverage == 1.0
    assert attempt.engine == {
        "options": {"threads": 1},
        "onnxruntime": onnxruntime.__version__,
        "providers": ["CPUExecutionProvider"],
        "nodes": {"CPUExecutionProvider": 3},
        "threads": 1,
        "calls": "native",
        "keeps_nan": True,
        "artefacts": "kept",
    }


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_never_stale(change) -> None:
    """The very next call answers with the new weights, and no second export happens."""
    model, x = mlp(), torch.randn(3, 8)
    f = compiled(model, "onnxrt")
    before = f(x)
    change(model)
    torch.testing.assert_close(f(x), model(x))
    assert not torch.allclose(f(x), before)
    torch.testing.assert_close(f(x), model(x))


def test_a_weight_that_keeps_changing_becomes_an_input() -> None:
    """Sessions are not rebuilt for ever; the numbers stay right."""
    model, x = mlp(), torch.randn(3, 8)
    f = compiled(model, "onnxrt")
    f(x)
    made = []
    original = onnxruntime.InferenceSession.__init__

    def count(self, *args, **kwargs):
        made.append(1)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime.InferenceSession, "__init__", count)
        for _ in range(6):
            model[0].weight.add_(0.1)
            torch.testing.assert_close(f(x), model(x))
    assert len(made) == 2


def test_weights_are_taken_by_address() -> None:
    """ONNX Runtime reads torch's own memory: a write it cannot see shows through.

    The write goes around the version counter; it is the documented blind spot, and the proof that
    no copy was made. A table is used as it lies there, not packed anew,
    and large enough not to be written into the model (ONNX Runtime does so below 128 bytes).
    """
    table = torch.nn.Embedding.from_pretrained(torch.full((64, 16), 2.0))
    f = compiled(table, "onnxrt")
    places = torch.arange(64)
    assert f(places).sum() == 2 * 1024
    table.weight.detach().numpy()[:] = 3
    assert f(places).sum() == 3 * 1024


class Positions(torch.nn.Module):
    """Patches with a table of positions added, channels last, as SAM and ViTDet have them."""

    def __init__(self, channels: int, *table: int) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, channels, 4, stride=4)
        self.table = torch.nn.Parameter(torch.randn(table))

    def forward(self, x):
        return torch.relu(self.patches(x).permute(0, 2, 3, 1) + self.table)


@pytest.mark.parametrize(
    ("channels", "table"),
    [(8, (1, 4, 4, 8)), (4, (1, 4, 4, 4)), (4, (4, 4)), (4, (4, 1)), (8, (8,))],
)
def test_a_weight_beside_what_is_transposed_is_read_as_it_is(channels, table) -> None:
    """The optimizer transposes the weight, in place of what it is added to."""
    model, x = Positions(channels, *table), torch.randn(2, 3, 16, 16)
    f = compiled(model, "onnxrt")
    torch.testing.assert_close(f(x), model(x))
    model.table.mul_(2)
    torch.testing.assert_close(f(x), model(x))
    assert last().chosen == "onnxrt", last().attempts[0].message


class Sum(torch.nn.Module):
    """The weight's transpose has the weight's shape, so nothing would be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return torch.relu(torch.relu(x).T + self.weight)


def test_a_square_weight_beside_a_transposed_matrix_is_read_as_it_is() -> None:
    """So it is with any other weight that its transpose would fit in place of."""
    model, x = Sum(), torch.randn(16, 16)
    torch.testing.assert_close(compiled(model, "onnxrt")(x), model(x))
    assert last().chosen == "onnxrt"


def test_such_a_weight_is_still_transposed_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ONNX Runtime's optimizer: all weights can be given by address once this fails."""
    monkeypatch.setattr(session, "_may_be_transposed", lambda model: set())
    model, x = Sum(), torch.randn(16, 16)
    f = compiled(model, "onnxrt")
    assert not torch.allclose(f(x), model(x), atol=0.1)


class Tied(torch.nn.Module):
    """One matrix as a table, by itself and transposed, with a bias added and without."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(24, 8)
        self.down = torch.nn.Linear(24, 24)

    def forward(self, tokens):
        rows = self.table(tokens)
        scores = torch.nn.functional.linear(rows, self.table.weight)
        moved = (rows * 2) @ self.table.weight.T + self.down.bias
        return scores, self.down(scores) @ self.table.weight, moved


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1, 4), (0, 3)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_that_is_read_transposed_is_read_as_it_lies(shape, dynamic, monkeypatch) -> None:
    """And anew after it changed in place."""
    models = spied(monkeypatch)
    model = Tied()
    f = compiled(model, "onnxrt", dynamic=dynamic, min_coverage=0.0)  # views of no elements
    for change in (lambda: None, lambda: model.table.weight.mul_(2), model.table.reset_parameters):
        change()
        tokens = torch.randint(0, 24, shape)
        torch.testing.assert_close(f(tokens), model(tokens))
    assert last().chosen == "onnxrt", last().attempts[0].message
    counts = [each.count("FusedMatMul") for each in models]
    assert (counts[0] > 0) is (0 not in shape)
    assert counts[-1] == 0  # after its second change a weight is an input


def spied(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The operators of each model that a session is made of from now on."""
    edit, found = session.read_weights_as_they_lie, []

    def reading(model) -> None:
        edit(model)
        found.append([node.op_type for node in model.graph.node])

    monkeypatch.setattr(session, "read_weights_as_they_lie", reading)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_products_in_other_types_have_no_such_operator(dtype, monkeypatch) -> None:
    """They are transposed as before."""
    models = spied(monkeypatch)
    weight = torch.randn(16, 8).mul(4).to(dtype)
    x = torch.randn(3, 8).mul(4).to(dtype)
    f = compiled(Fixed(weight), "onnxrt")
    torch.testing.assert_close(f(x), x @ weight.T)
    assert last().chosen == "onnxrt", last().attempts[0].message
    assert models
    assert all("FusedMatMul" not in each for each in models)


class Fixed(torch.nn.Module):
    """A product with the transpose of a buffer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x):
        return x @ self.weight.T


@upstream
def test_weights_are_still_transposed_when_a_session_is_made(monkeypatch, optimized) -> None:
    """By ONNX Runtime itself: ``products.py`` can go once this fails."""
    found = []
    for edit in (session.read_weights_as_they_lie, lambda model: None):
        monkeypatch.setattr(session, "read_weights_as_they_lie", edit)
        torch.compiler.reset()
        compiled(Fixed(torch.randn(16, 8)), "onnxrt")(torch.randn(3, 8))
        graph = optimized()
        shapes = [tuple(each.dims) for each in graph.initializer]
        found.append(([node.op_type for node in graph.node], shapes))
    assert found == [(["FusedMatMul"], [(16, 8)]), (["MatMul"], [(8, 16)])]


def test_frozen_weights_with_grad_on_stay_inputs() -> None:
    """With grad mode on nothing is taken in, since training may go on."""
    model = mlp().requires_grad_(False)
    with torch.enable_grad():
        f = compiled(model, "onnxrt")
        x = torch.randn(3, 8)
        torch.testing.assert_close(f(x), model(x))
        model[0].weight.numpy()[:] = 0
        torch.testing.assert_close(f(x), model(x))
    assert last().chosen == "onnxrt"


def test_random_numbers_stay_torchs() -> None:
    """Where all that is asked for are such, the graph is."""
    compiled(torch.rand_like, "onnxrt")(torch.ones(4))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_op")
    assert "random numbers stay torch's" in attempt.message


def test_attention_without_dropout_is_taken() -> None:
    """Its operators are tagged as random for a dropout that is zero."""
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)

    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) + attention(x, x, x)[0]

    torch.testing.assert_close(compiled(attend, "onnxrt")(x), attend(x))
    assert last().chosen == "onnxrt"


def bessel(x):
    return torch.special.bessel_j0(x)


def test_a_graph_of_nothing_translatable_is_declined_by_name() -> None:
    """With the operator's full name and the user's line."""
    x = torch.ones(3)
    torch.testing.assert_close(compiled(bessel, "onnxrt")(x), bessel(x))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_op")
    assert "prims.bessel_j0.default (no ONNX translation)" in attempt.message
    assert "test_onnxrt.py" in attempt.message


COMPLEX = {
    "goes in and comes out": lambda x: torch.view_as_complex(x) * 2,
    "comes out": lambda x: (torch.view_as_complex(x.sin().exp()).conj(), x.cos().tanh() + 1),
    "is all there is": lambda x: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("function", COMPLEX.values(), ids=COMPLEX)
def test_complex_numbers_are_declined(function) -> None:
    """Never wrong."""
    x = torch.randn(3, 2)
    torch.testing.assert_close(compiled(function, "onnxrt")(x), function(x))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("declined", "unsupported_dtype")


def test_complex_inputs_are_declined() -> None:
    """With their dtype."""
    x = torch.randn(3, dtype=torch.complex64)
    torch.testing.assert_close(compiled(lambda x: x.real.sin() + 1, "onnxrt")(x), x.real.sin() + 1)
    (attempt,) = last().attempts
    assert attempt.reason == "unsupported_dtype"
    assert "torch.complex64" in attempt.message


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """A rotary embedding, as DeepSeek and Llama 4 have it."""
    pairs = torch.view_as_complex((x * 2).unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    return torch.nn.functional.gelu(turned.flatten(-2) @ torch.ones(8, 8)).softmax(-1)


def spectrum(x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """Loudness by frequency, its backward with a sign of complex numbers."""
    found = torch.stft((x * 2).flatten(), 8, window=window, return_complex=True)
    return torch.log1p(found.abs()).relu() * 2 + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "x", "other"),
    [(rotated, (2, 5, 8), (5, 4)), (spectrum, (2, 32), (8,))],
    ids=["rotated", "spectrum"],
)
def test_complex_numbers_between_operators_are_left_to_torch(function, x, other, dynamic) -> None:
    """The rest of the graph is ONNX Runtime's, its backward too."""
    inputs = [torch.rand(x, requires_grad=True), torch.rand(other, requires_grad=True)]
    twins = [each.detach().clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        results = compiled(function, "onnxrt", dynamic=dynamic)(*inputs), function(*twins)
        for each in results:
            each.square().sum().backward()
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*([each.grad for each in given] for given in (inputs, twins)))
    (attempt,) = last().attempts
    assert attempt.accepted, attempt.message
    assert attempt.coverage > 0.5
    assert any("(complex numbers)" in line for line in attempt.engine["left_to_torch"])


def inverted(x: torch.Tensor) -> torch.Tensor:
    """A pseudo-inverse of complex numbers."""
    return torch.view_as_real(torch.linalg.pinv(torch.view_as_complex(x * 2))).exp().tanh() + 1


def test_complex_numbers_that_compiled_torch_gets_wrong_are_declined() -> None:
    """With the operator's name and the user's line."""
    x = torch.rand(4, 3, 2)
    found = compiled(inverted, {"backend": "onnxrt", "min_coverage": 0.0})(x)
    torch.testing.assert_close(found, inverted(x))
    (attempt,) = last().attempts
    assert attempt.reason == "unsupported_dtype"
    assert "of complex numbers is wrong in torch itself" in attempt.message
    assert "test_onnxrt.py" in attempt.message


class Forwards(TorchDispatchMode):
    """Does nothing but pass calls on."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_torch_still_loses_conjugates_within_a_kernel_under_a_mode() -> None:
    """Else pseudo-inverses need not be declined any more (pytorch/pytorch#198118)."""
    x = torch.rand(4, 3, 2)
    with Forwards():
        found = inverted(x)
    assert not torch.allclose(found, inverted(x))


def test_a_translation_warns_of_nothing_that_is_not_the_users(caplog) -> None:
    """onnx_ir has one for the empty shape of a number, the exporter for a determinant's parts."""
    compiled(lambda x: torch.linalg.det(x.sin()) * 2, "onnxrt")(torch.rand(3, 3))
    compiled(lambda x: torch.diagonal_scatter(x * 2, x[0] + 1) * 2, "onnxrt")(torch.ones(3, 3))
    assert last().chosen == "onnxrt", last().attempts[0].message
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


WRONG = {
    "unknown option": ({"thread": 2}, "did you mean 'threads'"),
    "no threads": ({"threads": 0}, "'threads' is 0: Input should be greater than 0"),
    "threads in words": ({"threads": "two"}, "'threads' is 'two'"),
    "unknown level": ({"graph_optimization_level": "most"}, "'graph_optimization_level' is 'most'"),
    "unknown provider": ({"providers": ["CPUExecution"]}, "did you mean 'CPUExecutionProvider'"),
    "options of no provider": (
        {"provider_options": {"OpenVINOExecutionProvider": {"device_type": "CPU"}}},
        "provider_options for OpenVINOExecutionProvider, not in providers",
    ),
    "options of the CPU": (
        {
            "providers": ["CPUExecutionProvider"],
            "provider_options": {"CPUExecutionProvider": {"a": "1"}},
        },
        "provider_options: CPUExecutionProvider takes none",
    ),
    "a slip in an entry": (
        {"session_config": {"session.intra_op.allow_spining": "0"}},
        "did you mean 'session.intra_op.allow_spinning'",
    ),
    "an entry that is no text": ({"session_config": {"a.b": ["1"]}}, "session_config.a.b"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_raise(options, message) -> None:
    """The user's own mistake, before anything is tried."""
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        compiled(mlp(), {"backend": "onnxrt", "options": options})(torch.randn(2, 8))
    assert isinstance(caught.value.inner_exception, OptionError)


@pytest.mark.parametrize("level", ["disable", "basic", "extended", "layout", "all"])
def test_graph_optimization_level_is_the_sessions(level: str, monkeypatch) -> None:
    """ONNX Runtime's own levels, by name."""
    seen = []
    make = onnxruntime.InferenceSession

    def spy(model, options, **kwargs):
        seen.append(options)
        return make(model, options, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    model, x = mlp(), torch.randn(2, 8)
    chain = {"backend": "onnxrt", "options": {"graph_optimization_level": level, "threads": 1}}
    torch.testing.assert_close(compiled(model, chain)(x), model(x))
    assert seen[0].graph_optimization_level.name.endswith(
        level.upper() if level != "disable" else "DISABLE_ALL"
    )
    assert seen[0].intra_op_num_threads == 1


def test_entries_of_the_session_are_handed_on() -> None:
    """In front of those that composer sets itself."""
    key = "session.force_spinning_stop"
    for given, expected in (({}, "1"), ({key: "0"}, "0")):
        options = session_options(Settings(session_config=given))
        assert options.get_session_config_entry(key) == expected


@pytest.mark.parametrize("name", ["CUDAExecutionProvider", "OpenVINOExecutionProvider"])
def test_a_provider_that_is_not_built_in_is_a_failure(name: str) -> None:
    """ONNX Runtime would run on the CPU and warn; it was asked for by name."""
    chain = {"backend": "onnxrt", "options": {"providers": [name, "CPUExecutionProvider"]}}
    compiled(mlp(), chain)(torch.randn(2, 8))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("failed", "wrong_provider")
    assert f"this build of onnxruntime has no {name}" in attempt.message


def test_a_build_for_the_cpu_is_none_for_a_gpu(monkeypatch) -> None:
    """The probe of a graph on one says so; a build with another provider is asked further."""
    gm = torch.fx.symbolic_trace(torch.nn.ReLU())
    graph = dataclasses.replace(read_request(gm, [torch.ones(1)]), device="cuda:0")
    with pytest.raises(Refusal, match="for the CPU alone") as refused:
        find_backend("onnxrt").probe(graph)
    assert (refused.value.status, refused.value.reason) == ("unavailable", "not_installed")
    capi = Path(onnxruntime.__file__).parent / "capi"
    found = [*capi.glob("*onnxruntime_providers_*"), capi / "libonnxruntime_providers_cuda.so"]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(found))
    find_backend("onnxrt").probe(graph)


def test_every_provider_is_told_with_its_share() -> None:
    """Asked for in order; the nodes say who really ran them."""
    chain = {
        "backend": "onnxrt",
        "options": {"providers": ["AzureExecutionProvider", "CPUExecutionProvider"]},
    }
    compiled(mlp(), chain)(torch.randn(2, 8))
    engine = last().attempts[0].engine
    assert engine["providers"] == ["AzureExecutionProvider", "CPUExecutionProvider"]
    assert engine["nodes"] == {"CPUExecutionProvider": 3}


@pytest.mark.parametrize("missing", ["onnxruntime", "onnx", "onnxscript"])
def test_a_missing_package_is_unavailable(missing, monkeypatch) -> None:
    """In no time, and with the command that installs it."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    monkeypatch.delitem(sys.modules, missing, raising=False)
    compiled(mlp(), "onnxrt")(torch.randn(2, 8))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("unavailable", "not_installed")
    assert f"{missing} not installed; {install('onnxrt')}" in attempt.message


def test_a_provider_that_did_not_arrive_is_a_failure(monkeypatch) -> None:
    """ONNX Runtime falls back to another provider in silence; composer does not."""
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: ["Other"])
    compiled(mlp(), "onnxrt")(torch.randn(2, 8))
    (attempt,) = last().attempts
    assert (attempt.status, attempt.reason) == ("failed", "wrong_provider")


def test_float64_and_integers() -> None:
    """Every dtype of an index, a mask or a scientist."""
    for dtype in (torch.float64, torch.int32, torch.int64, torch.uint8):
        torch.compiler.reset()
        x = torch.arange(6).reshape(2, 3).to(dtype)
        f = compiled(lambda x: (x + 1) * x, "onnxrt")
        torch.testing.assert_close(f(x), (x + 1) * x)
        assert last().chosen == "onnxrt", last().attempts[0].message


def test_unused_inputs_and_repeated_outputs() -> None:
    """What the graph ignores is not fed; what it returns twice is returned twice."""

    def function(x, unused):
        y = x * 2
        return y, y

    a, b = compiled(function, "onnxrt")(torch.ones(2), torch.ones(3))
    assert torch.equal(a, b)
    assert torch.equal(a, torch.full((2,), 2.0))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_plain_numbers_are_inputs(number) -> None:
    """``isolate`` has a child process build a graph of dynamic numbers so."""
    graph = torch.fx.symbolic_trace(lambda x, n: (x[n:] + n,))
    x = torch.randn(4, 3)
    backend = torch._dynamo.lookup_backend("composer")
    run = backend(graph, [x, number], options={"chain": ["onnxrt"]})
    assert last().chosen == "onnxrt", last().attempts[0].message
    torch.testing.assert_close(run(x, number), (x[number:] + number,))


def test_a_weight_that_only_dead_code_reads() -> None:
    """BERT's pooler, when only its tokens are asked for; ONNX Runtime drops it, then misses it."""
    dead, live = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def function(x):
        dead(x)
        return live(x)

    x = torch.randn(2, 64)
    torch.testing.assert_close(compiled(function, "onnxrt")(x), live(x))
    assert last().chosen == "onnxrt"


def test_threads_call_one_engine_at_once() -> None:
    """A session may be run by several threads."""
    from concurrent.futures import ThreadPoolExecutor

    model = mlp()
    f = compiled(model, "onnxrt")
    inputs = [torch.randn(3, 8) for _ in range(32)]
    f(inputs[0])

    def work(x):
        with torch.no_grad():
            return f(x)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, inputs))
    torch.testing.assert_close(results, [model(x) for x in inputs])


def test_nothing_of_the_exporter_is_printed(run_python) -> None:
    """No warnings about torchvision, no progress lines."""
    done = run_python(
        "import torch\n"
        "f = torch.compile(torch.nn.Linear(4, 4), backend='composer',"
        " options={'chain': ['onnxrt']})\n"
        "with torch.no_grad(): f(torch.ones(2, 4))\n"
        "import composer; assert composer.reports()[0].chosen == 'onnxrt'\n"
    )
    assert done.returncode == 0
    assert (done.stdout, done.stderr) == ("", "")


def test_onnxruntime_was_not_imported_by_a_probe() -> None:
    """Probing looks for packages without loading them."""
    from composer.backends.base import require_installed

    loaded = set(sys.modules)
    require_installed(("onnxruntime", "onnx"), "pip install")
    assert set(sys.modules) == loaded


def test_a_cache_that_starts_empty_is_taken() -> None:
    """As Hugging Face's dynamic cache does: nothing, then what was seen, side by side."""

    def step(x):
        empty = torch.tensor([], dtype=x.dtype)
        return torch.cat([empty, x], dim=-1) * 2

    x = torch.randn(5)
    torch.testing.assert_close(compiled(step, "onnxrt")(x), step(x))
    assert last().chosen == "onnxrt", last().attempts[0].message


def test_one_model_is_made_however_many_engines_ask(monkeypatch) -> None:
    """The second candidate of the chain takes the first one's."""
    made = []
    translate = _torch.exporter.OnnxTranslator.translate

    def count(self, gm):
        made.append(gm)
        return translate(self, gm)

    trials = iter([RuntimeError("the first engine does not run")])

    def fail_once(*_):
        for error in trials:
            raise error

    monkeypatch.setattr(_torch.exporter.OnnxTranslator, "translate", count)
    monkeypatch.setattr("composer.lowering.compile.try_once", fail_once)
    chain = ["onnxrt", {"backend": "onnxrt", "options": {"threads": 1}}]
    model, x = mlp(), torch.randn(2, 8)
    torch.testing.assert_close(compiled(model, *chain)(x), model(x))
    assert [attempt.status for attempt in last().attempts] == ["failed", "succeeded"]
    assert len(made) == 1


def test_a_recompile_makes_a_model_of_its_own() -> None:
    """Other shapes, another graph."""
    model = mlp()
    run = compiled(model, "onnxrt", dynamic=False)
    for size in (2, 3):
        x = torch.randn(size, 8)
        torch.testing.assert_close(run(x), model(x))
    assert [report.chosen for report in composer.reports()] == ["onnxrt", "onnxrt"]


def test_dynamic_dimensions_have_the_names_of_the_graphs_symbols(monkeypatch) -> None:
    """In inputs and outputs; integers that the graph computes with go in and out as well."""
    made = []

    def spy(region, artefacts):
        values = [node.meta["val"] for node in region.gm.graph.find_nodes(op="placeholder")]
        shapes = [tuple(map(str, v.shape)) for v in values if isinstance(v, torch.Tensor)]
        made.append((shapes, to_onnx(region, artefacts)))
        return made[-1][1]

    monkeypatch.setattr(sys.modules["composer.lowering.partition.by_trial"], "to_onnx", spy)
    run = compiled(lambda x, y: (x @ y + 1, x.shape[0] * 2), "onnxrt", dynamic=True)
    result, number = run(torch.randn(3, 4), torch.randn(4, 6))
    assert (result.shape, number) == ((3, 6), 6)
    (((rows, inner), (_, columns)), graph) = made[0]
    values = (*graph.model.graph.input, *graph.model.graph.output)
    named = [tuple(d.dim_param for d in each.type.tensor_type.shape.dim) for each in values]
    assert sorted(filter(None, named)) == sorted([(rows, inner), (inner, columns), (rows, columns)])


def test_a_size_is_given_on_the_cpu_whatever_device_is_the_default() -> None:
    """And as an integer, whatever dtype is: torch's own functions take both for what they make."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        for engine in ("onnxrt", "openvino"):
            torch.compiler.reset()
            f = compiled(lambda x: x * x.shape[0] + 1, engine, dynamic=True)
            x = torch.ones(5, device="cpu", dtype=torch.float32)
            torch.testing.assert_close(f(x), x + 5)
            assert (last().chosen, last().runtime.fallbacks) == (engine, 0)
    finally:
        torch.set_default_device(None)
