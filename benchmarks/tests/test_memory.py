from __future__ import annotations

import os

import pytest

from benchmarks.harness import memory_of, read_sizes


def test_sizes_are_read_in_megabytes():
    lines = [
        "5575b357b000-7ffc48a53000 ---p 00000000 00:00 0   [rollup]",
        "Rss:     2048 kB",
        "Threads:\t3",
        "Pss:  512 kB",
    ]

    assert read_sizes(lines) == {"Rss": 2.0, "Pss": 0.5}


def test_our_own_memory_is_in_order():
    memory = memory_of([os.getpid()])

    assert 10 < memory.pss_mb <= memory.rss_mb <= memory.peak_mb * 1.01


def test_the_memory_of_several_processes_is_added_up():
    once, twice = memory_of([os.getpid()]), memory_of([os.getpid()] * 2)

    assert twice.rss_mb == pytest.approx(2 * once.rss_mb, rel=0.05)
    assert twice.peak_mb == pytest.approx(2 * once.peak_mb, rel=0.05)
