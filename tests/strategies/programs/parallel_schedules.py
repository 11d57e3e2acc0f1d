"""What the workers of test_parallel_schedules.py compute, with any schedule; and the same by hand on one device."""

from __future__ import annotations

import runpy
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lockstep as ls

_MODELS = runpy.run_path(str(Path(__file__).with_name("small_models.py")), run_name="small_models")
SIZES = (9, 8, 1, 5)  # the small ones leave microbatches, and whole replicas, without rows
OPTIMIZERS, build, loss = (_MODELS[name] for name in ("OPTIMIZERS", "build", "loss"))
batches = partial(_MODELS["batches"], SIZES)
Experiment = tuple[str, int, float, dict[str, Any]]
"""The model, its layers, its dropout, and the arguments of the strategy."""


def run_jobs(experiments: list[Experiment]) -> list[dict[str, Any]]:
    """One after another, on all workers of a job."""
    torch.set_num_threads(1)
    return [run_job(*experiment) for experiment in experiments]


def run_job(name: str, layers: int, dropout: float, asked: dict[str, Any]) -> dict[str, Any]:
    options = ls.CommunicationOptions(lost_after_s=60)
    strategy = ls.ParallelStrategy(seed=7, communication=options, **asked)
    with closing(strategy), strategy.scope():
        model = ls.Model(strategy.parallelize(build(name, layers=layers, dropout=dropout)))
        model.compile(OPTIMIZERS[name], loss, accumulate=2)
        tables: list[Any] = []
        watch = ls.LambdaCallback(on_train_batch_end=lambda *_: tables.append(model.module.pipeline_trace()))
        history = model.fit(batches(), callbacks=[watch], verbose=0)
        return {
            "held": sum(parameter.numel() for parameter in model.module.parameters()),
            "loss": history.history["loss"],
            "weights": {key: value.clone() for key, value in model.state_dict().items()},
            "evaluate": model.evaluate(batches(), verbose=0)["loss"],
            "predict": model.predict([x for x, _ in batches()])["logits"],
            "table": tables[0],
        }


def one_device(name: str, layers: int) -> dict[str, Any]:
    """The same fit, by hand."""
    module = build(name, layers=layers)
    optimizer = OPTIMIZERS[name](module.parameters())
    total, count, cycle = 0.0, 0, 0
    for index, (x, y) in enumerate(batches()):
        values = loss(module(**x), y)
        values.sum().backward()
        cycle += values.numel()
        total, count = total + values.sum().item(), count + values.numel()
        if index % 2:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= cycle
            optimizer.step()
            optimizer.zero_grad()
            cycle = 0
    module.eval()
    with torch.no_grad():
        every = [loss(module(**x), y).flatten() for x, y in batches()]
        return {
            "loss": [total / count],
            "weights": module.state_dict(),
            "evaluate": torch.cat(every).mean().item(),
            "predict": torch.cat([module(**x).logits for x, _ in batches()]),
            "size": sum(parameter.numel() for parameter in module.parameters()),
        }
