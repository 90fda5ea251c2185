"""Engines tell axes apart whose sizes coincide, in the programs of ``bench/coinciding.py``."""

from __future__ import annotations

import pytest
from coinciding import COINCIDING, PROGRAMS, problem
from common import thorough

pytestmark = pytest.mark.slow

FIRST, *OTHERS = COINCIDING


@pytest.mark.parametrize("engine", ["openvino", "onnxrt"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [FIRST, *thorough(*OTHERS)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_axes_of_one_size_are_told_apart(name, sizes, dynamic, engine) -> None:
    """The engine takes the program, and computes what eager computes."""
    pytest.importorskip({"onnxrt": "onnxruntime"}.get(engine, engine))
    assert not problem(engine, PROGRAMS[name], sizes, dynamic=dynamic)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_inductor_tells_them_apart(name) -> None:
    """It needs seconds for each program, so the bench alone tries all sizes."""
    assert not problem("inductor", PROGRAMS[name], FIRST, dynamic=False)
