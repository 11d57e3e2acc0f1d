"""What is resident, its peak, and what the machine and control groups have left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.replicas.cpu import memory
from lockstep.replicas.cpu.memory import (
    ResidentPeak,
    available_mb,
    give_back_freed_memory,
    keep_freed_memory,
    resident_mb,
)

MB = 2**20


def hold(mb: int) -> torch.Tensor:
    return torch.ones(mb * MB, dtype=torch.uint8)


@pytest.mark.parametrize("high_water_mark", [True, False], ids=["kernel", "sampled"])
def test_the_peak_is_what_was_held_inside_although_it_is_gone(high_water_mark: bool, monkeypatch: pytest.MonkeyPatch):
    if not high_water_mark:
        monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    give_back_freed_memory()  # what earlier tests left, which would be taken anew
    before = resident_mb()
    with ResidentPeak() as first:
        held = hold(100)
        for _ in range(4):  # long enough for the sampler to look
            held.max()
        del held
    give_back_freed_memory()
    with ResidentPeak() as second:
        hold(10)

    assert first.peak_mb - before == pytest.approx(100, abs=10)
    assert second.peak_mb - before < 50  # what came before does not count


def test_freed_memory_that_is_kept_can_be_given_back():
    keep_freed_memory()
    give_back_freed_memory()
    before = resident_mb()
    blocks = [hold(8) for _ in range(16)]
    last = hold(1)  # above the others, so that they do not lie at the heap's end
    del blocks

    give_back_freed_memory()

    assert resident_mb() - before < 16
    assert last[0] == 1


def machine(folder: Path, groups: str) -> Path:
    """A /proc of a machine with 1,000 MB available whose process is in ``groups``."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    return folder / "proc"


def group(folder: Path, limit: str, usage: int, reclaimable: int, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    most, used, line = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }[version]
    (folder / most).write_text(f"{limit}\n")
    (folder / used).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{line} {reclaimable}\n")


def test_without_a_limit_the_machine_counts(tmp_path: Path):
    proc = machine(tmp_path, "0::/user\n")
    group(tmp_path / "groups" / "user", "max", 5, 0, version=2)

    assert available_mb(proc, tmp_path / "groups") == 1000


def test_a_group_s_limit_counts_and_file_pages_that_it_can_give_up_are_free(tmp_path: Path):
    proc = machine(tmp_path, "0::/job/step\n")
    group(tmp_path / "groups" / "job" / "step", "max", 5, 0, version=2)
    group(tmp_path / "groups" / "job", str(500 * MB), 200 * MB, 50 * MB, version=2)

    assert available_mb(proc, tmp_path / "groups") == 350


def test_groups_of_the_first_version_count(tmp_path: Path):
    proc = machine(tmp_path, "4:memory:/job\n3:cpuset:/\n0::/\n")
    group(tmp_path / "groups" / "memory" / "job", str(300 * MB), 100 * MB, 0, version=1)

    assert available_mb(proc, tmp_path / "groups") == 200


def test_a_container_sees_its_group_as_the_root(tmp_path: Path):
    proc = machine(tmp_path, "0::/host/path/that/is/not/here\n")
    group(tmp_path / "groups", str(100 * MB), 90 * MB, 0, version=2)

    assert available_mb(proc, tmp_path / "groups") == 10


def test_this_machine_has_some_left():
    assert available_mb() > 0
