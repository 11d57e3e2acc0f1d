"""One GPU as several, on the stand-in: training is that of one device, limits hold, and nothing is left to chance.

The reference is a hand-written loop on one device over whole batches. ``stand_in_gpus`` fails where two streams used a
tensor, or memory, in an order that no event keeps.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests import oracle
from tests.stand_in import StandInDriver, stand_in_gpus
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import DeviceMemoryError
from lockstep.replicas.device.memory import MB

LIMIT_MB = 64
Shares = tuple[ls.MirroredStrategy, StandInDriver]


@pytest.fixture
def four() -> Iterator[Shares]:
    with stand_in_gpus((LIMIT_MB,) * 4) as (devices, driver), closing(ls.MirroredStrategy(devices, seed=0)) as strategy:
        yield strategy, driver


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.Dropout(dropout), nn.Linear(32, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Three, of which the last has fewer rows than there are replicas."""
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(rows, 8, generator=generator) for rows in (16, 12, 3)]
    return [(each, each.sum(dim=1, keepdim=True)) for each in x]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


def compiled(strategy: ls.MirroredStrategy, module: nn.Module, *, batchnorm: bool = True) -> ls.Model:
    with strategy.scope():
        model = ls.Model(module, sync_batchnorm=batchnorm)
        model.compile(optimizer=adam, loss=nn.MSELoss(reduction="none"), clip_norm=1.0)
    return model


def plain_loop(module: nn.Module, epochs: int) -> list[float]:
    training = oracle.train(module, batches(), adam, nn.MSELoss(), epochs=epochs, clip_norm=1.0)
    return training.epoch_losses(epochs)


def test_four_shares_train_evaluate_and_predict_as_one_device(four: Shares):
    strategy, _ = four
    module = network()
    alone = copy.deepcopy(module)
    model = compiled(strategy, module)

    history = model.fit(batches(), validation_data=batches(), epochs=2, verbose=0).history
    scores, outputs = model.evaluate(batches(), verbose=0), model.predict([x for x, _ in batches()])

    assert history["loss"] == pytest.approx(plain_loop(alone, 2), rel=1e-5)
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    alone.eval()
    expected = torch.cat([alone(x) for x, _ in batches()]).detach()
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    assert scores["loss"] == history["val_loss"][-1]


def test_a_replica_that_is_alone_needs_one_wait_at_each_end_of_a_run():
    with stand_in_gpus(None) as (devices, driver), closing(ls.MirroredStrategy(devices, seed=0)) as strategy:
        module = network()
        alone = copy.deepcopy(module)
        losses = compiled(strategy, module).fit(batches(), epochs=2, verbose=0).history["loss"]
        driver.log.clear()
        total = strategy.run(lambda: ls.get_replica_context().all_reduce("sum", torch.ones(2)))

    assert losses == pytest.approx(plain_loop(alone, 2), rel=1e-6)
    assert total.tolist() == [1.0, 1.0]
    assert [(entry.call, entry.on.split("@")[0]) for entry in driver.log if entry.call in ("record", "wait")] == [
        ("record", "caller"),
        ("wait", "gpu:0 for caller"),
        ("record", "gpu:0"),
        ("wait", "caller for gpu:0"),
    ]


def test_dropout_differs_between_shares_and_is_bit_equal_again():
    runs = []
    for _ in range(2):
        with (
            stand_in_gpus((LIMIT_MB,) * 3) as (devices, _driver),
            closing(ls.MirroredStrategy(devices, seed=3)) as strategy,
        ):
            module = network(dropout=0.5)
            torch.manual_seed(11)
            compiled(strategy, module).fit(batches(), epochs=1, verbose=0)
            masks = strategy.run(lambda: nn.functional.dropout(torch.ones(64), 0.5))
            drawn = strategy.run(lambda: ls.get_replica_context().merge_call(lambda _strategy: torch.rand(4)))
            runs.append([*module.parameters(), *masks, drawn])
            assert not torch.equal(masks[0], masks[1])
            assert torch.equal(torch.get_rng_state(), torch.manual_seed(11).get_state()) is False  # by merge_call alone
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_a_share_holds_its_weights_and_state_and_says_so(four: Shares, tmp_path: Path):
    strategy, _ = four
    module = nn.Linear(1024, 256)
    weights = 4 * (1024 * 256 + 256)
    model = compiled(strategy, module, batchnorm=False)
    assert [memory.in_use for memory in strategy.device_memory()] == [weights] * 4

    model.fit([(torch.ones(8, 1024), torch.zeros(8, 256))], callbacks=[ls.TensorBoard(tmp_path)], verbose=0)
    gc.collect()

    memories = strategy.device_memory()
    assert [memory.name for memory in memories] == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    for memory in memories:
        assert 3 * weights <= memory.in_use < 3.1 * weights  # weights and Adam's two moments
        assert 4 * weights <= memory.peak < 4.1 * weights  # and gradients, and a row or two
        assert memory.limit == LIMIT_MB * MB
    assert_written(tmp_path / "train", memories)


def assert_written(folder: Path, memories: tuple[object, ...]) -> None:
    events = EventAccumulator(str(folder))
    events.Reload()
    for number, memory in enumerate(memories):
        for what, size in memory.sizes_mb().items():  # type: ignore[attr-defined]
            (event,) = events.Scalars(f"memory_mb/gpu_{number}/{what}")
            assert event.value > 0
            if what != "in_use":
                assert event.value == pytest.approx(size)


def test_one_share_beyond_its_limit_is_named_and_the_others_are_released(four: Shares):
    strategy, _ = four
    module = network()
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))
    before = copy.deepcopy(module.state_dict())

    def step(x: Tensor) -> None:
        context = ls.get_replica_context()
        size = 10 * MB if context.replica_id_in_sync_group == 2 else MB
        activations = torch.empty(len(x) * size, dtype=torch.uint8)
        mirrored(x).sum().backward()
        del activations
        optimizer.step()
        optimizer.zero_grad()

    def run(rows: int) -> None:
        for shards in strategy.distribute_dataset([torch.ones(rows, 8)]):
            strategy.run(step, (shards,))

    with pytest.raises(DeviceMemoryError, match=r"gpu:2 .*64 MB.*160 MB.* fit is 6 \(.* 16\)") as raised:
        run(4 * 16)
    assert isinstance(raised.value, torch.OutOfMemoryError)
    assert "raised in replica 2 (gpu:2)" in raised.value.__notes__
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items() if "weight" in name)
    del raised

    run(4 * 6)  # what was said to fit
    assert not torch.equal(module[0].weight, before["0.weight"])
    assert all(memory.reserved <= LIMIT_MB * MB for memory in strategy.device_memory())


def test_a_gpu_that_has_no_more_itself_is_told_in_the_name_of_the_share():
    with (
        stand_in_gpus((96, 96), memory_mb=192) as (devices, driver),
        closing(ls.MirroredStrategy(devices, seed=0)) as strategy,
    ):
        driver.memory.capacity = 50 * MB  # another program has the rest

        def step() -> None:
            context = ls.get_replica_context()
            torch.empty(80 * MB * context.replica_id_in_sync_group, dtype=torch.uint8)
            context.all_reduce("sum", torch.ones(()))

        with pytest.raises(DeviceMemoryError, match=r"gpu:1 got no more memory from its GPU.* of a memory_limit of 96"):
            strategy.run(step)
