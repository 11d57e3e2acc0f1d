"""One GPU as four logical devices: the numbers of one device, limits that hold, collectives that do not hang.

The reference is a plain loop on the same GPU over whole batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.config import DeviceRegistry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SHARE_MB = 1024  # four of them fit a small card too
ROWS = (16, 16, 3)  # the last batch is smaller than the number of replicas


@pytest.fixture
def four(fresh_devices: DeviceRegistry) -> Iterator[ls.MirroredStrategy]:
    (gpu, *_) = ls.config.list_physical_devices("GPU")
    shares = [ls.config.LogicalDeviceConfiguration(memory_limit=SHARE_MB)] * 4
    ls.config.set_logical_device_configuration(gpu, shares)
    strategy = ls.MirroredStrategy(["gpu:0", "gpu:1", "gpu:2", "gpu:3"], seed=0)
    yield strategy
    strategy.close()


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(rows, 8, generator=generator) for rows in ROWS]
    return [(each, each.sum(dim=1, keepdim=True)) for each in x]


def fit(strategy: ls.MirroredStrategy, module: nn.Module, precision: str = "fp32") -> list[float]:
    with strategy.scope():
        model = ls.Model(module)
        model.compile(
            optimizer=torch.optim.Adam(module.parameters(), 1e-2),
            loss=nn.MSELoss(reduction="none"),
            precision=precision,
        )
    return model.fit(batches(), epochs=3, verbose=0).history["loss"]


def plain_loop(module: nn.Module) -> None:
    module.to("cuda")
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for x, y in batches() * 3:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x.to("cuda")), y.to("cuda")).backward()
        optimizer.step()


def test_four_shares_train_as_one_device(four: ls.MirroredStrategy):
    module = network()
    alone = copy.deepcopy(module)

    fit(four, module)
    plain_loop(alone)

    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_every_share_holds_its_own_weights_and_they_stay_equal(four: ls.MirroredStrategy):
    module = network()
    mirrored = four.mirror(module)

    fit(four, module)

    for copies in zip(*(duplicate.parameters() for duplicate in mirrored.copies), strict=True):
        assert len({own.data_ptr() for own in copies}) == 4
        assert all(torch.equal(own, copies[0]) for own in copies)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_stays_near_full_precision(four: ls.MirroredStrategy, precision: str):
    full, mixed = fit(four, network()), fit(four, network(), precision)

    assert mixed[-1] < mixed[0]
    assert mixed[0] == pytest.approx(full[0], rel=0.05)


def test_dropout_is_bit_equal_again_and_differs_between_replicas(fresh_devices: DeviceRegistry):
    (gpu, *_) = ls.config.list_physical_devices("GPU")
    ls.config.set_logical_device_configuration(gpu, [ls.config.LogicalDeviceConfiguration(memory_limit=1024)] * 2)
    runs = []
    for _ in range(2):
        strategy = ls.MirroredStrategy(["gpu:0", "gpu:1"], seed=3)
        module = network(dropout=0.5)
        fit(strategy, module)
        masks = strategy.run(lambda: nn.functional.dropout(torch.ones(64, device="cuda"), 0.5))
        assert not torch.equal(masks[0], masks[1])
        runs.append([parameter.detach().clone() for parameter in module.parameters()])
        strategy.close()
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_a_collective_in_the_backward_pass_does_not_hang_on_one_gpu(four: ls.MirroredStrategy):
    def step(x: Tensor) -> Tensor:
        context = ls.get_replica_context()
        assert context is not None
        x = x.clone().requires_grad_()
        (context.all_reduce("sum", x) ** 2).sum().backward()
        assert x.grad is not None
        return x.grad

    shards = ls.PerReplica([torch.full((2,), float(replica), device="cuda") for replica in range(4)])
    gradients = four.local_results(four.run(step, (shards,)))

    # Every replica's loss is (0 + 1 + 2 + 3) ** 2 per element; each of the four adds 2 * 6 to every x.
    assert [gradient.tolist() for gradient in gradients] == [[48.0, 48.0]] * 4


def test_a_step_beyond_its_share_names_the_device_and_a_batch_that_fits(four: ls.MirroredStrategy):
    def step(x: Tensor) -> None:
        torch.empty((SHARE_MB + 256) * 2**20, dtype=torch.uint8, device=x.device)

    shards = ls.PerReplica([torch.zeros(16, 8, device="cuda") for _ in range(4)])
    with pytest.raises(
        ls.errors.DeviceMemoryError, match=rf"gpu:\d has a memory_limit of {SHARE_MB} MB.*per-replica batch"
    ):
        four.run(step, (shards,))

    total = four.reduce("sum", four.run(lambda: torch.ones((), device="cuda")))
    assert float(total) == 4.0  # usable afterwards
