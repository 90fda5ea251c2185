"""``composer.save`` and ``composer.load``: one file has all that a call needs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from common import last, needs_torch
from torch import Tensor, nn

import composer
from composer.errors import FallbackWarning, SavedFileError
from composer.system import disk

pytestmark = pytest.mark.usefixtures("_switched_on")


@pytest.fixture
def _switched_on() -> Iterator[None]:
    """It is off in torch 2.11."""
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield


class Table(nn.Module):
    """Weights, a buffer, a plain tensor, tensors in a list, and a tuple in a dict as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.register_buffer("shift", torch.ones(8))
        self.scale = torch.full((8,), 2.0)
        self.tables = [torch.arange(8.0), None]
        self.epsilon = 1e-5
        self.unused: nn.Module | None = None

    def forward(self, x: Tensor, *, times: int = 1) -> dict[str, Any]:
        y = self.layers(x) * self.scale + self.shift + self.tables[0] + self.epsilon
        return {"y": (y * times, x.shape[1]), "none": None}


def saved(path: Path, *calls: Any, **settings: Any) -> nn.Module:
    """A model, whose file for these calls is written."""
    model = Table().eval()
    settings.setdefault("options", {"chain": ["eager"]})
    composer.save(model, path, calls, **settings)
    torch.compiler.reset()
    composer.reset()
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def changed(path: Path, part: str, **facts: str) -> None:
    """Write other facts into a file's header."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    header = json.loads(parts["header.json"])
    header[part] |= facts
    parts["header.json"] = json.dumps(header).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)


def test_a_loaded_file_computes_what_the_model_does(path: Path) -> None:
    """The file has all tensors of the model, and the nesting of what it returns."""
    x = torch.randn(2, 4)
    model = saved(path, (x,))
    function = composer.load(path)
    x = torch.randn(2, 4)
    torch.testing.assert_close(function(x), model(x))
    assert not function(x)["y"][0].requires_grad
    assert last().model == f"{__name__}.Table"
    assert last().chosen == "eager"


def test_a_file_serves_each_of_its_calls_and_no_other(path: Path) -> None:
    """What is no tensor is a constant; the error names the calls that the file has."""
    x = torch.randn(2, 4)
    model = saved(path, (x,), {"x": x, "times": 3}, (torch.randn(3, 4),), dynamic=False)
    function = composer.load(path)
    for call in (2, 3):
        x = torch.randn(call, 4)
        torch.testing.assert_close(function(x), model(x))
    x = torch.randn(2, 4)
    torch.testing.assert_close(function(times=3, x=x), model(x, times=3))
    with pytest.raises(TypeError, match=r"no call \(tensor, times=3\). It has \(tensor\), \(t"):
        function(x, times=3)
    with pytest.raises(TypeError, match=r"times=3\.0"):
        function(x=x, times=3.0)
    with pytest.raises(RuntimeError, match="size mismatch at index 0"):
        function(torch.randn(5, 4))


def test_one_graph_serves_all_sizes_where_sizes_are_dynamic(path: Path) -> None:
    """A call that a graph of the file serves already gets no graph of its own."""
    calls = [{"x": torch.randn(rows, 4), "times": 3} for rows in (2, 3)]
    model = saved(path, *calls, dynamic=True)
    function = composer.load(path)
    for rows in (2, 3, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(function(x=x, times=3), model(x, times=3))
    assert len(composer.reports()) == 1


def test_tensors_of_inference_mode_are_taken(path: Path) -> None:
    """As servers call models."""
    model = saved(path, (torch.randn(2, 4),))
    function = composer.load(path)
    with torch.inference_mode():
        x = torch.randn(2, 4)
        torch.testing.assert_close(function(x), model(x))


def test_a_file_may_be_made_and_used_in_inference_mode(path: Path) -> None:
    """The guards are those of a process without it."""
    with torch.inference_mode():
        x = torch.randn(2, 4)
        model = saved(path, (x,))
        function = composer.load(path)
        torch.testing.assert_close(function(x), model(x))
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(function(x), model(x))


class Counts(nn.Module):
    """Counts its calls in a buffer in place, in a buffer that it replaces, and in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("second", torch.zeros(1))
        self.third = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.first.add_(1)
        self.second = self.second + 1
        self.third = self.third + 1
        return x + self.first + self.second + self.third


def test_a_model_is_saved_in_the_state_that_it_had(path: Path) -> None:
    """The calls that are made meanwhile count neither in the file nor in the model."""
    model, x = Counts(), torch.zeros(2)
    first = model.first
    composer.save(model, path, [(x,)], options={"chain": ["eager"]})
    assert model.first is first
    torch.compiler.reset()
    function = composer.load(path)
    for count in (3, 6):
        assert function(x).tolist() == [count, count]
        assert model(x).tolist() == [count, count]


class Listed(nn.Module):
    """Holds a module in a list, which knows its parent, and tensors in another object."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]
        self.layers[0].parents = [self]
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y if self.held is None else y + self.held.shift


def test_modules_in_lists_are_saved(path: Path) -> None:
    """Also if they refer to each other."""
    model, x = Listed(), torch.randn(2, 4)
    composer.save(model, path, [(x,)], options={"chain": ["eager"]})
    torch.testing.assert_close(composer.load(path)(x), model(x))


def test_a_tensor_that_cannot_be_found_again_is_refused(path: Path) -> None:
    """Only modules and what is nested in their attributes are saved."""
    model = Listed(SimpleNamespace(shift=torch.ones(4)))
    with pytest.raises(ValueError, match=r"neither by a module nor .* no attribute 'held'"):
        composer.save(model, path, [(torch.randn(2, 4),)], options={"chain": ["eager"]})
    assert not path.exists()


def test_the_number_of_threads_may_be_another(path: Path) -> None:
    """When the file is loaded, and later."""
    x = torch.randn(2, 4)
    model = saved(path, (x,))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.warns(FallbackWarning, match="saved with threads"):
            function = composer.load(path)
        torch.testing.assert_close(function(x), model(x))
        torch.set_num_threads(threads + 2)
        torch.testing.assert_close(function(x), model(x))
    finally:
        torch.set_num_threads(threads)


def test_a_call_without_meaning_is_refused(path: Path) -> None:
    """At once, before anything is compiled."""
    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match=r"calls\[0\] is a Tensor"):
        saved(path, x)
    with pytest.raises(ValueError, match="needs at least one call"):
        saved(path)
    with pytest.raises(ValueError, match="has a tensor twice"):
        composer.save(nn.Bilinear(4, 4, 2), path, [(x, x)])
    assert not path.exists()


class Scaled(nn.Module):
    """Takes numbers and arrays besides a tensor."""

    def forward(self, x: Tensor, by: Any = 1.0) -> Tensor:
        y: Tensor = x * (by[0] if isinstance(by, list) else by)
        return y


@pytest.mark.parametrize(
    "by", [numpy.ones(4), numpy.ones(1), numpy.float32(2), [numpy.float64(2)]], ids=str
)
def test_values_of_numpy_are_refused_by_the_name_of_their_argument(path: Path, by: Any) -> None:
    """When a file is made, and when it is called."""
    x = torch.randn(2, 4)
    for call, name in (((x, by), "1"), ({"x": x, "by": by}, "'by'")):
        with pytest.raises(TypeError, match=f"numpy is in argument {name}: give a tensor"):
            composer.save(Scaled(), path, [call], options={"chain": ["eager"]})
    composer.save(Scaled(), path, [(x,)], options={"chain": ["eager"]})
    with pytest.raises(TypeError, match="numpy is in argument 'by'"):
        composer.load(path)(x, by=by)


def test_the_caches_of_the_process_are_left_as_they_were(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a file is made, nothing is read from them or written to them."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv(disk.CACHE_DIR, str(tmp_path / "own"))
    saved(path, (torch.randn(2, 4),), options={"chain": ["onnxrt"]})
    assert disk.cache_dir() == tmp_path / "own"
    assert not disk.cache_dir().exists()
    composer.load(path)(torch.randn(2, 4))
    assert last().attempts[0].engine["artefacts"] == "graph reused"


@pytest.mark.parametrize("name", ["torch", "Python", "torch-compile-composer"])
def test_another_version_is_an_error_that_names_it(path: Path, name: str) -> None:
    """What was written by it cannot be read."""
    saved(path, (torch.randn(2, 4),))
    changed(path, "needs", **{name: "0.1.dev"})
    with pytest.raises(SavedFileError, match=rf"saved with {name} 0.1.dev \(here: \d"):
        composer.load(path)


@pytest.mark.parametrize("name", ["xpu", "hpu", "other"])
def test_a_missing_device_is_an_error_that_names_it(path: Path, name: str) -> None:
    """Before the weights are read. It may be the second of its kind."""
    saved(path, (torch.randn(2, 4),))
    with zipfile.ZipFile(path) as file:
        header = json.loads(file.read("header.json"))
    assert header["devices"] == ["cpu"]
    header["devices"] = [f"{name}:0"]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps(header))
    with pytest.raises(SavedFileError, match=rf"device {name}:0 \(here: none\)"):
        composer.load(path)


@pytest.mark.parametrize("name", ["machine for cpu", "threads", "lost for engine gone"])
def test_another_machine_or_engine_is_a_warning_and_works(path: Path, name: str) -> None:
    """Artefacts that do not fit are made again."""
    x = torch.randn(2, 4)
    model = saved(path, (x,))
    changed(path, "made_with", **{name: "7.0"})
    with pytest.warns(
        FallbackWarning, match=rf"saved with {name} 7.0 \(here: .*may be built again"
    ):
        function = composer.load(path)
    torch.testing.assert_close(function(x), model(x))


def test_a_damaged_file_is_an_error(path: Path) -> None:
    """A part of a file, a file of another kind, and one that is changed."""
    saved(path, (torch.randn(2, 4),))
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"PK", b"x" * 1000):
        path.write_bytes(damaged)
        with pytest.raises(SavedFileError, match="is damaged, or no file of"):
            composer.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("other", "")
    with pytest.raises(SavedFileError, match="save: KeyError"):
        composer.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"needs": []}))
    with pytest.raises(SavedFileError, match="save: AttributeError"):
        composer.load(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        composer.load(path)


def test_a_file_without_its_model_is_an_error(path: Path) -> None:
    """Not one about a temporary file."""
    saved(path, (torch.randn(2, 4),))
    with zipfile.ZipFile(path) as file:
        header = file.read("header.json")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", header)
    with pytest.raises(SavedFileError, match=r"no item named 'model\.pt'"):
        composer.load(path)


@pytest.mark.parametrize("error", [ModuleNotFoundError, AttributeError])
def test_a_package_that_is_missing_is_an_error_that_names_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The class of a result may be a package's, or the program's that saved."""

    def missing(data: bytes) -> None:
        raise error("No module named 'lost'")

    saved(path, (torch.randn(2, 4),))
    monkeypatch.setattr("composer._torch.files.function_of_bytes", missing)
    with pytest.raises(SavedFileError, match="package that is missing: No module named 'lost'"):
        composer.load(path)


SAVES = """
import torch
from transformers import BertConfig, BertModel
import composer

torch.manual_seed(0)
small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = BertModel(BertConfig(**small, vocab_size=100)).eval()
ids = torch.randint(0, 100, (2, 8))
call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
composer.save(model, "bert", [call], options={"chain": ["onnxrt"], "strict": True})
with torch.no_grad():
    torch.save((call, dict(model(**call))), "expected")
"""
LOADS = """
import sys, torch, composer
function = composer.load("bert")
call, expected = torch.load("expected")
found = function(**call)
assert type(found).__name__ == "BaseModelOutputWithPoolingAndCrossAttentions", type(found)
torch.testing.assert_close(dict(found), expected)
(report,) = composer.reports()
print(report.chosen, report.model, report.attempts[0].engine["artefacts"])
print("onnxscript" in sys.modules, "transformers.models.bert.modeling_bert" in sys.modules)
"""


@pytest.mark.slow
@needs_torch("2.12", "there is a switch to be set, in both processes")
def test_bert_is_served_from_its_file_without_a_build(
    tmp_path: Path, fresh_python: Callable[..., Any]
) -> None:
    """In a process with empty caches; the exporter and the model's own code are not imported."""
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    for code, cache in ((SAVES, "of_writer"), (LOADS, "of_reader")):
        own = {disk.CACHE_DIR: str(tmp_path / cache)}
        done = fresh_python(code, cwd=tmp_path, env=own)
        assert done.returncode == 0, done.stderr
    model = "transformers.models.bert.modeling_bert.BertModel"
    assert done.stdout.split("\n")[:2] == [f"onnxrt {model} graph reused", "False False"]
