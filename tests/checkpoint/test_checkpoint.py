"""A custom loop that is saved, and goes on in fresh objects, on as many replicas and on others."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import lockstep as ls
from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.weights import read_weights
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.strategies.mirrored import MirroredStrategy

ROWS = 10


@dataclass
class Loop:
    """A custom training loop and all that it carries."""

    strategy: MirroredStrategy
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: OneCycleLR
    seen: Any
    progress: dict[str, int]

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            seen=self.seen,
            progress=self.progress,
        )

    def train(self, steps: int) -> None:
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            losses = F.cross_entropy(self.model(x), y, reduction="none")
            ls.compute_average_loss(losses, global_batch_size=ROWS).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen.assign_add(len(x))

        for _ in range(steps):
            for batch in self.strategy.distribute_dataset([batch_of(self.progress["step"])]):
                self.strategy.run(step, batch)
            self.scheduler.step()
            self.progress["step"] += 1


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 3, 6, 6, generator=random).double(), torch.randint(3, (ROWS,), generator=random)


def loop(strategy: MirroredStrategy, *, noise: bool = True, width: int = 4) -> Loop:
    torch.manual_seed(0)
    norm, dropout = (nn.BatchNorm2d(width), nn.Dropout(0.3)) if noise else (nn.ReLU(), nn.Identity())
    module = nn.Sequential(nn.Conv2d(3, width, 3), norm, dropout, nn.Flatten(), nn.Linear(width * 16, 3)).double()
    model = strategy.mirror(module)
    groups = [{"params": module[0].parameters(), "lr": 0.05}, {"params": [*module[1].parameters()]}]
    optimizer = strategy.mirror(torch.optim.AdamW([*groups, {"params": module[4].parameters()}], lr=0.02))
    return Loop(
        strategy=strategy,
        model=model,
        optimizer=optimizer,
        scheduler=OneCycleLR(optimizer, [0.1, 0.1, 0.05], total_steps=40),
        seen=strategy.variable(0, aggregation="sum", synchronization="on_read"),
        progress={"step": 0},
    )


def weights(of: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in of.model.state_dict().items()}


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loop_that_goes_on_is_bit_equal_to_one_never_stopped(
    make_strategy: MakeStrategy, tmp_path: Path, replicas: int
):
    whole = loop(make_strategy(replicas))
    whole.train(7)
    first = loop(make_strategy(replicas))
    first.train(3)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    CheckpointManager(first.checkpoint(), tmp_path).save(3)
    expected = torch.rand(3)

    second = loop(make_strategy(replicas))
    torch.rand(9)
    restored = CheckpointManager(second.checkpoint(), tmp_path).restore_or_initialize()

    assert restored == tmp_path / "step-00000003"
    assert second.progress == {"step": 3}
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(drawn, expected)
    second.train(4)
    assert far(weights(second), weights(whole)) == 0
    assert [v.tolist() for v in second.seen.values] == [v.tolist() for v in whole.seen.values]
    assert int(second.seen) == 7 * ROWS
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 3)])
def test_on_other_replicas_the_numbers_are_those_of_one_device(
    make_strategy: MakeStrategy, tmp_path: Path, before: int, after: int
):
    whole = loop(make_strategy(1), noise=False)
    whole.train(7)
    first = loop(make_strategy(before), noise=False)
    first.train(3)
    CheckpointManager(first.checkpoint(), tmp_path).save(3)

    second = loop(make_strategy(after), noise=False)
    CheckpointManager(second.checkpoint(), tmp_path).restore_or_initialize()
    assert int(second.seen) == 3 * ROWS
    second.train(4)

    assert far(weights(second), weights(whole)) < 1e-12
    assert int(second.seen) == 7 * ROWS


def test_on_other_replicas_buffers_are_averaged_and_generators_derived_anew(
    make_strategy: MakeStrategy, tmp_path: Path
):
    first = loop(make_strategy(2))
    first.train(3)
    means = [duplicate[1].running_mean for duplicate in first.model.copies]
    CheckpointManager(first.checkpoint(), tmp_path).save(3)

    second, third = loop(make_strategy(3)), loop(make_strategy(3))
    for each in (second, third):
        CheckpointManager(each.checkpoint(), tmp_path).restore_or_initialize()
    begun = [state["cpu"] for state in make_strategy(3).generators.states()]

    assert not torch.equal(means[0], means[1])
    assert all(torch.equal(duplicate[1].running_mean, (means[0] + means[1]) / 2) for duplicate in second.model.copies)
    derived = [state["cpu"] for state in second.strategy.generators.states()]
    again = [state["cpu"] for state in third.strategy.generators.states()]
    assert all(torch.equal(one, other) for one, other in zip(derived, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(derived, begun, strict=True))


def test_the_weights_beside_are_the_state_dict(make_strategy: MakeStrategy, tmp_path: Path):
    first = loop(make_strategy(2))
    first.train(2)
    path = CheckpointManager(first.checkpoint(), tmp_path).save(2)
    assert far(read_weights(path / "weights.safetensors"), weights(first)) == 0


def test_a_checkpoint_of_more_things_restores_fewer(make_strategy: MakeStrategy, tmp_path: Path):
    first = loop(make_strategy(2))
    first.train(2)
    path = CheckpointManager(first.checkpoint(), tmp_path).save(2)
    second = loop(make_strategy(2))
    assert Checkpoint(model=second.model).restore(tmp_path) == path
    assert far(weights(second), weights(first)) == 0
    assert second.progress == {"step": 0}


def faults(strategy: MirroredStrategy, good: Loop) -> dict[str, tuple[dict[str, Any], str]]:
    wide = loop(strategy, width=5)
    plain = torch.optim.SGD(good.model.parameters(), 0.1)
    return {
        "shapes": ({"model": wide.model}, r"do not fit the module: wrong shapes: 0\.weight has shape \(4, 3, 3, 3\)"),
        "kind": (
            {"optimizer": plain},
            r"'optimizer' the state of a AdamW with 3 groups, but it is a SGD with 1",
        ),
        "name": ({"module": good.model}, r"has nothing called 'module'; it has: model, optimizer, progress, scheduler"),
        "scheduler": (
            {"scheduler": torch.optim.lr_scheduler.ConstantLR(plain)},
            r"'scheduler' the state of a OneCycleLR, but it is a ConstantLR",
        ),
        "variable": ({"seen": strategy.variable(torch.zeros(2))}, r"a variable of shape \(\) instead of \(2,\)"),
    }


@pytest.mark.parametrize("name", ["shapes", "kind", "name", "scheduler", "variable"])
def test_what_does_not_fit_is_named_and_nothing_is_loaded(make_strategy: MakeStrategy, tmp_path: Path, name: str):
    strategy = make_strategy(2)
    first = loop(strategy)
    first.train(2)
    CheckpointManager(first.checkpoint(), tmp_path).save(2)
    second = loop(make_strategy(2))
    things, message = faults(second.strategy, second)[name]
    before = weights(second)

    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint(progress=second.progress, **things).restore(tmp_path)

    assert "\n" not in str(raised.value)
    assert second.progress == {"step": 0}
    assert far(weights(second), before) == 0


@pytest.mark.parametrize("value", [5, "text", [1], None])
def test_what_cannot_be_restored_in_place_is_refused(value: Any):
    with pytest.raises(ConfigError, match=r"Checkpoint\(step=.*\) cannot be restored in place; give a mirrored module"):
        Checkpoint(step=value)


def test_nothing_or_things_of_two_strategies_are_refused(make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match=r"Checkpoint got nothing; give things by name"):
        Checkpoint()
    with pytest.raises(ConfigError, match=r"none called 'random'"):
        Checkpoint(random={})
    with pytest.raises(UsageError, match=r"things of two strategies"):
        Checkpoint(a=make_strategy(1).variable(0), b=make_strategy(2).variable(0))


def test_a_folder_without_a_checkpoint_is_named(make_strategy: MakeStrategy, tmp_path: Path):
    checkpoint = Checkpoint(seen=make_strategy(1).variable(0))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*; give a folder that has one"):
        checkpoint.restore(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none; give a folder such as step-00000120"):
        checkpoint.restore(tmp_path / "none")
    assert CheckpointManager(checkpoint, tmp_path / "none").restore_or_initialize() is None


VARIABLES = [
    ({"aggregation": "sum", "synchronization": "on_read"}, [1.0, 2.0], 3.0),
    ({"aggregation": "mean", "synchronization": "on_read"}, [1.0, 2.0], 1.5),
    ({"aggregation": "only_first", "synchronization": "on_read"}, [1.0, 2.0], 1.0),
    ({"aggregation": "none"}, [2.0, 2.0], 2.0),
    ({"aggregation": "sum"}, [4.0, 4.0], 4.0),
]


@pytest.mark.parametrize(("kind", "values", "read"), VARIABLES)
@pytest.mark.parametrize("after", [1, 2, 4])
def test_what_a_variable_reads_outside_stays_the_same(
    make_strategy: MakeStrategy, tmp_path: Path, kind: dict[str, Any], values: list[float], read: float, after: int
):
    saved = make_strategy(2).variable(ls.PerReplica(values), **kind)
    CheckpointManager(Checkpoint(v=saved), tmp_path).save(1)
    restored = make_strategy(after).variable(0.0, **kind)
    Checkpoint(v=restored).restore(tmp_path)
    assert float(restored) == read
    if after == 2:
        assert [value.item() for value in restored.values] == values


def test_generators_and_whatever_has_a_state_dict_are_taken(tmp_path: Path):
    generator, scaler = torch.Generator().manual_seed(3), torch.amp.GradScaler("cpu", init_scale=8.0)
    CheckpointManager(Checkpoint(generator=generator, scaler=scaler), tmp_path).save(1)
    expected = torch.rand(2, generator=generator)
    fresh, other = torch.Generator(), torch.amp.GradScaler("cpu")
    Checkpoint(generator=fresh, scaler=other).restore(tmp_path)
    assert torch.equal(torch.rand(2, generator=fresh), expected)
    assert other.state_dict()["scale"] == 8.0


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a record, whose checksum is right again."""
    document = json.loads((path / "checkpoint.json").read_text())
    change(document)
    del document["checksum"]
    document["checksum"] = zlib.crc32(json.dumps(document).encode())
    (path / "checkpoint.json").write_text(json.dumps(document))


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "step": lambda d: d.update(step="three"),
    "monitored": lambda d: d.update(monitored="best"),
    "files": lambda d: d.update(files=3),
    "a file's size": lambda d: d["files"].update({"weights.safetensors": 3}),
    "a file above": lambda d: d["files"].update({"../other": [1, 2]}),
    "a file elsewhere": lambda d: d["weights"].update(model="/etc/passwd"),
    "state": lambda d: d.update(state=3),
    "a thing": lambda d: d["state"].update(model=3),
    "a thing's parts": lambda d: d["state"].update(model={"more": 3}),
    "a thing's values": lambda d: d["state"]["progress"].update(shared=3),
    "weights": lambda d: d.update(weights=3),
    "lr": lambda d: d["state"]["optimizer"]["shared"]["state"]["param_groups"][0].update(lr="fast"),
    "groups": lambda d: d["state"]["optimizer"]["shared"]["state"].update(param_groups=3),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_record_with_values_of_other_types_is_one_line(make_strategy: MakeStrategy, tmp_path: Path, name: str):
    first = loop(make_strategy(1))
    path = CheckpointManager(first.checkpoint(), tmp_path).save(3)
    forged(path, FORGERIES[name])
    second = loop(make_strategy(1))
    with pytest.raises(CheckpointError) as raised:
        second.checkpoint().restore(path)
    assert "step-00000003" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("outside", ["../other.safetensors", "{}/other.safetensors"])
def test_a_sound_file_outside_of_the_checkpoint_is_not_read(make_strategy: MakeStrategy, tmp_path: Path, outside: str):
    first = loop(make_strategy(1))
    path = CheckpointManager(first.checkpoint(), tmp_path).save(3)
    (tmp_path / "other.safetensors").write_bytes((path / "weights.safetensors").read_bytes())
    forged(path, lambda document: document["weights"].update(model=outside.format(tmp_path)))
    with pytest.raises(CheckpointError, match=r"other\.safetensors', which is outside of the checkpoint"):
        loop(make_strategy(1)).checkpoint().restore(path)
