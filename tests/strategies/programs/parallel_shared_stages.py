"""What the workers of test_parallel_shared_stages.py compute: pipelines whose weights replicas share."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

import lockstep as ls

_FOLDER = Path(__file__).parent
_GRIDS = runpy.run_path(str(_FOLDER / "parallel.py"), run_name="parallel")
_CHECKPOINTS = runpy.run_path(str(_FOLDER / "parallel_checkpoints.py"), run_name="parallel_checkpoints")
one_device, depth, build, OPTIMIZERS = (_GRIDS[name] for name in ("one_device", "depth", "build", "OPTIMIZERS"))
trained, trained_by_hand, pick, plain = (_CHECKPOINTS[name] for name in ("trained", "by_hand", "pick", "plain"))
LAYERS = 4  # of what is watched: two of each stage
SHARED = {"data": 2, "pipeline": 2, "shard_parameters": True}


def run_jobs(
    experiments: list[tuple[str, dict[str, Any]]],
    dropout: list[tuple[str, dict[str, Any]]],
    watched: list[dict[str, Any]],
) -> list[Any]:
    """What grids compute; those of ``dropout`` twice each; and what those of ``watched`` gather at a time."""
    found: list[Any] = _GRIDS["run_jobs"](experiments, dropout)
    return found + [gathered(grid) for grid in watched]


def gathered(grid: dict[str, Any]) -> dict[str, Any]:
    """How many numbers of the model are on a worker when one of its layers computes, and how many are of its own."""
    seen: dict[str, list[int]] = {"forward": [], "backward": []}
    strategy = ls.ParallelStrategy(seed=7, **grid)
    with strategy.scope():
        module = build("bert", layers=LAYERS)
        model = ls.Model(strategy.parallelize(module))
        for layer in module.bert.encoder.layer:
            if any(True for _ in layer.parameters()):
                dense = layer.output.dense
                dense.register_forward_hook(lambda *_: seen["forward"].append(whole(module)))
                dense.register_full_backward_hook(lambda *_: seen["backward"].append(whole(module)))
        model.compile(OPTIMIZERS["bert"], _GRIDS["loss"])
        x, y = _GRIDS["batches"]()[0]
        model.fit([(x, y)], verbose=0)
        model.evaluate([(x, y)], verbose=0)
        layers = [
            sum(each.numel() for each in layer.parameters())
            for layer in build("bert", layers=LAYERS).bert.encoder.layer
        ]
        found = {
            "layer": layers[0],
            "seen": seen,
            "afterwards": whole(module),
            "held": sum(each.numel() for each in model.module.parameters()),
        }
    strategy.close()
    return found


def whole(module: nn.Module) -> int:
    """The numbers of what is gathered now."""
    return sum(each.numel() for each in module.parameters() if not isinstance(each, DTensor))


def move(folder: str) -> dict[str, Any]:
    """Trainings on shared stages that go on from where they stood, with another schedule, and from one device."""
    on, results = _CHECKPOINTS["on"], {}
    with on(**SHARED) as strategy:
        results["undisturbed"] = plain(trained("gpt2", folder, kept_in="kept"))
        pick(strategy, folder, "kept", "shared")
    with on(**SHARED):
        results["again"] = plain(trained("gpt2", folder, resumed_from="shared"))
    with on(**SHARED, schedule="zero_bubble_v"):
        results["on the v"] = plain(trained("gpt2", folder, resumed_from="shared"))
    with on(**SHARED):
        results["from one"] = plain(trained("gpt2", folder, resumed_from="one"))
    return results
