"""Measuring this machine: figures that make sense, and nothing left changed."""

from __future__ import annotations

import os

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.plan import plan
from lockstep.plan.measure import measure


def test_this_machine_is_measured_and_planned_for():
    threads = torch.get_num_threads()
    # On a CPU with more cores than one, that is with fewer threads than before.
    found = measure(per_host=len(os.sched_getaffinity(0)), seconds=0.0)
    device = found.device

    assert torch.get_num_threads() == threads
    assert device.source == "measured"
    assert 1e9 < device.peak("fp32") < 1e16
    assert 0.1 < device.bandwidth_gb_s < 1e5
    assert 0.05 < found.constants.launch_us < 1e4
    assert 0 < found.constants.passes <= 1
    assert (found.constants.matmul, found.constants.memory, found.constants.link) == (1, 1, 1)
    assert plan("bert-tiny", devices=1, kind=device, batch=8, network=found.network).best.step_s > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are not divided among workers")
def test_more_workers_than_cores_are_refused():
    cores = len(os.sched_getaffinity(0))

    with pytest.raises(ConfigError, match=rf"per_host={cores + 1} was given, expected 1 to {cores} workers"):
        measure(per_host=cores + 1)
