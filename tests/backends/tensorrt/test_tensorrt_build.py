"""TensorRT's real parser and builder, those of TensorRT for RTX, which run on a CPU.

Nothing is deserialized or executed: that needs a driver.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from common import ROOT, thorough

from composer.backends import tensorrt
from composer.backends.tensorrt import apart, cache, library, plan
from composer.backends.tensorrt.dtypes import require_dtypes
from composer.backends.tensorrt.loading import in_host_memory
from composer.backends.tensorrt.log import Lines
from composer.backends.tensorrt.plan import Recipe, Target, build_plan
from composer.backends.tensorrt.profiles import around, holds, profile_of, wider
from composer.backends.tensorrt.regions import Read
from composer.backends.tensorrt.settings import Settings
from composer.build import BuildTerms
from composer.errors import OptionError, Refusal
from composer.lowering.aot import FunctionalGraph, compile_functional
from composer.lowering.engine import OnnxBuild
from composer.lowering.loaded import Loaded
from composer.lowering.partition.by_trial import Partition, partition_by_trial
from composer.system.disk import digest_of
from composer.system.subprocesses import Limits

rtx = pytest.importorskip("tensorrt_rtx", reason="its parser and builder run on a CPU")

ADA = Target("an Ada", (8, 9), "0")


class Reading(tensorrt.TensorRTEngine):
    """Reads models, and builds no plan."""

    def load(self, *_: Any) -> Loaded:
        return Loaded(run=lambda args: [])


@pytest.fixture(scope="module")
def trt() -> Iterator[library.Library]:
    """The library that runs on a CPU, for a GPU that is not here."""
    loaded = library._load("tensorrt_rtx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt, "load_library", lambda: loaded)
        patch.setattr(tensorrt, "place_on", lambda device: SimpleNamespace(target=ADA))
        yield loaded


def pieces(
    trt, function: Any, *args: Any, dynamic: bool | None = None, **options: Any
) -> Partition:
    """What a captured function is cut into."""
    made: list[Partition] = []
    terms = OnnxBuild(
        settings=tensorrt.TensorRTEngine().settings(options), device=torch.device("cpu")
    )

    def build(graph: FunctionalGraph) -> Any:
        made.append(partition_by_trial(graph, Reading(), terms))
        return lambda *args: None

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compile_functional(gm, inputs, build)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    return made[-1]


def recipe(found: Partition, target: Target = ADA, **options: Any) -> Recipe:
    """How to build the one region's plan."""
    ((name, region),) = found.parts.regions.items()
    settings = tensorrt.TensorRTEngine().settings(options)
    read = Read.of(found.models[name].read.graph, region, settings)
    return Recipe(
        graph=read.graph,
        weights=in_host_memory(read.graph.inputs, region.weights | region.constants),
        dtypes=read.dtypes,
        profiles=tuple(profile_of(read.shapes, each) for each in read.ranges),
        settings=settings,
        tf32=False,
        target=target,
    )


def operators(found: Partition) -> list[str]:
    (model,) = found.models.values()
    return [node.op_type for node in model.read.graph.model.graph.node]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"), [("bert", "fp32"), *thorough(("mobilenet", "fp16"))]
)
def test_a_public_model_is_taken_whole_and_built(trt, name, precision) -> None:
    """One region, a real plan for a device that is not here. The bench does all of them."""
    import zoo

    module, inputs = zoo.build(name, tiny=True)
    found = pieces(trt, lambda: module(**inputs), precision=precision)
    assert (found.parts.taken, len(found.parts.regions)) == (found.parts.total, 1)
    assert len(build_plan(trt, recipe(found, precision=precision))) > 100_000


def test_what_the_parser_refuses_is_left_to_torch(trt) -> None:
    """The operator, with the parser's word on it, and the rest is taken."""
    found = pieces(trt, lambda x: torch.linalg.det(torch.sin(x)) + 1, torch.randn(2, 4, 4))
    assert (found.parts.taken, found.parts.total, len(found.parts.regions)) == (34, 66, 2)
    (line,) = found.parts.left
    assert line.startswith("aten._linalg_det.default (TensorRT's parser refuses Det) at ")


def test_the_parser_says_why(trt) -> None:
    """Where it has more to say than the operator's name."""

    def function(x):
        places = torch.tensor([[1, 2, 0, 0]])
        return torch.sin(x).scatter_add(0, places, torch.ones(1, 4))

    left = pieces(trt, function, torch.randn(4, 4)).parts.left
    assert all("importScatterElements: [9] Unsupported reduction type" in line for line in left)
    assert left


def test_integers_are_not_declined_for_the_kernels_of_another_engine(trt) -> None:
    """ONNX Runtime's are wrong for large ones, and are written out for it alone."""

    def function(x):
        return torch.maximum(x, x * 2), x.amax(1), x.sum(0)

    found = pieces(trt, function, torch.arange(16).view(4, 4))
    assert found.parts.left == ()
    assert {"Max", "ReduceMax", "ReduceSum"} <= set(operators(found))


def test_a_model_says_everything_in_plain_words(trt) -> None:
    """No sequence for a split, no function, no path of the user's."""

    def function(x):
        a, b = torch.split(x, [1, 3], dim=1)
        return a.mean(1, keepdim=True) + b

    found = pieces(trt, function, torch.randn(2, 4))
    assert operators(found).count("Slice") == 2
    assert not any("Sequence" in name for name in operators(found))
    assert len(build_plan(trt, recipe(found))) > 1_000
    (model,) = found.models.values()
    onnx_model = model.read.graph.model
    assert not onnx_model.functions
    assert os.fspath(Path(__file__).parent).encode() not in onnx_model.SerializeToString()


@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_low_precision_is_said_by_casts_around_products(trt, low) -> None:
    """Inputs and outputs stay float32, and each weight is cast once."""
    module = torch.nn.Linear(4, 4)
    found = pieces(trt, lambda x: module(module(x)), torch.randn(2, 4), precision=low)
    names = operators(found)
    products = names.count("MatMul") + names.count("Gemm")
    assert products == 2
    assert names.count("Cast") <= 2 * products + 3
    assert len(build_plan(trt, recipe(found))) > 1_000


def test_products_of_other_types_are_left_alone(trt) -> None:
    """Half precision stays half precision under bf16."""
    found = pieces(trt, lambda x: x @ x, torch.randn(4, 4).half(), precision="bf16")
    assert operators(found) == ["MatMul"]


def test_dynamic_sizes_become_one_profile(trt) -> None:
    """From the bounds of the symbol, around the first call; two symbols, one derived size."""

    def function(x, y):
        rows, columns = x.shape
        return (x @ y).reshape(rows * 2, -1) * columns

    found = pieces(trt, function, torch.randn(6, 5), torch.randn(5, 8), dynamic=True)
    made = recipe(found)
    (profile,) = made.profiles
    assert sorted(profile.values()) == [
        ((2, 2), (5, 8), (20, 32)),
        ((2, 2), (6, 5), (24, 20)),
    ]
    assert all(len(each.type.tensor_type.shape.dim) for each in made.graph.model.graph.input)
    assert build_plan(trt, made)


def test_profiles_of_the_policy_are_built(trt) -> None:
    """One for each table; a name of a symbol beats the star."""
    asked = [{"*": [2, 4, 8]}, {"*": [9, 16, 32]}]
    found = pieces(trt, torch.sin, torch.randn(6, 4), dynamic=True)
    made = recipe(found, profiles=asked)
    (first,), (second,) = (profile.values() for profile in made.profiles)
    assert first == ((2, 2), (4, 4), (8, 8))
    assert second == ((9, 9), (16, 16), (32, 32))
    assert build_plan(trt, made)


def test_ranges_hold_widen_and_have_bounds() -> None:
    """Around a size; wider for another; at least one."""
    assert around(6, 2) == (2, 6, 24)
    assert around(6, 0, 10) == (1, 6, 10)
    assert wider({"s": (2, 6, 24)}, {"s": 100}) == {"s": (2, 100, 400)}
    assert wider({"s": (2, 6, 24)}, {"s": 1}) == {"s": (1, 1, 24)}
    profile = {"x": ((2, 4), (6, 4), (24, 4))}
    assert holds(profile, {"x": (24, 4)})
    assert not holds(profile, {"x": (25, 4)})


def test_a_profile_that_tensorrt_does_not_take_is_an_error(trt) -> None:
    """It says so by a number only."""
    found = pieces(trt, torch.sin, torch.randn(6, 4), dynamic=True)
    made = recipe(found)
    (name,) = made.profiles[0]
    wrong = {name: ((8, 8), (4, 4), (2, 2))}
    with pytest.raises(Refusal, match="TensorRT takes no profile of the ranges") as caught:
        build_plan(trt, Recipe(**{**_fields(made), "profiles": (wrong,)}))
    assert caught.value.reason == "build_failed"


def test_a_dynamic_input_without_a_profile_is_told_in_the_librarys_words(trt) -> None:
    """The first ERROR line of its log."""
    made = recipe(pieces(trt, torch.sin, torch.randn(6, 4), dynamic=True))
    with pytest.raises(Refusal, match="no optimization profile has been defined") as caught:
        build_plan(trt, Recipe(**{**_fields(made), "profiles": ()}))
    assert (caught.value.status, caught.value.reason) == ("failed", "build_failed")


def test_types_that_tensorrt_changes_are_declined(trt) -> None:
    """float64 becomes float32 in silence."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, [2])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, [2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Sin", ["x"], ["y"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    made = recipe(pieces(trt, torch.sin, torch.randn(2)))
    fields = _fields(made) | {
        "graph": type(made.graph)(model, ("x",), made.graph.outputs),
        "dtypes": {"x": torch.float64, "y": torch.float64},
    }
    with pytest.raises(Refusal, match=r"made FLOAT of the input x, which is torch.float64") as no:
        build_plan(trt, Recipe(**fields))
    assert (no.value.status, no.value.reason) == ("declined", "unsupported_dtype")


def test_every_type_that_is_computed_with_keeps_its_name() -> None:
    """TensorRT's names are mapped to torch's dtypes, each to one: any other is refused."""
    types = rtx.DataType.__members__
    pairs = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16}
    pairs |= {"INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool}
    require_dtypes("input", ((name, types[name], dtype) for name, dtype in pairs.items()))
    for name, other in itertools.permutations(pairs, 2):
        with pytest.raises(Refusal) as caught:
            require_dtypes("input", [(name, types[name], pairs[other])])
        assert caught.value.reason == "unsupported_dtype"


def test_a_build_ends_when_the_attempts_time_is_over(trt) -> None:
    """TensorRT asks between its steps whether to go on."""
    import zoo

    module, inputs = zoo.build("vit", tiny=True)
    made = recipe(pieces(trt, lambda: module(**inputs)))
    terms = BuildTerms(limits=Limits(timeout=1e-6))
    with pytest.raises(Refusal, match="was stopped") as caught:
        build_plan(trt, made, terms.check_time)
    assert caught.value.status == "timed_out"
    assert build_plan(trt, made)


@pytest.mark.slow
def test_a_plan_is_built_in_a_child_process(trt) -> None:
    """Weights and all; what comes back is a plan, and what the attempt says is that it did."""
    weights = torch.randn(64, 32), torch.randn(32)
    made = recipe(
        pieces(trt, lambda x: torch.relu(x @ weights[0] + weights[1]), torch.randn(6, 64))
    )
    terms = BuildTerms(limits=Limits(isolate=True, timeout=120))
    apart_plan = apart.build(trt, made, terms)
    assert len(apart_plan) == pytest.approx(len(build_plan(trt, made)), rel=0.05)
    assert terms.facts.extra["isolated"]["seconds"] > 0


@pytest.mark.slow
def test_a_child_that_takes_too_long_is_ended(trt) -> None:
    """Its start is not counted, and the rest of the attempt's time is what it has."""
    import zoo

    module, inputs = zoo.build("vit", tiny=True)
    made = recipe(pieces(trt, lambda: module(**inputs)))
    terms = BuildTerms(limits=Limits(isolate=True, timeout=0.03))
    with pytest.raises(Refusal, match="in a child process") as caught:
        apart.build(trt, made, terms)
    assert caught.value.status == "timed_out"


@pytest.mark.slow
def test_what_the_library_refuses_in_a_child_is_told_as_here(trt) -> None:
    """An operator that the parser does not know."""
    made = recipe(pieces(trt, torch.sin, torch.randn(6, 4)))
    made.graph.model.graph.node[0].op_type = "NonZero"
    with pytest.raises(Refusal) as here:
        build_plan(trt, made)
    with pytest.raises(Refusal) as there:
        apart.build(trt, made, BuildTerms(limits=Limits(isolate=True)))
    for caught in (here, there):
        assert (caught.value.status, caught.value.reason) == ("declined", "unsupported_op")
    assert str(there.value) == str(here.value)


def test_the_settings_reach_the_builder(trt) -> None:
    """None of them breaks a build, and each is part of the key."""
    found = pieces(trt, torch.sin, torch.randn(6, 4))
    plain = recipe(found)
    options = {"workspace_mib": 64, "optimization_level": 0, "max_aux_streams": 1}
    options["weight_streaming_mib"] = 1
    assert build_plan(trt, recipe(found, **options))
    recipes = [plain, *(recipe(found, **{name: value}) for name, value in options.items())]
    recipes += [
        recipe(found, Target(*each)) for each in (("b", (8, 9), "0"), ("an Ada", (8, 9), "1"))
    ]
    keys = {digest_of(each.facts(trt)) for each in recipes}
    assert len(keys) == 7


def test_a_device_that_rtx_does_not_name_gets_a_portable_plan(trt) -> None:
    """No capability is set then."""
    found = pieces(trt, torch.sin, torch.randn(6, 4))
    assert build_plan(trt, recipe(found, Target("a Hopper", (9, 0), "0")))


KEY = """
import sys, torch
sys.path[:0] = {folders!r}
from test_tensorrt_build import *
torch.manual_seed(0)
module, trt = torch.nn.Linear(4, 4), library._load("tensorrt_rtx")
tensorrt.load_library = lambda: trt
tensorrt.place_on = lambda device: SimpleNamespace(target=ADA)
found = pieces(trt, lambda x: module(x).relu() + torch.arange(4), torch.randn(2, 4))
print(digest_of(recipe(found).facts(trt)))
"""


@pytest.mark.slow
def test_the_key_is_equal_in_every_process(run_python, fresh_python) -> None:
    """So that a child may build for its parent."""
    code = KEY.format(
        folders=[
            str(Path(__file__).parent),
            *(str(ROOT / each) for each in ("tests/shared", "bench")),
        ]
    )
    seeded = fresh_python(code, env={"PYTHONHASHSEED": "2"})
    keys = {run_python(code).stdout.strip(), seeded.stdout.strip()}
    assert len(keys) == 1
    assert len(keys.pop()) == 64


def test_a_plan_goes_to_disk_and_comes_back(trt, tmp_path, monkeypatch) -> None:
    """As it was; two builds of one recipe may differ, the key does not."""
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path))
    made = recipe(pieces(trt, torch.sin, torch.randn(6, 4)))
    facts = made.facts(trt)
    built = build_plan(trt, made)
    assert cache.plans().put(digest_of(facts), facts, built)
    again = recipe(pieces(trt, torch.sin, torch.randn(6, 4)))
    entry = cache.plans().get(digest_of(again.facts(trt)))
    assert entry is not None
    assert entry.blob == built
    assert json.loads(json.dumps(facts)) == entry.facts


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Put a package on the path whose import fails, as bindings without their libraries do."""

    def put(name: str) -> None:
        code = "raise ImportError('libnvonnxparser.so.11: cannot open shared object file')"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    return put


def test_rtx_serves_where_tensorrt_itself_cannot_be_imported(broken) -> None:
    """The bindings install without the libraries that they need."""
    broken("tensorrt")
    assert library.load_library().name == "tensorrt_rtx"


def test_every_import_that_failed_is_named(broken) -> None:
    """With what it raised."""
    for name in ("tensorrt", "tensorrt_rtx"):
        broken(name)
    with pytest.raises(Refusal) as caught:
        library.load_library()
    assert (caught.value.status, caught.value.reason) == ("unavailable", "not_installed")
    for name in ("tensorrt", "tensorrt_rtx"):
        assert f"{name} cannot be imported: ImportError: libnvonnxparser" in str(caught.value)


class Timings:
    """A builder's configuration, as far as times of kernels are concerned."""

    def __init__(self) -> None:
        self.given = b"nothing"

    def create_timing_cache(self, saved: bytes) -> bytes:
        return saved

    def set_timing_cache(self, times: bytes, ignore_mismatch: bool) -> bool:
        self.given = times
        return not ignore_mismatch

    def get_timing_cache(self) -> Timings:
        return self

    def serialize(self) -> bytes:
        return b"measured"


def test_times_of_kernels_are_kept_for_the_next_build(trt, tmp_path, monkeypatch) -> None:
    """Per library and device, by full TensorRT; RTX measures none."""
    monkeypatch.setenv("COMPOSER_CACHE_DIR", str(tmp_path))
    full = library.Library(trt.module, "tensorrt", "11.0", trt.log)
    made = recipe(pieces(trt, torch.sin, torch.randn(6, 4)))
    given = []
    for each in (full, full, trt, library.Library(trt.module, "tensorrt", "11.1", trt.log)):
        config = Timings()
        plan._recall_timings(each, config, made)
        plan._keep_timings(each, config, made)
        given.append(config.given)
    assert given == [b"", b"measured", b"nothing", b""]


@pytest.mark.parametrize("data", [b"", b"garbage", None])
def test_without_a_driver_no_plan_loads_and_the_process_lives(trt, data) -> None:
    """Garbage is told as such; a good plan wants a driver."""
    from composer.backends.tensorrt.loading import load

    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    if data is None:
        data = build_plan(trt, recipe(pieces(trt, torch.sin, torch.randn(2))))
    with trt.log.recording() as lines, pytest.raises(Refusal, match="cannot load the plan") as no:
        load(trt, data, lines)
    assert no.value.reason in ("driver_missing", "build_failed")


def test_the_first_error_is_quoted_and_the_spurious_one_dropped() -> None:
    """Without a driver every error is followed by a line on the driver."""
    said = [
        ("WARNING", "slow"),
        ("ERROR", "catchCudaError: cudaError 35: CUDA driver version is insufficient"),
        ("ERROR", "Error Code 4:\n  no such layer"),
    ]
    assert Lines(said).first_error == "Error Code 4: no such layer"
    assert Lines(said[:2]).refusal("it fails").reason == "driver_missing"
    assert Lines([]).refusal("it fails").args[0] == "it fails; its log does not say why"


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ("Error Code 2: OutOfMemory (no workspace)", "failed", "out_of_memory"),
        ("CUDA initialization failure with error: 35", "unavailable", "driver_missing"),
        ("CUDA initialization failure with error: 100", "unavailable", "no_device"),
        ("Error Code 10: Could not find any implementation", "failed", "build_failed"),
    ],
)
def test_the_words_of_an_error_give_its_reason(line, status, reason) -> None:
    """As far as they are telling."""
    refusal = Lines([("ERROR", line)]).refusal("TensorRT builds no plan")
    assert (refusal.status, refusal.reason) == (status, reason)
    assert line in str(refusal)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precison": "fp16"}, "unknown option 'precison'; did you mean 'precision'?"),
        ({"precision": "int8"}, "'precision' is 'int8'"),
        ({"optimization_level": 6}, "'optimization_level' is 6"),
        ({"workspace_mib": "all"}, "'workspace_mib' is 'all'"),
        ({"profiles": [{"*": [4, 2, 8]}]}, "is not [least, usual, greatest]"),
        ({"profiles": [{"*": [1, 2]}]}, "profiles[0].*"),
    ],
)
def test_a_wrong_option_is_named(options, words) -> None:
    """Before anything is tried."""
    with pytest.raises(OptionError) as caught:
        tensorrt.TensorRTEngine().settings(options)
    assert words in str(caught.value)


def test_nothing_is_printed(trt, capfd, caplog) -> None:
    """What TensorRT says goes to the record."""
    with caplog.at_level(logging.DEBUG, "tensorrt"):
        build_plan(trt, recipe(pieces(trt, torch.sin, torch.randn(6, 4))))
    assert capfd.readouterr() == ("", "")


def _fields(made: Recipe) -> dict[str, Any]:
    return {name: getattr(made, name) for name in Recipe.__slots__}


def test_defaults_are_the_librarys() -> None:
    """Nothing is set that the user did not ask for."""
    assert Settings().model_dump(exclude_defaults=True) == {}
    assert Settings().precision == "fp32"
