"""How many bytes are left, by what the kernel says of the machine and of the container."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer import memory


def test_available_memory_is_the_containers_where_it_has_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds of files can be let go; without a limit it is the machine's."""
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    machine = memory.available_memory()
    if machine is None:
        pytest.skip("this system does not say")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2500\n")
    (tmp_path / "memory.stat").write_text("anon 2100\ninactive_file 400\n")
    assert memory.available_memory() == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == pytest.approx(machine, rel=0.5)
