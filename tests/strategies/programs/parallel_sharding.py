"""What the workers of test_parallel_sharding.py compute: one model trained on a grid, sharded and not, and by hand."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests import oracle
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import lockstep as ls

_SHARED = runpy.run_path(str(Path(__file__).with_name("parallel.py")), run_name="parallel")
build, batches, loss, SIZES = (_SHARED[name] for name in ("build", "batches", "loss", "SIZES"))
CLIP, ACCUMULATE, EPOCHS, DECAY = 0.5, 2, 1, 0.8
Kept = dict[str, float]


def adamw(parameters: Iterable[nn.Parameter], *, foreach: bool = False) -> torch.optim.Optimizer:
    """Two groups: matrices decay, and vectors have another rate."""
    every = list(parameters)
    matrices = [each for each in every if each.ndim > 1]
    vectors = [each for each in every if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    return torch.optim.AdamW(groups, 0.01, weight_decay=0.0, foreach=foreach)


def adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Has its state before the first step."""
    return torch.optim.Adagrad(parameters, 0.05, initial_accumulator_value=0.1)


OPTIMIZERS: dict[str, Any] = {"adamw": adamw, "foreach": partial(adamw, foreach=True), "adagrad": adagrad}


def run_jobs(experiments: list[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One after another."""
    torch.set_num_threads(1)
    return [run_job(*experiment) for experiment in experiments]


def run_job(name: str, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains on a grid."""
    strategy = ls.ParallelStrategy(seed=7, communication=ls.CommunicationOptions(lost_after_s=60), **options)
    with strategy.scope():
        model = ls.Model(strategy.parallelize(build(name)))
        model.compile(
            OPTIMIZERS[optimizer], loss, scheduler=lambda made: ExponentialLR(made, DECAY),
            accumulate=ACCUMULATE, clip_norm=CLIP,
        )  # fmt: skip
        history = model.fit(batches(), validation_data=batches()[:3], epochs=EPOCHS, verbose=0)
        state = copy.deepcopy(model.optimizer.state_dict())
        results = {
            "loss": history.history["loss"],
            "val_loss": history.history["val_loss"],
            "weights": {key: value.clone() for key, value in model.state_dict().items()},
            "predict": model.predict([x for x, _ in batches()])["logits"],
            "state": state,
            "kept": everyones(strategy, kept(model.optimizer.state)),
            "held": everyones(strategy, sum(parameter.numel() for parameter in model.module.parameters())),
        }
        results |= again(strategy, model, state)
    strategy.close()
    return results


def kept(state: Any) -> float:
    """How many numbers of an optimizer's state are here."""
    return sum(value.numel() for values in state.values() for value in values.values() if value.ndim)


def everyones(strategy: Any, number: float) -> list[float]:
    """A number of each worker."""
    return [each for (each,) in strategy._job.workers.all_gather_numbers("a number", [float(number)])]


def again(strategy: Any, model: ls.Model, state: dict[str, Any]) -> dict[str, Any]:
    """What becomes of the state when it is loaded, and when the optimizer is called by hand, with a hook."""
    optimizer = model.optimizer
    before = kept(optimizer.state)
    optimizer.load_state_dict(copy.deepcopy(state))
    loaded = optimizer.state_dict()
    results = {"loaded": loaded, "kept again": kept(optimizer.state) == before}
    mirrored = strategy.mirrored_modules[0]
    if mirrored.pipeline is not None:
        return results
    handle = optimizer.register_step_post_hook(lambda *_: None)
    for x, y in strategy.distribute_dataset(batches()[:2]):
        strategy.run(backward, (mirrored, optimizer, x, y))
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    results["by hand"] = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict({key: value * 2 for key, value in results["by hand"].items()})
    results["doubled"] = {key: value.clone() for key, value in model.state_dict().items()}
    return results


def backward(module: Any, optimizer: Any, x: dict[str, Tensor], y: Tensor) -> None:
    """A step of one's own, up to the sums. Those who borrow each other's weights all call the module."""
    if len(y) or module.shards_weights:
        loss(module(**x), y).sum().backward()
    optimizer.sum_gradients()


def one_device(name: str, optimizer: str) -> dict[str, Any]:
    """The same on one device."""
    training = oracle.train(
        build(name), batches(), OPTIMIZERS[optimizer], loss, epochs=EPOCHS, accumulate=ACCUMULATE, clip_norm=CLIP,
        scheduler=lambda made: ExponentialLR(made, DECAY),
    )  # fmt: skip
    return {"loss": training.epoch_losses(EPOCHS), "weights": training.module.state_dict()}
