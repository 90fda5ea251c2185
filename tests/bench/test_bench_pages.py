"""Tables, plots and the page of the benches, from recorded figures; and what rows come to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from common import ROOT

pytestmark = pytest.mark.thorough

RATIO = {"median": 2.0, "p25": 1.9, "p75": 2.2}
MACHINE = {
    "date": "2026-11-21T12:00:00+00:00",
    "cpu": "A CPU",
    "cores": 2,
    "cpu_capability": "AVX2",
    "torch_threads": 2,
    "load_average_1min": 0.1,
    "packages": {"torch": "2.13.0", "openvino": None},
}


def row(variant: str, **changed: Any) -> dict[str, Any]:
    """One of ``bench/models.py``."""
    time = {"median_ms": 3.25, "minimum_ms": 3.0, "p25_ms": 3.1, "p75_ms": 3.5, "rounds": 15}
    found = {
        "model": "bert",
        "variant": variant,
        "precision": "fp32",
        "error": None,
        "compile_seconds": 7.5,
        "max_relative_error": 2e-6,
        "peak_growth_mib": 120.0,
        "kept_growth_mib": 40.0,
        "time": time,
        "speedup_over_eager": RATIO,
        "share_of_best_product": 0.55,
        "composer": [],
    }
    return found | changed


def models_record() -> dict[str, Any]:
    """Of one model: eager, an engine, one that failed, and composer's choice."""
    failed = {"error": "RuntimeError: no kernel", "time": None, "compile_seconds": None}
    failed |= {"max_relative_error": None, "speedup_over_eager": None, "kept_growth_mib": None}
    part = {"backend": "openvino", "status": "succeeded", "coverage": 0.93}
    rows = [
        row("eager", compile_seconds=None, max_relative_error=0.0),
        row("inductor"),
        row("openvino", **failed, share_of_best_product=None),
        row("composer[openvino]", composer=[{"attempts": [part]}], time_over_itself=RATIO),
        row("composer, fastest", composer=[{"chosen": "onnxrt"}]),
    ]
    over = {"eager": RATIO, "inductor": RATIO}
    found = {"regret": {"best": "inductor", "median": 1.01, "p25": 1.0, "p75": 1.02}}
    ends = {"least": 1.5, "most": 2.5, "models": 1}
    summary = {
        "precision": "fp32",
        "training": False,
        "over_fastest": {"inductor": RATIO | ends},
        "without_openvino": {"inductor": None},
        "regret": found["regret"] | ends,
    }
    return {
        "machine": MACHINE,
        "results": rows,
        "comparisons": {"bert": {"fp32": found | {"over_fastest": over}}},
        "summaries": [summary],
    }


def scaling_record() -> dict[str, Any]:
    """Two sizes of one sweep."""
    times = {"median_ms": 2.0, "p25_ms": 1.5, "p75_ms": 2.5}
    part = {"plain": times, "composer": times, "ratio": RATIO}
    kept = {"plain": {"kept_kib": 10.0}, "composer": {"kept_kib": 20.0}}
    size = {"compile": part, "call": part, "memory": kept}
    return {"machine": MACHINE, "sweeps": {"nodes": {"100": size, "1000": size}}}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with figures of two benches."""
    (tmp_path / "models.json").write_text(json.dumps(models_record()))
    (tmp_path / "scaling.json").write_text(json.dumps(scaling_record()))
    return tmp_path


def copied_pages(room: Any, folder: Path) -> None:
    """The pages that hold tables, in a folder of their own."""
    for page in {part.page for part in room("tables").PARTS}:
        copy = folder / page
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / page).read_text())


def test_tables_stand_between_the_markers(room: Any, results: Path) -> None:
    """Of what was measured; where nothing was, the command that measures it."""
    copied_pages(room, results)
    room("tables").rewrite(results, results)
    page = (results / "docs" / "benchmarks" / "ten-public-models.md").read_text()
    assert "| inductor / choice | **2.00** (1.90-2.20; models 1.50-2.50)" in page
    assert "| bert | inductor | onnxrt | 3.25 | 1.010 (1.000-1.020) |" in page
    assert "| bert | openvino | RuntimeError: no kernel |" in page
    assert "| bert | 2.00 (1.90-2.20), 93.0% of the graph |" in page
    assert "Not measured yet: `python bench/models.py --train --json" in page
    growth = (results / "docs" / "benchmarks" / "how-composer-grows.md").read_text()
    assert "| 1,000 | nodes | 2.0 | 2.0 | 2.000 (1.900-2.200) |" in growth


def test_tables_of_starts_and_choices_say_what_was_measured(room: Any) -> None:
    """Seconds and their ratios; picks, and choosing as a share of the builds."""
    starts = {"inductor, cold": {"median": 8.0}, "composer[onnxrt], warm": {"median": 1.25}}
    pair = {"composer[onnxrt], warm / inductor, cold": RATIO}
    loaded = {"composer[onnxrt], loaded / inductor, warm": RATIO}
    found = {"seconds": starts, "first": pair | loaded, "engine": pair}
    page = room("start_tables").warm({"machine": MACHINE, "models": {"bert": found}})
    assert "| bert | 8.00 | 1.25 |" in page
    assert "| bert | without Dynamo's share | 2.000 (1.900-2.200) |  |" in page

    chosen = {"picks": {"onnxrt": 49, "inductor": 1}, "wrong": 1, "selections": 50}
    chosen |= {"build_seconds": 20.0, "seconds": {"median": 1.5}}
    chosen |= {"share_of_build": {"median": 0.075, "most": 0.15}}
    chosen |= {"milliseconds": {"onnxrt": 1.5, "inductor": 2.25}}
    record = {"machine": MACHINE, "load": True, "models": {"perceptron": chosen}}
    page = room("start_tables").choosing(record)
    assert "One core was kept busy." in page
    assert "| perceptron | onnxrt 1.50, inductor 2.25 | onnxrt 49, inductor 1 | 1 | 50 |" in page
    assert "| 50 | 20.0 | 1.50 | 8% | 15% |" in page


def test_table_of_guards_has_a_row_for_each_variant(room: Any) -> None:
    """By model, with the ratio to the engine by itself; then the parts, in microseconds."""
    found = {"milliseconds": {"none": {"median_ms": 7.25}}, "ratios": {"none": RATIO}}
    found["parts"] = {"composer": {"median_ms": 0.0125}}
    record = {"machine": MACHINE, "native": "openvino", "models": {"t5": found}}
    page = room("start_tables").guards(record)
    assert "| model | variant | median ms | / openvino |" in page
    assert "| t5 | none | 7.25 | 2.000 (1.900-2.200) |" in page
    assert "| t5 | 12 |" in page


def test_table_of_generation_has_a_row_for_each_engine(room: Any) -> None:
    """By cache; eager has no ratio to itself."""
    found = {"kind": "static", "places": 4096, "ratios": {"onnxrt": {"eager": RATIO}}}
    found["milliseconds"] = {"eager": {"median_ms": 9.26}, "onnxrt": {"median_ms": 4.5}}
    page = room("start_tables").generation({"machine": MACHINE, "results": [found]})
    assert "| static | 4,096 | eager | 9.3 |  |  |" in page
    assert "| static | 4,096 | onnxrt | 4.5 | 2.000 (1.900-2.200) |  |" in page


def test_tables_are_those_of_the_figures_kept(room: Any, tmp_path: Path) -> None:
    """Nobody typed into the pages, and no page has lost a marker."""
    copied_pages(room, tmp_path)
    room("tables").rewrite(tmp_path, ROOT / "bench" / "results")
    for page in {part.page for part in room("tables").PARTS}:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), page


def test_plots_and_a_page_that_needs_no_network(room: Any, results: Path) -> None:
    """Each plot as a file and within the page, with machine and date below it."""
    (results / "scaling.json").unlink()
    written = {file.name for file in room("plots").draw(results)}
    plots = {f"{name}_call_fp32.png" for name in ("speed", "compile", "share", "regret")}
    assert written == plots | {"index.html"}
    page = (results / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(plots)
    assert page.count("Measured 2026-11-21 on A CPU, 2 cores") == len(plots)
    assert not re.search(r"(src|href)=.https?:", page)
    assert all((results / name).read_bytes().startswith(b"\x89PNG") for name in plots)


def test_plots_of_growth_have_a_panel_for_each_sweep(room: Any) -> None:
    """The first is that of the compile."""
    first = next(room("plots").of_scaling(scaling_record()))
    assert (first.name, first.image[:4]) == ("scaling_compile", b"\x89PNG")


def test_regret_is_over_the_best_engine_that_is_not_composer(room: Any) -> None:
    """By the rounds that both were in."""
    series = room("timing").Series
    times = {
        "eager": series((10.0, 12.0)),
        "openvino": series((4.0, 6.0)),
        "composer": series((1.0, 1.0)),
        "composer, fastest": series((4.4, 6.6)),
    }
    found = room("summary").compared(times, set(times))
    assert found["regret"]["best"] == "openvino"
    assert found["regret"]["median"] == pytest.approx(1.1)
    assert (set(found["over_fastest"]), found["without_openvino"]) == ({"eager"}, {})


def test_a_choice_in_bf16_is_held_against_float32_too(room: Any) -> None:
    """As somebody has who asks for nothing; the best engine is an accurate one in bf16."""
    series = room("timing").Series
    times = {
        "eager fp32": series((1.0, 1.0)),
        "inductor fp32": series((9.0, 9.0)),
        "inductor": series((6.0, 6.0)),
        "openvino": series((1.0, 1.0)),
        "composer, fastest": series((3.0, 3.0)),
    }
    assert room("summary").compared(times, {"eager"})["regret"] is None
    found = room("summary").compared(times, {"eager", "inductor"})
    assert found["regret"]["best"] == "inductor"
    over = {name: each["median"] for name, each in found["over_fastest"].items()}
    assert over == pytest.approx({"inductor": 2.0, "eager fp32": 1 / 3, "inductor fp32": 3.0})
    means = room("summary").summary({"bert": found})
    assert means["over_fastest"]["inductor fp32"]["median"] == pytest.approx(3.0)


def test_means_over_models_are_geometric_and_keep_the_spread(room: Any) -> None:
    """Of medians and of quartiles."""
    ratios = [RATIO, {"median": 8.0, "p25": 7.6, "p75": 8.8}]
    found = room("summary").geometric(ratios)
    assert found["median"] == pytest.approx(4.0)
    assert (found["least"], found["most"], found["models"]) == (2.0, 8.0, 2)
    assert room("summary").geometric([]) is None


def test_figures_over_all_models_are_said_where_there_are_such(room: Any) -> None:
    """There is no choice of composer's among variants that leave composer out."""
    (summary,) = models_record()["summaries"]
    assert len(room("show").said(summary)) == 2
    assert room("show").said(summary | {"over_fastest": {}, "regret": None}) == []
