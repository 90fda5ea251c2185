"""Names: lazy, listed, guessed."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from composer import registry
from composer.errors import ComposerError, UnknownNameError
from composer.registry import OpenRegistry, Registry, nearest, one_slip_apart


def test_get_imports_on_demand() -> None:
    """A value is imported when it is first asked for."""
    assert Registry[Any]("thing", {"dumps": "json:dumps"}).get("dumps")({}) == "{}"


def test_unknown_name_is_guessed() -> None:
    """The error names the nearest known name."""
    with pytest.raises(UnknownNameError, match="unknown thing 'dump'; did you mean 'dumps'"):
        Registry("thing", {"dumps": "json:dumps"}).get("dump")


def test_entry_points_add_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's entry point is a name like our own."""
    found = [EntryPoint("loads", "json:loads", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    things = Registry[Any]("thing", {"dumps": "json:dumps"}, group="g")
    assert things.names() == ("dumps", "loads")
    assert things.get("loads")("1") == 1


def test_an_entry_point_does_not_take_over_a_name_of_our_own(monkeypatch, caplog) -> None:
    """It is refused and logged, and nobody's compile is the worse for it."""
    found = [EntryPoint("dumps", "json:loads", "g"), EntryPoint("load", "json:load", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    things = Registry[Any]("thing", {"dumps": "json:dumps"}, group="g")
    assert things.get("dumps")({}) == "{}"
    assert things.names() == ("dumps", "load")
    assert "stands for 'json:dumps' already; it is not used" in caplog.text


def test_a_name_that_two_packages_claim_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes a name over in silence, and the other names are none the worse."""
    found = [EntryPoint("a", "json:loads", "g"), EntryPoint("a", "json:load", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    things = Registry[Any]("thing", {"dumps": "json:dumps"}, group="g")
    for _ in range(2):
        with pytest.raises(ComposerError, match="stands for 'json:loads' already"):
            things.get("a")
    assert things.get("dumps")({}) == "{}"


def test_nearest_respects_its_cutoff() -> None:
    """What is not alike enough is no guess."""
    assert nearest("indcutor", ["inductor", "eager"]) == "inductor"
    assert nearest("neuron", ["inductor", "eager"], cutoff=0.8) is None


def test_nearest_looks_past_capitals() -> None:
    """What differs in them only is meant, rather than what shares more of them."""
    providers = ["CPUExecutionProvider", "CUDAExecutionProvider"]
    assert nearest("CudaExecutionProvider", providers) == "CUDAExecutionProvider"
    assert nearest("OnnxRT", ["inductor", "onnxrt"], cutoff=0.8) == "onnxrt"


def test_a_value_of_this_process_takes_no_name_over() -> None:
    """A second one under the same name is refused; the same one may come again."""
    things = OpenRegistry[Any]("thing", {"dumps": "json:dumps"})
    things.add("loads", json.loads)
    things.add("loads", json.loads)
    assert things.get("loads") is json.loads
    with pytest.raises(ComposerError, match="'dumps' cannot be 'json:load'"):
        things.add("dumps", json.load)


@pytest.mark.parametrize("slip", ["eagre", "eage", "eagger", "eaget", "Eager", "aeger", "eagerr"])
def test_one_slip_is_a_letter_more_or_less_or_another_or_two_swapped(slip: str) -> None:
    """In either order."""
    assert one_slip_apart(slip, "eager")
    assert one_slip_apart("eager", slip)


@pytest.mark.parametrize("other", ["eagle", "eagerly", "aegre", "fast", "", "regae"])
def test_two_slips_are_not_one(other: str) -> None:
    """They may be another name."""
    assert not one_slip_apart(other, "eager")
