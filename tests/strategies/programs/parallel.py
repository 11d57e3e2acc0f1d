"""What the workers of test_parallel.py compute, on any grid; and the same by hand on one device."""

from __future__ import annotations

import gc
import hashlib
import runpy
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls

_MODELS = runpy.run_path(str(Path(__file__).with_name("small_models.py")), run_name="small_models")
SIZES = (9, 8, 1, 5)  # the small ones leave microbatches, and whole replicas, without rows
WORDS, OPTIMIZERS, loss = (_MODELS[name] for name in ("WORDS", "OPTIMIZERS", "loss"))
build, batches = _MODELS["build"], partial(_MODELS["batches"], SIZES)
CLIP = 0.5
PLACES = {
    "bert": ("bert.encoder.layer", "attention.self.query", "output.dense"),
    "gpt2": ("transformer.h", "attn.c_attn", "mlp.c_proj"),
}
"""Of models: the layers, and in each a place where tensor ranks hold parts, and one where all hold the same."""


class Accuracy(MulticlassAccuracy):
    def update(self, outputs: Any, targets: Tensor) -> None:
        super().update(outputs.logits.flatten(0, 1), targets.flatten())


def metrics() -> dict[str, Any]:
    return {"accuracy": Accuracy(WORDS, average="micro")}


def run_jobs(
    experiments: list[tuple[str, dict[str, Any]]], dropout: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One grid after another; those of ``dropout`` twice each."""
    torch.set_num_threads(1)
    gc.freeze()  # else each collection looks through all that was imported
    return [run_job(name, grid) for name, grid in experiments] + [
        dropped(name, grid) for name, grid in dropout for _ in range(2)
    ]


def depth(grid: dict[str, Any]) -> int:
    """How many layers the model has that a grid divides: as few as there are stages, and two."""
    stages = grid.get("pipeline", 1) * (1 if grid.get("schedule", "1f1b") in ("1f1b", "gpipe") else 2)
    return max(2, stages)


def threads_of_groups() -> int:
    """How many threads gloo has in this process."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # one that ended meanwhile
            found += "gloo" in (task / "comm").read_text()
    return found


def run_job(name: str, grid: dict[str, Any]) -> dict[str, Any]:
    before = threads_of_groups()
    strategy = ls.ParallelStrategy(seed=7, communication=ls.CommunicationOptions(lost_after_s=60), **grid)
    with strategy.scope():
        model = ls.Model(strategy.parallelize(build(name, layers=depth(grid))))
        held = sum(parameter.numel() for parameter in model.module.parameters())
        model.compile(OPTIMIZERS[name], loss, metrics=metrics(), accumulate=2, clip_norm=CLIP)
        history = model.fit(batches(), validation_data=batches()[:2], epochs=2, verbose=0)
        results: dict[str, Any] = {
            "replicas": strategy.num_replicas_in_sync,
            "held": held,
            "history": history.history,
            "examples": [timing.examples for timing in history.timing],
            "weights": copied(model.state_dict()),
            "gradients": gradients(model),
            "evaluate": model.evaluate(batches(), verbose=0),
            "predict": model.predict([x for x, _ in batches()])["logits"],
        }
        model.load_state_dict({key: value * 2 for key, value in results["weights"].items()})
        results["doubled"] = copied(model.state_dict())
        alike = strategy.workers.all_gather_numbers("alike", [int(digest(results)[:12], 16)])
        results["all alike"] = len(set(alike)) == 1
    strategy.close()
    del model, strategy
    gc.collect()
    results["threads left"] = threads_of_groups() - before
    return results


def gradients(model: ls.Model) -> dict[str, Tensor]:
    """The whole model's at its weights of now, by name, as an optimizer's own hook sees them before the update."""
    before = copied(model.state_dict())
    seen: dict[int, Tensor] = {}

    def shows_them(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, 1.0)
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: seen.update({id(each): each.grad.clone() for each in trained}))
        return optimizer

    model.compile(shows_them, loss, metrics=metrics())
    model.fit(batches()[:1], verbose=0)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.copy_(seen[id(parameter)])
    gathered = copied(model.state_dict())  # a state is gathered whole, whatever its tensors hold
    model.load_state_dict(before)
    return gathered


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def digest(results: dict[str, Any]) -> str:
    """Of what is the same on every worker."""
    found = hashlib.sha256()
    shared = {key: value for key, value in results.items() if key not in ("held", "history")}
    for leaf in torch.utils._pytree.tree_leaves(shared):
        found.update(leaf.contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return found.hexdigest()


def dropped(name: str, grid: dict[str, Any]) -> dict[str, Any]:
    """The weights, and what each worker's whole parameters and draws are."""
    strategy = ls.ParallelStrategy(seed=7, communication=ls.CommunicationOptions(lost_after_s=60), **grid)
    draws: dict[str, list[float]] = {"part": [], "whole": []}
    with strategy.scope():
        module = build(name, layers=depth(grid), dropout=0.3)
        layers, part, whole = PLACES[name]
        for layer in module.get_submodule(layers):
            for kind, place in (("part", part), ("whole", whole)):
                layer.get_submodule(place).register_forward_hook(
                    lambda *_, kind=kind: draws[kind].append(torch.rand(()).item())
                )
        model = ls.Model(strategy.parallelize(module))
        model.compile(OPTIMIZERS[name], loss)
        model.fit(batches(), epochs=1, verbose=0)
        held = model.module
        alike = [p for p in held.parameters() if id(p) not in held.divided]
        seen = {
            "weights": copied(model.state_dict()),
            "whole": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in alike)).hexdigest(),
            "draws": draws,
        }
    everyones = strategy._job.workers.all_gather_bytes("seen", repr([seen["whole"], draws]).encode())
    strategy.close()
    return {"weights": seen["weights"], "everyones": [eval(each.decode()) for each in everyones]}


def one_device(name: str, layers: int) -> dict[str, Any]:
    """The same fit, by hand."""
    module = build(name, layers=layers)
    optimizer = OPTIMIZERS[name](module.parameters())
    losses, accuracies = [], []
    for _ in range(2):
        total, count, right = 0.0, 0, 0
        cycle = 0
        for index, (x, y) in enumerate(batches()):
            outputs = module(**x)
            values = loss(outputs, y)
            values.sum().backward()
            cycle += values.numel()
            total, count = total + values.sum().item(), count + values.numel()
            right += int((outputs.logits.argmax(-1) == y).sum())
            if index % 2:
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= cycle
                nn.utils.clip_grad_norm_(module.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                cycle = 0
        losses.append(total / count)
        accuracies.append(right / count)
    x, y = batches()[0]
    values = loss(module(**x), y)
    values.sum().backward()  # and not of the mean: llama's norms round gradients to float32 on the way
    shown = {key: value.grad / values.numel() for key, value in module.named_parameters(remove_duplicate=False)}
    module.eval()
    with torch.no_grad():
        predicted = [module(**x).logits for x, _ in batches()]
        values = torch.cat([loss(module(**x), y).flatten() for x, y in batches()])
    return {
        "loss": losses,
        "accuracy": accuracies,
        "weights": module.state_dict(),
        "gradients": shown,
        "predict": torch.cat(predicted),
        "evaluate": values.mean().item(),
        "size": sum(parameter.numel() for parameter in module.parameters()),
    }
