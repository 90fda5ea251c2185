"""Warm start: what one process lowered, the next one finds, and computes the same with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from torch import Tensor, nn
from typer.testing import CliRunner

import composer
from composer import _torch, session
from composer.build import Artefacts, BuildTerms
from composer.cli import app
from composer.lowering.export import artefacts, onnx, whole
from composer.lowering.export.vocabulary import vocabulary

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _vocabulary() -> Iterator[None]:
    vocabulary.cache_clear()
    yield
    vocabulary.cache_clear()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def recorded() -> str:
    """What the last attempt says of what it kept."""
    (attempt,) = last().attempts
    assert attempt.status == "succeeded", attempt.message
    return str(attempt.engine["artefacts"])


def warm(function: Any, engine: str = "onnxrt", **how: Any) -> Any:
    """The function compiled as another process would: nothing of this one is remembered."""
    torch.compiler.reset()
    composer.reset()
    vocabulary.cache_clear()
    return compiled(function, engine, **how)


def no_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter cannot be asked, neither for its words nor for a model."""

    def refuse() -> None:
        raise AssertionError("the exporter was asked")

    for module in ("onnx", "vocabulary"):
        monkeypatch.setattr(f"composer.lowering.export.{module}.translator", refuse)


def no_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd cannot be asked."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("AOTAutograd was asked")

    monkeypatch.setattr(_torch.aot, "aot_compile", refuse)


@torch.no_grad()
def test_second_compile_of_a_graph_asks_neither_autograd_nor_the_exporter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record says the same of coverage, providers and nodes, and that the graph was reused."""
    model, x = mlp(), torch.randn(3, 8)
    compiled(model, "onnxrt", verify="compile")(x)
    first = last().attempts[0]
    assert recorded() == "kept"
    no_autograd(monkeypatch)
    no_translation(monkeypatch)
    f = warm(model, verify="compile")
    torch.testing.assert_close(f(x), model(x))
    again = last().attempts[0]
    assert again.coverage == first.coverage == 1.0
    assert again.engine == first.engine | {"artefacts": "graph reused"}


@torch.no_grad()
def test_another_process_imports_nothing_but_the_engine(fresh_python: Callable[..., Any]) -> None:
    """No exporter, no other engine; and other weights give other numbers."""
    code = """
import json, sys, torch, composer
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
x = torch.randn(3, 8)
with torch.no_grad():
    found = torch.compile(model, backend="composer", options={"chain": ["onnxrt"]})(x)
    torch.testing.assert_close(found, model(x))
attempt = composer.reports()[-1].attempts[0]
heavy = ("onnxscript", "onnx_ir", "torch.onnx._internal.exporter._core", "openvino",
         "torch._inductor.compile_fx", "tensorrt", "torch_tensorrt")
print(json.dumps([attempt.engine["artefacts"], [each for each in heavy if each in sys.modules]]))
"""
    session.current().knowledge._memory.clear()  # so that it is tested for both
    compiled(mlp(), "onnxrt")(torch.randn(3, 8))
    assert recorded() == "kept"
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["graph reused", []]


class Looked(nn.Module):
    """Rows of a table, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 8), mlp()

    def forward(self, index: Tensor) -> Tensor:
        return self.layer(self.table(index))


@torch.no_grad()
def test_openvino_finds_a_whole_graph_and_still_checks_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is known of the graph's tables comes from disk with it; eager raises as it does."""
    pytest.importorskip("openvino")
    model, index = Looked(), torch.tensor([1, 9, 0])
    compiled(model, "openvino")(index)
    assert recorded() == "kept"
    no_autograd(monkeypatch)
    no_translation(monkeypatch)
    f = warm(model, "openvino")
    torch.testing.assert_close(f(index), model(index))
    assert recorded() == "graph reused"
    model.table.weight.mul_(2)
    torch.testing.assert_close(f(index), model(index))
    with pytest.raises(IndexError):
        f(torch.tensor([1, 10, 0]))


class Places(nn.Module):
    """Rows of a table, at positions that are a buffer."""

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor(places))

    def forward(self, table: Tensor) -> Tensor:
        return table[self.places] * 2


@torch.no_grad()
def test_a_kept_graph_is_taken_only_for_weights_that_are_positions_within_their_table() -> None:
    """OpenVINO takes a lookup at known positions only if they are from 0 up."""
    pytest.importorskip("openvino")
    table, coverage = torch.randn(5, 3), []
    for places in ([0, 1, 2], [0, 3, 2], [0, 1, -1]):
        model = Places(places)
        torch.testing.assert_close(warm(model, "openvino")(table), model(table))
        assert last().chosen == "openvino"
        coverage.append(last().attempts[0].coverage)
        if places == [0, 3, 2]:
            assert recorded() == "graph reused"
    assert coverage == [1.0, 1.0, 0.5]


def doubled(x: Tensor) -> Tensor:
    return torch.relu(x) * 2.0


def tripled(x: Tensor) -> Tensor:
    return torch.relu(x) * 3.0


def negative_zero(x: Tensor) -> Tensor:
    return torch.relu(x) * -0.0


def zero(x: Tensor) -> Tensor:
    return torch.relu(x) * 0.0


@torch.no_grad()
@pytest.mark.parametrize(
    ("first", "second", "x"),
    [
        (doubled, tripled, torch.ones(3)),
        (zero, negative_zero, torch.ones(3)),
        (doubled, doubled, torch.ones(4)),
        (doubled, doubled, torch.ones(3, dtype=torch.float64)),
    ],
    ids=["another number", "another zero", "another shape", "another dtype"],
)
def test_another_graph_is_not_taken_for_it(
    first: Callable[..., Tensor], second: Callable[..., Tensor], x: Tensor
) -> None:
    """A number, a size or a type within the graph makes another model."""
    compiled(first, "onnxrt")(torch.ones(3))
    result = warm(second)(x)
    assert torch.equal(result, second(x))
    assert torch.equal(result.signbit(), second(x).signbit())
    assert recorded() == "kept"


@torch.no_grad()
def test_weights_are_those_of_the_process_that_runs() -> None:
    """Other values, and values that change under the engine."""
    model, x = mlp(), torch.randn(3, 8)
    compiled(model, "onnxrt")(x)
    other = mlp()
    f = warm(other)
    torch.testing.assert_close(f(x), other(x))
    assert recorded() == "graph reused"
    other[0].weight.mul_(2)
    torch.testing.assert_close(f(x), other(x))


@torch.no_grad()
def test_running_statistics_are_watched_after_a_warm_start() -> None:
    """An eager call in training mode moves them without a sign on them."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(5, 4)
    compiled(model, "onnxrt")(x)
    f = warm(model)
    f(x)
    assert recorded() == "graph reused"
    model.train()
    model(x + 3)
    model.eval()
    torch.testing.assert_close(f(x), model(x))


@torch.no_grad()
def test_what_other_sources_made_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another composer, torch or exporter begins anew."""
    x = torch.ones(3)
    compiled(doubled, "onnxrt")(x)
    monkeypatch.setattr(artefacts, "environment", lambda: "another release")
    assert torch.equal(warm(doubled)(x), doubled(x))
    assert recorded() == "kept"


@torch.no_grad()
@pytest.mark.parametrize("damage", [b"", b"\0" * 64, None], ids=["truncated", "garbled", "gone"])
def test_damaged_entries_are_made_anew(damage: bytes | None) -> None:
    """The numbers are right, and the next process finds whole files again."""
    x = torch.ones(3)
    compiled(doubled, "onnxrt")(x)
    for file in artefacts.cache().path.glob("*.entry"):
        file.unlink() if damage is None else file.write_bytes(damage)
    assert torch.equal(warm(doubled)(x), doubled(x))
    assert recorded() == "kept"
    warm(doubled)(x)
    assert recorded() == "graph reused"


@torch.no_grad()
def test_dynamic_shapes_come_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not translated again, and takes sizes that the first process never saw."""
    model = mlp()
    compiled(model, "onnxrt", dynamic=True)(torch.randn(3, 8))
    assert recorded() == "kept"
    no_translation(monkeypatch)
    f = warm(model, dynamic=True)
    for size in (3, 7, 2):
        x = torch.randn(size, 8)
        torch.testing.assert_close(f(x), model(x))
    assert recorded() == "model reused"


@torch.no_grad()
def test_a_size_that_the_translation_asks_for_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it found out guards the graph, and a process that finds the model would not ask."""
    translate = onnx._translate

    def asking(gm: torch.fx.GraphModule, outputs: Any) -> Any:
        for node in gm.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta["val"], Tensor):
                assert node.meta["val"].shape[0] < 100
        return translate(gm, outputs)

    monkeypatch.setattr(onnx, "_translate", asking)
    for _ in range(2):
        x = torch.randn(3, 8)
        torch.testing.assert_close(warm(doubled, dynamic=True)(x), doubled(x))
        assert recorded() == "not kept: the translation asked how large a size is"


def test_training_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with the gradients of eager."""
    model, x = mlp().train(), torch.randn(3, 8)
    compiled(model, "onnxrt")(x).sum().backward()
    assert recorded() == "kept"
    no_translation(monkeypatch)
    model.zero_grad()
    warm(model)(x).sum().backward()
    assert recorded() == "2 of 2 models reused"
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).sum().backward()
    for got, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad)


class InPart(nn.Module):
    """A function that the engines leave to torch, between two layers, and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()[places]
        middle = torch.special.bessel_j0(self.first(x).float().masked_fill(mask, 0.5))
        return self.second(middle)


@torch.no_grad()
@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_graph_taken_in_part_is_found_with_torchs_calls(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """It is found as a whole, with its constants; the record says the same of what torch runs."""
    pytest.importorskip(engine.replace("onnxrt", "onnxruntime"))
    model, x, places = InPart(), torch.randn(3, 8), torch.tensor([1, 7, 0])
    compiled(model, engine)(x, places)
    first = last().attempts[0]
    assert any("bessel_j0" in line for line in first.engine["left_to_torch"])
    no_autograd(monkeypatch)
    no_translation(monkeypatch)
    f = warm(model, engine)
    torch.testing.assert_close(f(x, places), model(x, places))
    again = last().attempts[0]
    assert again.coverage == first.coverage
    assert again.engine == first.engine | {"artefacts": "graph reused"}
    model.second.weight.mul_(2)
    torch.testing.assert_close(f(x, places), model(x, places))


@torch.no_grad()
def test_graph_in_parts_is_not_found_where_autocast_is_on() -> None:
    """AOTAutograd turns it off around what it made; a call of torch would compute otherwise.

    On a processor that multiplies bfloat16, the products are torch's.
    """
    model, x, places = InPart(), torch.randn(3, 8), torch.tensor([1, 7, 0])
    with torch.autocast("cpu"):
        compiled(model, "onnxrt", min_coverage=0.0)(x, places)
        expected = warm(model, min_coverage=0.0)(x, places)
        assert recorded() != "graph reused"
        torch.testing.assert_close(expected, model(x, places), atol=0.05, rtol=0.05)


@torch.no_grad()
def test_graph_in_parts_is_made_anew_where_its_source_has_moved() -> None:
    """The record names places in the user's code, and they must be those of today."""
    text = "def f(x):\n    return torch.special.bessel_j0(x) + 1\n"
    x, places = torch.randn(3), []
    for lines in (0, 2):
        made: dict[str, Any] = {"torch": torch}
        exec(compile("\n" * lines + text, __file__, "exec"), made)
        torch.testing.assert_close(warm(made["f"])(x), torch.special.bessel_j0(x) + 1)
        places += last().attempts[0].engine["left_to_torch"]
    assert [line.rsplit(":", 1)[1] for line in places] == ["2", "4"]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def aliased(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.relu(x)
    return y, y.view(-1)


def given_back(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x), x.view(-1)


@torch.no_grad()
def test_inputs_that_are_written_to_are_written_to_after_a_warm_start() -> None:
    """Such a graph always goes through AOTAutograd, which knows how."""
    x = torch.ones(3)
    compiled(Counts(), "onnxrt")(x)
    model = Counts()
    f = warm(model)
    assert [f(x)[0].item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert model.calls.item() == 3
    assert recorded() == "model reused"


@torch.no_grad()
@pytest.mark.parametrize("function", [aliased, given_back])
def test_outputs_share_memory_after_a_warm_start(
    function: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """As eager's do, with each other or with an input."""
    x = torch.ones(2, 3)
    compiled(function, "onnxrt")(x)
    a, b = warm(function)(x)
    source = x if function is given_back else a
    assert b.data_ptr() == source.data_ptr()
    assert torch.equal(a, torch.relu(x))
    assert recorded() == ("model" if function is given_back else "graph") + " reused"


@torch.no_grad()
def test_with_no_room_for_artefacts_nothing_is_kept_or_looked_for() -> None:
    """Nothing on disk, nothing in the record; what others kept is not read."""
    x = torch.ones(3)
    with composer.using({"cache": {"artefacts": 0}}):
        compiled(doubled, "onnxrt")(x)
    assert not artefacts.cache().path.exists()
    assert "artefacts" not in last().attempts[0].engine
    warm(doubled)(x)
    assert recorded() == "kept"
    with composer.using({"cache": {"artefacts": 0}}):
        warm(doubled)(x)
    assert "artefacts" not in last().attempts[0].engine


def test_torchs_switch_for_all_caches_holds() -> None:
    """``TORCHINDUCTOR_FORCE_DISABLE_CACHES``; asked of composer alone, since torch warns of it."""
    assert artefacts.is_enabled(Artefacts())
    with torch.compiler.config.patch(force_disable_caches=True):
        assert not artefacts.is_enabled(Artefacts())
    assert artefacts.is_enabled(Artefacts())


@torch.no_grad()
def test_disk_that_cannot_be_written_costs_nothing_but_the_warm_start(tmp_path: Path) -> None:
    """The record says why nothing is kept."""
    (tmp_path / "composer-cache").write_text("in the way")
    x = torch.ones(3)
    assert torch.equal(compiled(doubled, "onnxrt")(x), doubled(x))
    assert recorded().startswith("not kept: the cache")


@torch.no_grad()
def test_cache_list_and_clear_show_what_is_kept() -> None:
    """A model, the graph that becomes it, the exporter's words."""
    compiled(doubled, "onnxrt")(torch.ones(3))
    runner = CliRunner()
    entries = json.loads(runner.invoke(app, ["cache", "list", "--json"]).output)["entries"]
    assert {each["kind"] for each in entries} == {"onnx"}
    assert {each["facts"]["kind"] for each in entries} == {"model", "graph", "vocabulary"}
    assert "ONNX model of a graph, 3 nodes" in {each["what"] for each in entries}
    assert "3 entries removed" in runner.invoke(app, ["cache", "clear", "onnx"]).output


def test_operators_that_a_self_test_has_asked_for_are_kept_by_the_first_build() -> None:
    """A self-test itself writes nothing to disk. The exporter takes two seconds to import."""
    key = artefacts.key_of("vocabulary", "")
    vocabulary().learn(Artefacts(0.0))
    assert artefacts.find(Artefacts(), key) is None
    vocabulary().learn(Artefacts())
    assert artefacts.find(Artefacts(), key) is not None


@torch.no_grad()
def test_global_settings_are_part_of_what_a_graph_is_known_by() -> None:
    """AOTAutograd may make another graph under another setting."""
    gm = torch.fx.symbolic_trace(doubled)
    keys = []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        found = whole.whole_of(gm, [torch.ones(3)], "engine", BuildTerms())
        assert found is not None
        keys.append(found.key)
    assert keys[0] != keys[1]
    other = whole.whole_of(gm, [torch.ones(3)], "another engine", BuildTerms())
    assert other is not None
    assert other.key not in keys


@torch.no_grad()
def test_graphs_that_no_text_describes_are_not_known_as_a_whole() -> None:
    """A mode that watches every call, a tensor without data, a graph under grad mode."""
    gm, x = torch.fx.symbolic_trace(doubled), torch.ones(3)
    with torch.device("cpu"):
        assert whole.whole_of(gm, [x], "", BuildTerms()) is None
    with torch._subclasses.FakeTensorMode() as mode:
        assert whole.whole_of(gm, [mode.from_tensor(x)], "", BuildTerms()) is None
    with torch.enable_grad():
        assert whole.whole_of(gm, [x], "", BuildTerms()) is None


PLAIN = """
import torch, composer
f = torch.compile(lambda x: x + 1, backend="composer", options={"chain": ["onnxrt"]})
with torch.no_grad():
    f(torch.ones(2))
"""

QUANTIZED = """
import torch, composer
import torch.ao.quantization.fx._decomposed
q = torch.ops.quantized_decomposed
def rounded(x):
    return q.dequantize_per_tensor(
        q.quantize_per_tensor(x, 0.5, 0, -128, 127, torch.int8), 0.5, 0, -128, 127, torch.int8
    )
x = torch.tensor([0.7, -1.2])
f = torch.compile(rounded, backend="composer", options={"chain": ["onnxrt"]})
with torch.no_grad():
    assert torch.equal(f(x), rounded(x))
(attempt,) = composer.reports()[-1].attempts
print(attempt.status, attempt.coverage)
"""


@pytest.mark.parametrize(
    "scripts",
    [
        pytest.param((PLAIN + QUANTIZED,), id="the same process"),
        pytest.param((PLAIN, QUANTIZED), id="another process", marks=pytest.mark.thorough),
    ],
)
def test_operators_may_be_loaded_later(scripts: tuple[str, ...], fresh_python: Any) -> None:
    """A library that was not loaded at the first compile is translated after it, by any process."""
    for script in scripts:
        done = fresh_python(script)
    assert done.stdout.split() == ["succeeded", "1.0"], done.stderr


def test_all_sources_of_composer_count() -> None:
    """A change outside of the lowering makes other models, too."""
    assert (artefacts.ROOT / "__init__.py").samefile(composer.__file__)


def test_sources_changed_under_the_process_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory is not what stands in the files then."""
    assert artefacts._sources() == artefacts._sources()
    monkeypatch.setattr(artefacts, "_IMPORTED", 0.0)
    assert artefacts._sources() != artefacts._sources()
