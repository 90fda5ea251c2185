"""``bench/gpu.py`` without a GPU: all of it but the card, for which the CPU stands in."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from common import ROOT

pytestmark = pytest.mark.thorough

BENCH = ROOT / "bench"


@pytest.fixture
def gpu(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("gpu")


def stand_in(gpu: ModuleType) -> object:
    """A card that is the CPU, timed by the CPU's clock; it knows nothing of memory."""
    timing = importlib.import_module("timing")

    class Cpu(gpu.Card):
        def __init__(self) -> None:
            self.device = torch.device("cpu")

        def clock(self, call, calls) -> float:
            return timing.wall_clock(call, calls)

        def synchronize(self) -> None:
            pass

        def clear(self) -> None:
            pass

        def allocated(self) -> float:
            return 0.0

        used = allocated

        def peak(self, call) -> float:
            call()
            return 1.0

        def facts(self) -> dict[str, object]:
            return {"card": "none", "driver": None, "cuda": None, "packages": {}}

    return Cpu()


def measured(gpu: ModuleType, figures: Path, *arguments: str) -> dict[tuple[str, str], dict]:
    """Run the bench on the stand-in; its rows by model and variant."""
    asked = ("--tiny", "--rounds", "2", "--warmup", "0", "--calls", "1", "--json", str(figures))
    assert gpu.main([*asked, *arguments], stand_in(gpu)) == 0
    rows = json.loads(figures.read_text())["results"]
    return {(row["model"], row["variant"]): row for row in rows}


def test_without_a_gpu_it_says_so_and_ends_with_status_2(gpu, monkeypatch, capsys) -> None:
    """One line, at once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.startswith("there is no NVIDIA GPU here")


def test_every_engine_has_figures_or_says_why_not(gpu, tmp_path, capsys) -> None:
    """Those that a CPU can run are timed and held against float64; the others quote the report."""
    here = ("eager", "onnxruntime", "composer[onnxrt]")
    elsewhere = ("torch_tensorrt", "composer[tensorrt]", "composer[tensorrt], graphs")
    asked = ("--models", "plain_convnet", "--dtypes", "fp32", "--variants", *here, *elsewhere)
    found = measured(gpu, tmp_path / "gpu.json", *asked)
    rows = {variant: row for (_, variant), row in found.items()}
    assert set(rows) == {*here, *elsewhere}
    for variant in here:
        assert rows[variant]["left_out"] == ""
        assert rows[variant]["relative_error"] < 1e-5
        assert rows[variant]["series"]["rounds"] == 2
    assert rows["torch_tensorrt"]["left_out"] == "torch_tensorrt is not installed"
    for variant in elsewhere[1:]:
        assert rows[variant]["left_out"].startswith("tensorrt unavailable (no_device)")
    assert "tensorrt unavailable (no_device)" in capsys.readouterr().out
    tables = importlib.import_module("tables")
    page = tables.gpu(json.loads((tmp_path / "gpu.json").read_text()))
    assert "| plain_convnet x2 | composer[onnxrt] | fp32 |" in page
    assert "| torch_tensorrt | torch_tensorrt is not installed |" in page


@pytest.mark.slow
def test_inductors_kernels_are_counted_and_a_cached_compile_is_marked(gpu, tmp_path) -> None:
    """On a CPU they are C++; the second variant finds what the first one compiled."""
    variants = ("composer[inductor]", "inductor")
    asked = ("--models", "plain_convnet", "--dtypes", "fp32", "--variants", *variants)
    rows = measured(gpu, tmp_path / "gpu.json", *asked)
    first, second = (rows["plain_convnet", each] for each in reversed(variants))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["kernels"] == second["kernels"] > 0
    assert first["relative_error"] == second["relative_error"] < 1e-5


def test_half_precision_and_batches_reach_every_model(gpu, tmp_path) -> None:
    """Public models too, in both halves; token ids stay whole numbers."""
    asked = ("--models", "bert", "plain_convnet", "--dtypes", "bf16", "--variants", "eager")
    rows = measured(gpu, tmp_path / "gpu.json", *asked)
    for row in rows.values():
        assert row["batch"] == 2
        assert 1e-6 < row["relative_error"] < 0.1


def test_what_time_does_not_allow_is_marked(gpu, tmp_path) -> None:
    """No minutes: every cell is there, and says why it is empty."""
    asked = ("--minutes", "0", "--models", "t5", "--dtypes", "fp16")
    rows = measured(gpu, tmp_path / "gpu.json", *asked)
    assert [variant for _, variant in rows] == [each.name for each in gpu.VARIANTS]
    assert {row["left_out"] for row in rows.values()} == {gpu.OUT_OF_TIME}


def test_a_model_that_cannot_be_built_is_a_line_in_the_table(gpu, tmp_path, monkeypatch) -> None:
    """Such as a public one where transformers is not installed."""
    serving = importlib.import_module("serving")
    serving.built.cache_clear()
    monkeypatch.setitem(sys.modules, "zoo", None)
    asked = ("--models", "vit", "plain_convnet", "--dtypes", "fp32", "--variants", "eager")
    rows = measured(gpu, tmp_path / "gpu.json", *asked)
    assert "zoo" in rows["vit", "eager"]["left_out"]
    assert rows["plain_convnet", "eager"]["series"]


def test_the_card_is_asked_by_events_and_for_its_facts(monkeypatch) -> None:
    """Every name of ``torch.cuda`` that the real card uses is there, with these arguments."""
    monkeypatch.syspath_prepend(BENCH)
    card = importlib.import_module("card")
    asked: list[str] = []

    def fake(name, answer=None):
        real = getattr(torch.cuda, name)
        assert callable(real)

        def call(*args, **kwargs):
            asked.append(name)
            return answer

        monkeypatch.setattr(torch.cuda, name, call)

    event = SimpleNamespace(
        record=lambda: asked.append("record"),
        synchronize=lambda: asked.append("waited"),
        elapsed_time=lambda end: 6.0,
    )
    properties = SimpleNamespace(
        name="a card", major=9, minor=0, multi_processor_count=132, total_memory=2**37
    )
    for name, answer in (
        *(("Event", event), ("mem_get_info", (2**20, 2**22)), ("memory_allocated", 2**21)),
        *(("max_memory_allocated", 2**21), ("get_device_properties", properties)),
        *(("synchronize", None), ("empty_cache", None), ("reset_peak_memory_stats", None)),
    ):
        fake(name, answer)
    real = card.Card()
    assert real.clock(lambda: asked.append("call"), 3) == 2.0
    assert asked == ["synchronize", "Event", "Event", "record", *["call"] * 3, "record", "waited"]
    real.clear()
    assert (real.allocated(), real.used(), real.peak(lambda: None)) == (2.0, 3.0, 2.0)
    facts = real.facts()
    assert (facts["card"], facts["capability"], facts["memory_mib"]) == ("a card", "9.0", 2**17)
