"""What the machine and control groups have left."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.replicas.cpu.memory import available_mb

MB = 2**20


def group(folder: Path, limit: str, usage: int, reclaimable: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")


@pytest.mark.parametrize(
    ("path", "limited", "expected"),
    [
        ("/user", None, 1000),  # no limit: the machine counts
        ("/job/step", ("job", 500, 200, 50), 350),  # the group above, and file pages that it can give up are free
        ("/host/path/that/is/not/here", ("", 100, 90, 0), 10),  # a container sees its group as the root
        ("/job", ("job", 100, 200, 0), 0),
    ],
)
def test_the_least_of_the_machine_and_its_groups_counts(
    path: str, limited: tuple[str, int, int, int] | None, expected: float, tmp_path: Path
):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\n")
    (proc / "self" / "cgroup").write_text(f"0::{path}\n")
    group(groups / "user", "max", 5, 0)
    if limited is not None:
        name, limit, usage, reclaimable = limited
        group(groups / name, str(limit * MB), usage * MB, reclaimable * MB)

    assert available_mb(proc, groups) == expected


def test_this_machine_has_some_left():
    assert available_mb() > 0
