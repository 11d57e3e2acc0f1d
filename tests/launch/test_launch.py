"""``ls.launch``: a function in worker processes, its result, and how it fails."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.errors import ClusterError, ConfigError

pytestmark = pytest.mark.workers


def summed(value: float) -> torch.Tensor:
    dist.init_process_group("gloo")
    tensor = torch.tensor([value + int(os.environ["RANK"])])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor


@pytest.mark.parametrize("workers", [2, 3])
def test_the_chief_s_result_comes_back(workers: int):
    assert ls.launch(summed, workers=workers, args=(1.0,)).item() == workers + sum(range(workers))


def raises_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such file")
    dist.init_process_group("gloo")


def test_the_error_of_a_worker_is_the_cause_and_the_worker_is_named():
    with pytest.raises(ClusterError, match=r"^worker 1 of 2 failed: ValueError: no such file$") as caught:
        ls.launch(raises_on_one, workers=2)

    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert 'raise ValueError("no such file")' in str(cause.__cause__)


def test_no_workers_is_refused():
    with pytest.raises(ConfigError, match="workers=0 was given, expected at least 1"):
        ls.launch(summed, workers=0)
