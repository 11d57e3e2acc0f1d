"""A driver of Ray: runs trainings one after another, and writes what every worker of each has seen.

python ray_training.py FOLDER KIND ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import lockstep as ls

EPOCHS, BATCHES = 3, 4


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches of 7 rows, which two workers divide unevenly."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(7, 4, generator=generator), torch.randn(7, 2, generator=generator)) for _ in range(BATCHES)]


def make_module(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


class Death(ls.Callback):
    """Kills the process of worker 1 in the second epoch, the first time that it comes there."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        is_there = self.model.training_state.position.step == BATCHES + 2
        if is_there and ray.train.get_context().get_world_rank() == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, Any]) -> None:
    folder, kind = Path(config["folder"]), config["kind"]
    seen: dict[str, Any] = {"threads": torch.get_num_threads()}
    divided = "tensor" in kind
    network = make_module(0.5 if "replicas" in kind else 0.0)
    if divided:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        strategy: Any = ls.ParallelStrategy(tensor=2, seed=0)
        network = strategy.parallelize(network, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    else:
        strategy = ls.MultiWorkerMirroredStrategy(seed=0, replicas=2 if "replicas" in kind else None)
    seen["workers"] = strategy.workers.processes.size
    if kind == "own loop":
        seen["weights"] = own_loop(strategy, network)
    else:
        with strategy.scope():
            model = ls.Model(network)
            optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
            model.compile(optimizer, loss=nn.MSELoss(reduction="none"))
            callbacks: list[Any] = [ls.RayTrain(save_freq=3, folder=folder / "shared" if divided else None)]
            if "killed" in kind:
                callbacks.append(Death(folder / f"{kind} died"))
            history = model.fit(batches(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
        seen |= {"epochs": history.epoch, "weights": flat(model.state_dict())}
    (folder / f"{kind} {ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(seen))
    strategy.close()


def flat(state: dict[str, Any]) -> list[float]:
    return [value for tensor in state.values() for value in tensor.flatten().tolist()]


def own_loop(strategy: Any, network: nn.Module) -> list[float]:
    model = strategy.mirror(network)
    optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), 0.1, momentum=0.9))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        errors = nn.functional.mse_loss(model(x), y, reduction="none").mean(1)
        ls.compute_average_loss(errors, global_batch_size=7).backward()
        optimizer.step()

    data = strategy.distribute_dataset(batches())
    for _ in range(EPOCHS):
        for x, y in data:
            strategy.run(step, args=(x, y))
    return flat(model.state_dict())


def fit(folder: Path, kind: str, *, workers: int, failures: int) -> Any:
    """One training of Ray; one with the name of an earlier one goes on from its checkpoints."""
    return TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "kind": kind},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=kind, storage_path=str(folder / "results"), failure_config=FailureConfig(max_failures=failures)
        ),
    ).fit()


def outside() -> str:
    """What the callback says that is not made in a train function."""
    try:
        ls.RayTrain()
    except ls.errors.ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "shared").mkdir()
    ray.init(num_cpus=2, include_dashboard=False)
    for kind in sys.argv[2:]:
        if kind == "outside":
            (folder / f"{kind}.json").write_text(json.dumps(outside()))
            continue
        if "fewer" in kind:
            with suppress(ray.train.WorkerGroupError):
                fit(folder, kind, workers=2, failures=0)
        result = fit(folder, kind, workers=1 if "fewer" in kind else 2, failures=1)
        (folder / f"{kind}.json").write_text(json.dumps(result.metrics))
    ray.shutdown()


if __name__ == "__main__":
    main()
