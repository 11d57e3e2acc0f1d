"""Resident memory of running processes, as Linux accounts for it in /proc."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_KB_PER_MB = 1024


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Megabytes (2**20 bytes), of one process or added up over several.

    Args:
        peak_mb: the most that was resident at any time (VmHWM). For a job of several processes the sum of their
            peaks, which their steps in unison reach together.
        rss_mb: resident now; pages that processes share are counted in each.
        pss_mb: resident now; a page that n processes share counts 1/n in each.
    """

    peak_mb: float
    rss_mb: float
    pss_mb: float


def memory_of(pids: Sequence[int]) -> Memory:
    """The memory of running processes together."""
    parts = [_one(pid) for pid in pids]
    return Memory(
        peak_mb=sum(part.peak_mb for part in parts),
        rss_mb=sum(part.rss_mb for part in parts),
        pss_mb=sum(part.pss_mb for part in parts),
    )


def read_sizes(lines: Iterable[str]) -> dict[str, float]:
    """``{"Rss": 2.1, ...}`` in megabytes from lines such as ``Rss:    2208 kB``; other lines are passed over."""
    fields = (line.split() for line in lines)
    return {field[0].rstrip(":"): int(field[1]) / _KB_PER_MB for field in fields if field[2:3] == ["kB"]}


def _one(pid: int) -> Memory:
    now = read_sizes(Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    ever = read_sizes(Path(f"/proc/{pid}/status").read_text().splitlines())
    return Memory(peak_mb=ever["VmHWM"], rss_mb=now["Rss"], pss_mb=now["Pss"])
