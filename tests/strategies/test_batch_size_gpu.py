"""find_batch_size where GPU 0 is divided: the limit is the share's, and no memory stays taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.config import DeviceRegistry
from lockstep.errors import ConfigError, DeviceMemoryError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MB = 2**20
SHARE_MB = 512


@pytest.fixture
def halves(fresh_devices: DeviceRegistry) -> Iterator[ls.MirroredStrategy]:
    (gpu, *_) = ls.config.list_physical_devices("GPU")
    ls.config.set_logical_device_configuration(gpu, [ls.config.LogicalDeviceConfiguration(memory_limit=SHARE_MB)] * 2)
    with closing(ls.MirroredStrategy(["gpu:0", "gpu:1"], seed=0)) as strategy:
        taken()  # lets go of what cuBLAS has kept on the shares' streams for earlier tests: 32 MB each time, on an H100
        yield strategy


def make_batch(rows: int) -> Tensor:
    return torch.zeros(rows, 8)


def taken() -> int:
    """Bytes of tensors on the GPU. The workspaces that cuBLAS keeps, one for each stream, are let go first."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def two_megabytes_a_row(shard: Tensor) -> None:
    torch.empty(len(shard), 2 * MB, dtype=torch.uint8, device=shard.device)


def test_the_limit_is_the_share_s(halves: ls.MirroredStrategy):
    found = halves.find_batch_size(two_megabytes_a_row, make_batch, 16)

    assert 2 * (SHARE_MB // 2 - 2) <= found <= 2 * (SHARE_MB // 2)


def test_a_second_search_finds_the_same(halves: ls.MirroredStrategy):
    """What the replicas are held to have is as before: failed trials do not count against the next."""
    first = halves.find_batch_size(two_megabytes_a_row, make_batch, 4096)

    assert halves.find_batch_size(two_megabytes_a_row, make_batch, 4096) == first


def test_no_memory_stays_taken_and_everything_is_as_before(halves: ls.MirroredStrategy):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, 1))
    model = halves.mirror(network)
    optimizer = halves.mirror(torch.optim.Adam(network.parameters(), 1e-3))

    def step(shard: Tensor) -> None:
        ls.compute_average_loss(model(shard).square()).backward()
        optimizer.step()
        optimizer.zero_grad()

    before = {name: value.clone() for name, value in network.state_dict().items()}
    drawn = [state.clone() for state in torch.cuda.get_rng_state_all()]
    before_it = taken()
    found = halves.find_batch_size(step, make_batch, 1024)

    assert 2048 < found < 2 * SHARE_MB * MB / 4096 / 4
    assert taken() - before_it < MB
    assert optimizer.state_dict()["state"] == {}
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), drawn))
    for shards in halves.distribute_dataset([make_batch(found)] * 3):  # and it trains with what was found
        halves.run(step, (shards,))


def test_dropout_s_next_masks_are_those_of_a_program_without_the_search(halves: ls.MirroredStrategy):
    def masks() -> list[Tensor]:
        drawn = halves.run(lambda: nn.functional.dropout(torch.ones(64, device="cuda"), 0.5))
        return [mask.cpu() for mask in halves.local_results(drawn)]

    first = masks()
    with closing(ls.MirroredStrategy(["gpu:0", "gpu:1"], seed=0)) as other:
        other.run(lambda: nn.functional.dropout(torch.ones(64, device="cuda"), 0.5))
        other.find_batch_size(lambda shard: nn.functional.dropout(shard, 0.5), make_batch, 8, limit=64)
        after = other.run(lambda: nn.functional.dropout(torch.ones(64, device="cuda"), 0.5))

        assert not torch.equal(first[0], first[1])
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(after, masks(), strict=True))


def test_a_share_too_small_for_one_row_is_named(halves: ls.MirroredStrategy):
    def step(shard: Tensor) -> None:
        torch.empty((SHARE_MB + 100) * MB, dtype=torch.uint8, device=shard.device)

    with pytest.raises(DeviceMemoryError, match="a global batch of 2, the smallest to try, does not fit"):
        halves.find_batch_size(step, make_batch, 16)


def test_a_budget_of_host_memory_is_refused(halves: ls.MirroredStrategy):
    with pytest.raises(ConfigError, match="memory_mb=100 is a budget of host memory"):
        halves.find_batch_size(two_megabytes_a_row, make_batch, 16, memory_mb=100)
