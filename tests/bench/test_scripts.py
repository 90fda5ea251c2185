"""The benches and the example run as a user runs them, on the smallest inputs they have."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT

pytestmark = pytest.mark.thorough


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.docs
def test_the_example_embeds_measures_and_reports() -> None:
    """Sentences find the one most like them; the report is that of the measured choice."""
    output = run("examples/embeddings.py", "--rounds", "1")
    assert "Someone performs music" in output
    for engine in ("composer, onnxrt", "composer, openvino", "composer, the fastest"):
        assert engine in output
    assert "composer: 1 graph in " in output
    assert output.count("not_chosen   slower") == 2 or "runs on eager" in output


def test_the_bench_of_size_ranges_compares_composer_with_the_best_engine(tmp_path: Path) -> None:
    """At each batch, and says who serves which sizes."""
    figures = tmp_path / "ranges.json"
    run(
        *("bench/size_ranges.py", "--models", "perceptron", "--batches", "2,64"),
        *("--rounds", "2", "--json", str(figures)),
    )
    found = json.loads(figures.read_text())["models"]["perceptron"]
    assert list(found["batches"]) == ["2", "64"]
    for row in found["batches"].values():
        assert row["best"] in row["times"]
        assert row["over_best"]["median"] > 0
    assert [each["dynamic"] for each in found["served_by"]] == [True]


def test_the_bench_of_eight_bits_compares_with_the_engines_own_tools(tmp_path: Path) -> None:
    """The times, the errors on inputs that were not seen before, and what is in eight bits."""
    figures = tmp_path / "int8.json"
    variants = "onnxrt;onnxrt int8;quantize_dynamic;nncf;fastest, int8 allowed"
    asked = ("--models", "vit", "--tiny", "--rounds", "2", "--variants", variants)
    run("bench/int8.py", *asked, "--json", str(figures))
    rows = json.loads(figures.read_text())["models"]["vit"]
    assert list(rows) == variants.split(";")
    missing = importlib.util.find_spec("nncf") is None
    assert rows["nncf"].get("failed") == ("nncf is not installed" if missing else None)
    ours = rows["onnxrt int8"]
    (graph,) = ours["graphs"]
    assert (graph["precision"], graph["products_in_int8"]) == ("int8", 13)
    assert list(ours["faster_than"]) == ["onnxrt", "quantize_dynamic"]
    assert rows["onnxrt"]["error"] < 1e-4
    assert min(ours["error"], rows["quantize_dynamic"]["error"]) > 1e-4
    assert rows["fastest, int8 allowed"]["time"]["rounds"] == 2


def test_the_model_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """Variants of a model, what composer chose, and how that compares."""
    variants = "eager;inductor;onnxruntime;openvino;composer[openvino];composer, fastest"
    figures = tmp_path / "models.json"
    run(
        *("bench/models.py", "--models", "vit", "--tiny", "--rounds", "2", "--warmup", "0"),
        *("--no-first", "--variants", variants, "--json", str(figures)),
    )
    record = json.loads(figures.read_text())
    assert record["machine"]["packages"]["torch"]
    assert record["products"]["vit"]["fp32"]["torch"] > 0
    rows = {row["variant"]: row for row in record["results"]}
    assert list(rows) == record["settings"]["variants"] == variants.split(";")
    for row in rows.values():
        assert row["time"]["rounds"] == 2
        assert row["max_relative_error"] < 1e-4
        assert row["share_of_best_product"] > 0
    assert rows["composer[openvino]"]["composer"][0]["attempts"][0]["coverage"] == 1.0
    assert [name for name, row in rows.items() if row["time_over_itself"]] == ["composer[openvino]"]
    chosen = rows["composer, fastest"]["composer"][0]
    assert chosen["chosen"] in {"onnxrt", "inductor", "openvino", "eager"}
    assert record["comparisons"]["vit"]["fp32"]["regret"]["best"] in rows
    assert record["summaries"][0]["over_fastest"]["inductor"]["models"] == 1


def test_the_bench_of_nan_writes_what_it_measured(tmp_path: Path) -> None:
    """One ratio a model."""
    figures = tmp_path / "nans.json"
    asked = ("--models", "resnet", "--tiny", "--rounds", "2", "--json", str(figures))
    run("bench/nans.py", *asked)
    (ratio,) = json.loads(figures.read_text())["keeps over loses"].values()
    assert ratio["p25"] <= ratio["median"] <= ratio["p75"]


def test_the_bench_of_reductions_writes_what_it_measured(tmp_path: Path) -> None:
    """The errors of eager and the engine at each size, and their ratio."""
    figures = tmp_path / "reductions.json"
    asked = ("--engines", "onnxrt", "--cases", "mean", "--powers", "8,10", "--sizes", "static")
    run("bench/reductions.py", *asked, "--kinds", "1000", "--json", str(figures))
    (row,) = json.loads(figures.read_text())["rows"]
    assert (row["case"], row["kind"], row["computed by"]) == ("mean", "1000", "onnxrt")
    assert list(row["errors"]) == ["2^8", "2^10"]
    for errors in row["errors"].values():
        assert errors["ratio"] <= 4
        assert max(errors["eager"], errors["engine"]) < 1e-6


def test_the_scaling_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """Compiles, calls and memory for each size, with composer and without."""
    figures = tmp_path / "scaling.json"
    run("bench/scaling.py", "--quick", "--sweeps", "nodes", "--json", str(figures))
    (sizes,) = json.loads(figures.read_text())["sweeps"].values()
    assert list(sizes) == ["10", "40"]
    for row in sizes.values():
        assert row["memory"]["composer"]["kept_kib"] > row["memory"]["plain"]["kept_kib"]
        assert row["compile"]["plain"]["rounds"] == 2


def test_the_overhead_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """A row an engine, and one for each kind of candidate that does not serve."""
    figures = tmp_path / "overhead.json"
    run("bench/overhead.py", "--rounds", "1", "--calls", "10", "--json", str(figures))
    record = json.loads(figures.read_text())
    assert set(record["calls"]) == {"eager", "aot_eager", "inductor", "onnxrt"}
    assert record["compiles"]["unavailable"]["status"] == "unavailable"
    assert record["compiles"]["failing"]["status"] == "failed"


def test_the_plan_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """The whole graph of a model in one region, and a plan for a GPU that is not here."""
    pytest.importorskip("tensorrt_rtx", reason="its parser and builder run on a CPU")
    figures = tmp_path / "tensorrt.json"
    run("bench/tensorrt_plans.py", "vit", "--tiny", "--json", str(figures))
    row = json.loads(figures.read_text())["models"]["vit"]
    assert (row["coverage"], row["regions"], row["left"]) == (1.0, 1, [])
    assert row["plan_mib"] > 0


def test_the_telemetry_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """The sink's share of a short compile; the long ones take too long here."""
    figures = tmp_path / "telemetry.json"
    run("bench/telemetry.py", "--rounds", "3", "--cold-rounds", "0", "--json", str(figures))
    record = json.loads(figures.read_text())
    assert len(record["compiles"]) == 1
    for row in record["compiles"].values():
        assert 0 < row["sink_ms"] < row["plain"]["median_ms"]
        assert row["share"]["median"] < 0.5


def test_the_engine_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """Calls, and the growth of a fresh process by as much as its weights, not twice as much."""
    figures = tmp_path / "onnxrt.json"
    run(
        *("bench/onnxrt.py", "--parts", "calls,memory", "--rounds", "1", "--calls", "10"),
        *("--megabytes", "200", "--json", str(figures)),
    )
    record = json.loads(figures.read_text())
    assert "1 in, 1 out, 200 weights" in record["calls"]
    (row,) = record["memory"].values()
    assert row["relative_error"] < 1e-4
    assert row["grown_over_weights"] < 1.3


def test_the_operator_bench_finds_what_is_right(tmp_path: Path) -> None:
    """Forward and backward of an operator that is taken, and one that is not."""
    figures = tmp_path / "ops.json"
    run("bench/ops.py", "--ops", "sin,special.bessel_j0", "--samples", "2", "--json", str(figures))
    verdicts = {
        (each["op"], each["direction"]): each["verdict"]
        for each in json.loads(figures.read_text())["results"]
    }
    assert verdicts["sin", "forward"] == verdicts["sin", "backward"] == "taken"
    assert verdicts["special.bessel_j0", "forward"] == "declined"


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_the_sweep_finds_nothing_wrong_with_operators_that_quantize(
    engine: str, tmp_path: Path
) -> None:
    """Torch's database has none of them, so they have samples of their own."""
    import quantized_ops

    figures = tmp_path / "ops.json"
    names = ",".join((*quantized_ops.of_pt2e(), "_int_mm", "_weight_int8pack_mm"))
    asked = ("--ops", names, "--engine", engine, "--no-backward", "--json", str(figures))
    run("bench/ops.py", *asked)
    results = json.loads(figures.read_text())["results"]
    taken = [row["op"] for row in results if row["verdict"] == "taken"]
    assert len(taken) == len(results) if engine == "onnxrt" else len(taken) > len(results) // 2


def test_the_bench_of_edges_tells_apart_what_is_documented(tmp_path: Path) -> None:
    """NaN gets lost in OpenVINO's ``exp``; others are right, and a probability is left alone."""
    figures = tmp_path / "edges.json"
    command = ("bench/edges.py", "--engines", "openvino", "--dtypes", "float32")
    run(*command, "--ops", "exp,round,bernoulli", "--json", str(figures))
    (sweep,) = json.loads(figures.read_text())["sweeps"]
    assert (sweep["counts"]["taken"], sweep["counts"]["wrong"]) == (1, 1)
    assert (sweep["known"], sweep["otherwise"]) == (["exp"], {})


def test_random_graphs_run_on_an_engine() -> None:
    """Each of them is right or refused."""
    output = run("bench/fuzz.py", "--engines", "onnxrt", "--seeds", "0-8")
    right, refused = map(int, re.findall(r"(\d+) (?:right|refused)", output))
    assert right > refused
    assert right + refused == 8


def test_a_random_graph_that_ends_its_process_is_told(tmp_path: Path) -> None:
    """Another process goes on behind it; here the third graph and the fifth kill theirs."""
    program = """
import os, signal, sys
sys.path.insert(0, "bench")
import fuzz
def verdict(engine, seed):
    return os.kill(os.getpid(), signal.SIGSEGV) if seed in (2, 4) else "right"
fuzz.verdict = verdict
fuzz.__file__ = __file__
if __name__ == "__main__":
    sys.exit(fuzz.main())
"""
    script = tmp_path / "dying.py"
    script.write_text(program)
    command = [sys.executable, str(script), "--engines", "onnxrt", "--seeds", "0-6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.findall(r"onnxrt (\d), .*CRASHED: SIGSEGV", done.stdout) == ["2", "4"]
    assert "onnxrt: 4 right, 0 refused" in done.stdout


def test_the_pass_bench_writes_what_it_measured(tmp_path: Path) -> None:
    """A row for each pass with its matches, and one for all that match together."""
    figures = tmp_path / "passes.json"
    run(
        *("bench/passes.py", "--models", "resnet", "--engines", "onnxrt", "--tiny"),
        *("--passes", "fold_batch_norm,remove_no_ops", "--rounds", "1", "--json", str(figures)),
    )
    rows = {each["passes"]: each for each in json.loads(figures.read_text())["results"]}
    assert rows["fold_batch_norm"]["matches"] == 15
    assert rows["fold_batch_norm"]["speedup"]["median"] > 0
    assert (rows["remove_no_ops"]["matches"], rows["remove_no_ops"]["speedup"]) == (0, None)


def test_the_faults_bench_says_what_became_of_every_call(tmp_path: Path) -> None:
    """A wrong value gets past try and except, and not past a chain that verifies."""
    figures = tmp_path / "faults.json"
    asked = ("--faults", "wrong_value", "--ways", "try/except", "composer, verified")
    run("bench/faults.py", *asked, "--json", str(figures))
    cells = json.loads(figures.read_text())["cells"]
    became = {(c["fault"], c["strikes"], c["training"], c["way"]): c["calls"] for c in cells}
    assert became["wrong_value", "calls", True, "try/except"] == {"wrong output": 6}
    assert became["wrong_value", "calls", True, "composer, verified"] == {"right": 6}
    assert became["wrong_value", "later", True, "composer, verified"] != {"right": 6}


@pytest.mark.parametrize("engine", ["onnxrt", "openvino"])
def test_the_guards_bench_leaves_out_layer_after_layer(engine: str, tmp_path: Path) -> None:
    """A ratio for each variant, and none for the engine by itself; the parts make up the whole."""
    figures = tmp_path / "guards.json"
    few = ("--tiny", "--models", "t5", "--rounds", "1", "--calls", "1", "--engine", engine)
    run("bench/guards.py", *few, "--json", str(figures))
    record = json.loads(figures.read_text())
    (found,) = record["models"].values()
    filters = ["all guards", "without weights'", "without modules'", "only tensors'", "none"]
    within = ["Dynamo", "composer", "AOTAutograd", "the check of weights"]
    assert list(found["ratios"]) == [*filters, *(f"without {each}" for each in within)]
    assert list(found["milliseconds"]) == [record["native"], *found["ratios"]]
    parts = sum(each["median_ms"] for each in found["parts"].values())
    assert parts == pytest.approx(found["milliseconds"]["all guards"]["median_ms"])


def test_the_bench_of_generation_measures_each_engine(tmp_path: Path) -> None:
    """Over eager and over Inductor, by cache."""
    figures = tmp_path / "generation.json"
    few = ("--tiny", "--places", "256", "--rounds", "2")
    run("bench/generation.py", *few, "--json", str(figures))
    for found in json.loads(figures.read_text())["results"]:
        engines = ["inductor", "onnxrt", "openvino"]
        assert list(found["milliseconds"]) == ["eager", *engines]
        assert [list(found["ratios"][each]) for each in engines[1:]] == [["eager", "inductor"]] * 2


def test_the_bench_of_decoding_measures_each_engine(tmp_path: Path) -> None:
    """Over Inductor in float32, with what a token reads."""
    pytest.importorskip("torchao")
    figures = tmp_path / "decode.json"
    few = ("--tiny", "--places", "64", "--rounds", "2", "--weights", "int8 by composer")
    run("bench/decode.py", *few, "--json", str(figures))
    record = json.loads(figures.read_text())
    engines = ["inductor", "onnxrt", "openvino"]
    names = [f"float32, {each}" for each in engines]
    names += [f"int8 by composer, {each}" for each in engines[1:]]
    assert (list(record["variants"]), record["failures"]) == (names, {})
    small = record["variants"][names[-1]]
    assert small["megabytes"] == pytest.approx(record["variants"][names[0]]["megabytes"] / 4)
    assert small["weights_in_int8"] > 0


def test_the_overhead_bench_measures_the_guard_alone(tmp_path: Path) -> None:
    """A row for each number of inputs."""
    figures = tmp_path / "guard.json"
    run("bench/overhead.py", "--guard", "--guard-rounds", "2", "--json", str(figures))
    rows = json.loads(figures.read_text())["guard"]
    assert list(rows)[:3] == ["1", "4", "16"]
    assert len(rows) == 6
    assert rows["1"]["added_ms"]["rounds"] == 2
