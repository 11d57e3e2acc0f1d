"""The evaluator beside a job of several workers: its strategies are of its own process alone, and wait for nobody.

It loads and evaluates what the chief has saved, and neither trains nor saves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls


@pytest.fixture(params=["listed", "left out"])
def _evaluator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody answers at these addresses: they are of a network that is nobody's.
    cluster = {"chief": ["192.0.2.1:20000"], "worker": ["192.0.2.2:20000"]}
    if request.param == "listed":
        cluster["evaluator"] = ["192.0.2.3:20000"]
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}))


@pytest.mark.usefixtures("_evaluator")
@pytest.mark.parametrize("make", [ls.MultiWorkerMirroredStrategy, ls.MirroredStrategy])
def test_it_evaluates_by_itself(make: type[ls.Strategy], split_cpu):
    data = [(torch.ones(3, 2), torch.tensor([[1.0], [2.0], [6.0]]))]

    with closing(make([device.name for device in split_cpu(2)], seed=0)) as strategy, strategy.scope():
        module = nn.Linear(2, 1)
        nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
        model = ls.Model(module)
        model.compile(loss=lambda outputs, targets: (outputs - targets).abs().squeeze(1))

        assert (strategy.task, strategy.workers.size, strategy.num_replicas_in_sync) == ("evaluator", 1, 2)
        assert not strategy.workers.is_chief
        assert model.evaluate(data, verbose=0) == {"loss": pytest.approx(3.0)}
        assert strategy.reduce("sum", 1) == 2


DATA = [(torch.ones(3, 2), torch.tensor([[1.0], [2.0], [6.0]]))]
STRATEGIES: dict[str, Callable[[], ls.Strategy]] = {
    "mirrored": lambda: ls.MirroredStrategy(["cpu:0"], seed=0),
    "several workers": lambda: ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=0),
    "any layout": lambda: ls.MultiWorkerMirroredStrategy(["cpu:0"], replicas=2, seed=0),
    "parallel": lambda: ls.ParallelStrategy(device="cpu:0", seed=0),
}


def compiled(strategy: ls.Strategy) -> ls.Model:
    with strategy.scope():
        model = ls.Model(nn.Linear(2, 1))
        model.compile(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), loss=nn.MSELoss())
    return model


@pytest.fixture
def _beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"chief": ["192.0.2.1:20000"], "worker": ["192.0.2.2:20000"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}))


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_loads_what_the_chief_has_saved_and_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_devices: Any, name: str
):
    weights, backup = tmp_path / "w.safetensors", tmp_path / "backup"
    with closing(ls.MirroredStrategy(["cpu:0"], seed=0)) as chiefs:
        model = compiled(chiefs)
        model.fit(DATA, verbose=0)
        model.save_weights(weights)
        ls.CheckpointManager(model.checkpoint(), backup).save(1)
        expected, saved = model.evaluate(DATA, verbose=0), weights.read_bytes()
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"worker": ["192.0.2.1:1"]}, "task": {"type": "evaluator", "index": 0}})
    )

    with closing(STRATEGIES[name]()) as strategy:
        for load in (lambda model: model.load_weights(weights), lambda model: model.load_checkpoint(backup)):
            model = compiled(strategy)
            load(model)
            assert model.evaluate(DATA, verbose=0) == pytest.approx(expected)
        with pytest.raises(ls.errors.UsageError, match=r"save_weights .* in an evaluator.*copy the file"):
            model.save_weights(weights)
        with pytest.raises(ls.errors.UsageError, match=r"CheckpointManager\.save .* in an evaluator"):
            ls.CheckpointManager(model.checkpoint(), backup).save(2)

    assert weights.read_bytes() == saved
    assert [path.name for path in backup.iterdir() if path.name.startswith("step")] == ["step-00000001"]


@pytest.mark.usefixtures("_beside_the_training")
@pytest.mark.parametrize("name", STRATEGIES)
def test_it_does_not_train(fresh_devices: Any, name: str, tmp_path: Path):
    with closing(STRATEGIES[name]()) as strategy:
        model = compiled(strategy)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(ls.errors.UsageError, match=r"fit .* in an evaluator.*load_weights"):
            model.fit(DATA, callbacks=[ls.BackupAndRestore(tmp_path / "backup")])
        with pytest.raises(ls.errors.UsageError, match=r"train_on_batch .* in an evaluator"):
            model.train_on_batch(*DATA[0])

        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not (tmp_path / "backup").exists()


def step_inside(strategy: ls.Strategy, module: nn.Module, optimizer: Any) -> None:
    def step(batch: Any) -> None:
        module(batch[0]).sum().backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(DATA):
        strategy.run(step, (batch,))


def step_outside(strategy: ls.Strategy, module: nn.Module, optimizer: Any) -> None:
    for batch in strategy.distribute_dataset(DATA):
        strategy.run(lambda batch: module(batch[0]).sum().backward(), (batch,))
    optimizer.step()


@pytest.mark.usefixtures("_beside_the_training")
@pytest.mark.parametrize("train", [step_inside, step_outside])
@pytest.mark.parametrize("name", ["mirrored", "any layout"])
def test_its_optimizers_make_no_update(fresh_devices: Any, name: str, train: Callable[..., None]):
    with closing(STRATEGIES[name]()) as strategy:
        module = strategy.mirror(nn.Linear(2, 1))
        optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))
        before = module.module.weight.detach().clone()
        with pytest.raises(ls.errors.UsageError, match=r"update of an optimizer .* in an evaluator.*strategy\.task"):
            train(strategy, module, optimizer)
        assert torch.equal(module.module.weight, before)
