"""What the kernel says of the machine: its processor, and how many bytes are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer.system import hardware, memory


def test_available_memory_is_the_containers_where_it_has_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds of files can be let go; without a limit it is the machine's."""
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    machine = memory.available_memory()
    if machine is None:
        pytest.skip("this system does not say")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2500\n")
    (tmp_path / "memory.stat").write_text("anon 2100\ninactive_file 400\n")
    assert memory.available_memory() == 900
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == pytest.approx(machine, rel=0.5)


def test_every_group_that_a_process_is_in_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both versions; also a path of the host's, which the container does not see."""
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    if memory.available_memory() is None:
        pytest.skip("this system does not say")
    (tmp_path / "own").write_text("3:cpu:/a\n2:memory:/not/here\n0::/slice/job\n")
    job = tmp_path / "slice" / "job"
    job.mkdir(parents=True)
    for group, limit in ((job, "max"), (job.parent, "5000")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("2500\n")
        (group / "memory.stat").write_text("inactive_file 400\n")
    assert memory.available_memory() == 2900
    older = tmp_path / "memory"
    older.mkdir()
    (older / "memory.limit_in_bytes").write_text("1000\n")
    (older / "memory.usage_in_bytes").write_text("400\n")
    (older / "memory.stat").write_text("cache 9\ntotal_inactive_file 100\n")
    assert memory.available_memory() == 700


def test_processor_of_arm_is_told_by_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux writes no name there."""
    cpus = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "_CPUS", cpus)
    one = "processor\t: {}\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n\n"
    cpus.write_text(one.format(0) + one.format(1))
    assert hardware._model() == "implementer 0x41, variant 0x3, part 0xd0c"
    cpus.write_text("processor: 0\nmodel name\t: Xeon\n")
    assert hardware._model() == "Xeon"
