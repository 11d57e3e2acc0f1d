"""Trainings on layouts of two workers: with an EMA of the weights, and with the loss that the model computes."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep as ls

_MODELS = runpy.run_path(
    str(Path(__file__).parents[2] / "strategies" / "programs" / "small_models.py"), run_name="small_models"
)
EPOCHS, DECAY = 2, 0.7
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "sharded weights": {"data": 2, "shard_parameters": True},
    "sharded optimizer": {"data": 2, "shard_optimizer": True},
}
loss = _MODELS["loss"]


def batches() -> list[Any]:
    found: list[Any] = _MODELS["batches"]((5, 2, 6))
    return found


def build() -> nn.Module:
    module: nn.Module = _MODELS["build"]("gpt2")
    return module


def trained(folder: Path, *, fails_at: int | None = None) -> dict[str, Any]:
    """On the strategy in scope, or one device. ``fails_at`` is a batch of the second epoch."""
    model = ls.Model(build())
    model.compile(lambda parameters: torch.optim.Adam(parameters, 0.01), loss)

    def fail(batch: int, logs: Any) -> None:
        if model.training_state.position.epoch == 1 and batch == fails_at:
            raise InterruptedError

    callbacks = [
        ls.EMA(DECAY),
        ls.LambdaCallback(on_train_batch_begin=fail),
        ls.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False),
    ]
    history = model.fit(batches(), validation_data=batches(), epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return {"weights": copy.deepcopy(model.state_dict()), "history": history.history}


def job(folder: str) -> dict[str, dict[str, Any]]:
    """The results of all layouts: undisturbed, and after an interruption."""
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for name, layout in LAYOUTS.items():
        strategy = ls.ParallelStrategy(seed=7, **layout)
        with strategy.scope():
            results[name] = trained(Path(folder, name))
            try:
                trained(Path(folder, f"{name} again"), fails_at=2)
            except ls.errors.CallbackError:
                results[f"{name} again"] = trained(Path(folder, f"{name} again"))
            if "pipeline" not in layout:
                results[f"{name} own loss"] = trained_by_module()
        strategy.close()
    return results


def labelled() -> list[dict[str, Tensor]]:
    """Texts of which the first ones are short."""
    found = []
    for x, y in batches():
        labels = y.clone()
        labels[0, 2:] = -100
        found.append({**x, "labels": labels})
    return found


def trained_by_module() -> dict[str, Any]:
    """On the strategy in scope, or one device."""
    model = ls.Model(build())
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.5), metrics=["perplexity", "accuracy"])
    history = model.fit(labelled(), validation_data=labelled(), epochs=EPOCHS, verbose=0)
    return {"weights": copy.deepcopy(model.state_dict()), "history": history.history}


def by_hand() -> tuple[dict[str, Tensor], list[float]]:
    """The averaged weights, and the losses of the average after each epoch."""
    module = build().train()
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    losses = []
    for _ in range(EPOCHS):
        for x, y in batches():
            optimizer.zero_grad()
            loss(module(**x), y).mean().backward()
            optimizer.step()
            averaged.update_parameters(module)
        with torch.no_grad():
            values = torch.cat([loss(averaged.module.eval()(**x), y) for x, y in batches()])
        losses.append(values.mean().item())
    return averaged.module.state_dict(), losses
