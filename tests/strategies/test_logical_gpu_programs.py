"""Programs on shares of a GPU, on the stand-in: whatever a user does in replicas, no order is left to chance.

Nothing is compared here but with what must come out; ``stand_in_gpus`` fails where an event is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.conftest import here
from tests.stand_in import StandInDriver, stand_in_gpus
from torch import Tensor, nn

import lockstep as ls
from lockstep_tools.cli import main


@pytest.fixture
def three() -> Iterator[ls.MirroredStrategy]:
    with stand_in_gpus((64,) * 3) as (devices, _driver), closing(ls.MirroredStrategy(devices, seed=0)) as strategy:
        yield strategy


def test_results_of_collectives_may_be_kept_and_dropped_at_any_time(three: ls.MirroredStrategy):
    def step() -> Tensor:
        kept = []
        for _ in range(4):
            own = torch.full((100,), float(here().replica_id_in_sync_group))
            kept.append(here().merge_call(lambda _strategy, values: values[0] + values[1] + values[2], (own,)) * 2)
            here().all_gather(own, 0).sum()
        return torch.stack(kept).sum()

    for _ in range(2):
        assert [float(total) for total in three.local_results(three.run(step))] == [2400.0] * 3


def test_a_collective_s_backward_pass_and_variables(three: ls.MirroredStrategy):
    summed = three.variable(torch.zeros(2), aggregation="sum")
    counted = three.variable(0.0, aggregation="sum", synchronization="on_read")

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (here().all_gather(x, 0) ** 2).sum().backward()
        summed.assign_add(torch.ones(2))
        counted.assign_add(1.0)
        assert x.grad is not None
        return x.grad

    shards = ls.PerReplica([torch.ones(length) for length in (1, 2, 3)])
    for _ in range(2):
        gradients = three.run(step, (shards,))

    assert three.gather(gradients, 0).tolist() == [6.0] * 6
    assert (summed.read_value().tolist(), float(counted)) == ([6.0, 6.0], 6.0)


@pytest.mark.parametrize("kind", ["dense", "sparse", "of its own kind"])
def test_a_loop_of_one_s_own_with_clipping_and_a_schedule_outside(three: ls.MirroredStrategy, kind: str):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, 4, sparse=kind == "sparse"), nn.Flatten(), nn.Linear(8, 1))
    alone = copy.deepcopy(module)

    class Own(torch.optim.SGD):
        """No optimizer of torch's: it is not divided among replicas."""

    make = Own if kind == "of its own kind" else torch.optim.SGD
    model, optimizer = three.mirror(module), three.mirror(make(module.parameters(), 0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rows = [torch.arange(14).remainder(10).reshape(7, 2), torch.arange(4).reshape(2, 2)]

    def backward(x: Tensor) -> None:
        ls.compute_average_loss(model(x).square().squeeze(1)).backward()
        if kind != "sparse":
            optimizer.sum_gradients()

    for shards in three.distribute_dataset(rows):
        three.run(backward, (shards,))
        if kind != "sparse":  # which torch does not clip
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for number, x in enumerate(rows):
        plain.param_groups[0]["lr"] = 0.1 * 0.5**number
        plain.zero_grad()
        alone(x).square().mean().backward()
        if kind != "sparse":
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        plain.step()
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_masked_language_modelling_on_four_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for part, lines in {"train": 30, "valid": 8, "test": 8}.items():
        words = (f"{part} line {n} says that the {n % 7} replicas of step {n % 5} agree " * 3 for n in range(lines))
        (tmp_path / "text" / f"small.{part}.tokens").write_text("\n".join(words))
    sizes = "--layers 1 --hidden 16 --heads 2 --feed-forward 32 --vocabulary 400 --sequence-length 24 --batch-size 8"
    places = "--data text --output out"

    with stand_in_gpus(None, memory_mb=8192) as (_, driver):
        words = ["train", "mlm", *places.split(), *sizes.split(), "--devices", "gpu:4x2048", "--epochs", "1"]
        assert main([*words, "--check-exact"]) == 0

    assert ["gpu:3", "gpu:0", "2048", "MB"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert_used_alike(driver)


def assert_used_alike(driver: StandInDriver) -> None:
    reserved = [driver.memory.reserved[f"gpu:{number}"] for number in range(4)]
    assert min(reserved) > 0.9 * max(reserved)
    assert driver.waits == 0
