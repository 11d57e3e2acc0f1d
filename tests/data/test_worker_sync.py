"""What workers compare and share before they iterate over the same data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lockstep.collectives.communicator import Communicator
from lockstep.data.worker_sync import start_together
from lockstep.errors import ClusterError

if TYPE_CHECKING:
    from tests.data.conftest import RunWorkers

DATA = [torch.zeros(2)]


def drawn_after(workers: Communicator, generators: int) -> list[int]:
    """What generators draw that every worker seeded in its own way."""
    own = [torch.Generator().manual_seed(10 * workers.index + number) for number in range(generators)]
    start_together(workers, DATA, own)
    return [int(torch.randint(2**31, (), generator=each)) for each in own]


def test_all_generators_go_on_from_where_the_chief_s_stand(run_workers: RunWorkers):
    expected = [int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(seed))) for seed in (0, 1)]

    assert run_workers((1, 2, 1), drawn_after, 2) == [expected] * 3


def test_a_worker_with_other_generators_is_named(run_workers: RunWorkers):
    with pytest.raises(ClusterError, match=r"worker 1 has 1 torch\.Generators, worker 0 has 0"):
        run_workers((1, 1), lambda workers: drawn_after(workers, workers.index))
