"""One GPU as four logical devices: the numbers of one device, limits that hold, collectives that do not hang.

The reference is a plain loop on the same GPU over whole batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.conftest import here
from torch import Tensor, nn

import lockstep as ls
from lockstep.config import DeviceRegistry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHARE_MB = 1024  # four of them fit a small card too
MB = 2**20
ROWS = (16, 16, 3)  # the last batch is smaller than the number of replicas


@pytest.fixture
def four(fresh_devices: DeviceRegistry) -> Iterator[ls.MirroredStrategy]:
    (gpu, *_) = ls.config.list_physical_devices("GPU")
    shares = [ls.config.LogicalDeviceConfiguration(memory_limit=SHARE_MB)] * 4
    ls.config.set_logical_device_configuration(gpu, shares)
    strategy = ls.MirroredStrategy(["gpu:0", "gpu:1", "gpu:2", "gpu:3"], seed=0)
    yield strategy
    strategy.close()


def in_use(strategy: ls.MirroredStrategy) -> list[int]:
    return [memory.in_use for memory in strategy.device_memory()]


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
        x = x.clone().requires_grad_()
        (here().all_reduce("sum", x) ** 2).sum().backward()
        assert x.grad is not None
        return x.grad

    shards = ls.PerReplica([torch.full((2,), float(replica), device="cuda") for replica in range(4)])
    gradients = four.local_results(four.run(step, (shards,)))

    # Every replica's loss is (0 + 1 + 2 + 3) ** 2 per element; each of the four adds 2 * 6 to every x.
    assert [gradient.tolist() for gradient in gradients] == [[48.0, 48.0]] * 4


def test_every_share_issues_on_its_own_stream_and_has_its_own_memory(four: ls.MirroredStrategy):
    held: list[Tensor | None] = [None] * 4

    def step() -> int:
        number = here().replica_id_in_sync_group
        held[number] = torch.empty(10 * MB * (number + 1), dtype=torch.uint8, device="cuda")
        return torch.cuda.current_stream().cuda_stream

    torch.cuda.empty_cache()  # a larger block that is kept could be given whole
    before = in_use(four)  # a stream's pool keeps cuBLAS's workspace of earlier strategies
    streams = four.local_results(four.run(step))

    assert len({*streams, torch.cuda.current_stream().cuda_stream}) == 5
    memories = four.device_memory()
    assert [now - then for now, then in zip(in_use(four), before, strict=True)] == [n * 10 * MB for n in (1, 2, 3, 4)]
    assert all(memory.in_use <= memory.reserved <= memory.peak for memory in memories)


def test_weights_that_are_on_the_gpu_already_are_counted_too(four: ls.MirroredStrategy):
    module = nn.Linear(1024, 1024).to("cuda")
    before = in_use(four)
    four.mirror(module)
    size = 4 * (1024 * 1024 + 1024)
    assert all(size <= now - then <= size + MB for now, then in zip(in_use(four), before, strict=True))


def test_the_order_of_streams_is_that_of_the_program(four: ls.MirroredStrategy):
    """Replicas with very different loads, many meetings, results dropped at once: any missing event shows."""
    torch.manual_seed(0)
    weights = [torch.randn(512, 512, device="cuda") / 23 for _ in range(4)]
    start = torch.randn(512, 512, device="cuda")

    def work(value: Tensor, number: int) -> Tensor:
        for _ in range(1 + 4 * number):
            value = torch.tanh(value @ weights[number])
        return value

    def step() -> Tensor:
        value = start.clone()
        for _ in range(20):
            value = here().all_reduce("sum", work(value, here().replica_id_in_sync_group)) / 4
        return value

    found = [four.local_results(four.run(step)) for _ in range(3)]
    expected = start.clone()
    for _ in range(20):
        first, *others = [work(expected, number) for number in range(4)]
        for other in others:
            first = first + other
        expected = first / 4

    assert all(torch.equal(value, expected) for values in found for value in values)


def test_the_caller_s_random_numbers_are_not_touched_by_replicas(four: ls.MirroredStrategy):
    torch.cuda.manual_seed(5)
    expected = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(5)
    first = four.run(lambda: torch.rand(4, device="cuda"))
    drawn = torch.rand(4, device="cuda")
    second = four.run(lambda: here().merge_call(lambda _strategy: torch.rand(4, device="cuda")))

    # torch.rand(8) and two of 4 need not draw alike; what matters is that the first 4 are the caller's own.
    torch.cuda.manual_seed(5)
    assert torch.equal(drawn, torch.rand(4, device="cuda"))
    assert torch.equal(second, torch.rand(4, device="cuda"))
    assert not any(torch.equal(own, expected[:4]) for own in first)


def test_a_step_beyond_its_share_names_the_device_and_a_batch_that_fits(
    four: ls.MirroredStrategy, record_property: Callable[[str, object], None]
):
    def step(x: Tensor) -> None:
        torch.empty((SHARE_MB + 256) * 2**20, dtype=torch.uint8, device=x.device)

    shards = ls.PerReplica([torch.zeros(16, 8, device="cuda") for _ in range(4)])
    with pytest.raises(
        ls.errors.DeviceMemoryError, match=rf"gpu:\d has a memory_limit of {SHARE_MB} MB.*per-replica batch"
    ):
        four.run(step, (shards,))

    total = four.reduce("sum", four.run(lambda: torch.ones((), device="cuda")))
    assert float(total) == 4.0  # usable afterwards
    reserved = [memory.reserved // MB for memory in four.device_memory()]
    record_property(f"MB that the shares have afterwards (limit {SHARE_MB})", reserved)
    assert max(reserved) <= SHARE_MB


def test_one_share_beyond_its_limit_releases_the_others_and_a_smaller_batch_trains_on(four: ls.MirroredStrategy):
    module = network()
    mirrored = four.mirror(module)
    optimizer = four.mirror(torch.optim.SGD(module.parameters(), 0.1))
    before = copy.deepcopy(module.state_dict())

    def step(x: Tensor) -> None:
        size = 128 * MB if here().replica_id_in_sync_group == 2 else MB
        torch.empty(len(x) * size, dtype=torch.uint8, device=x.device)
        mirrored(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(rows: int) -> None:
        for shards in four.distribute_dataset([torch.ones(rows, 8)]):
            four.run(step, (shards,))

    # 128 MB a row, and what a step holds beside.
    with pytest.raises(
        ls.errors.DeviceMemoryError, match=rf"gpu:2 has a memory_limit of {SHARE_MB} MB.* to fit is [5-8] "
    ):
        run(4 * 16)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    run(4 * 4)
    assert not torch.equal(module[0].weight, before["0.weight"])


def test_a_gpu_without_more_memory_is_told_in_the_name_of_the_share(four: ls.MirroredStrategy):
    def step() -> None:
        if here().replica_id_in_sync_group == 1:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        here().all_reduce("sum", torch.ones((), device="cuda"))

    with pytest.raises(ls.errors.DeviceMemoryError, match="gpu:1 got no more memory from its GPU"):
        four.run(step)
