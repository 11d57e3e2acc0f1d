"""The small steps of the suite ``steps``: models, batches and optimizer. Needs torch alone, as its programs have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

ROWS = 32
"""Rows of a global batch."""
RATE = 1e-3
"""Adam's."""
BLOCKS = "blocks"
"""The workload that is divided among workers."""
STEP_PARTS = "parts"
"""The workload in which a step ends after one of its parts."""
PARTS = ("run", "forward", "backward", "update", "data")
"""In their order: an empty step, the model, loss and gradients, the optimizer, last a batch to divide for each step."""
STEP_PART = "STEP_PART"
"""The environment variable that names the last part of a step that is to run."""
_LAYERS, _BLOCKS = 5, 4
_DIFFERENT_BATCHES = 4


def new_mlp(width: int) -> nn.Sequential:
    """Linear layers, with a ReLU after each."""
    return nn.Sequential(*(each for _ in range(_LAYERS) for each in (nn.Linear(width, width), nn.ReLU())))


def new_blocks(width: int) -> nn.Sequential:
    """Blocks of two linear layers with a ReLU between them."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(_BLOCKS))
    )


WIDTHS: Mapping[str, int] = {"width-64": 64, "width-256": 256, STEP_PARTS: 64, BLOCKS: 64}
"""Numbers in a row, of inputs and of targets, by workload."""
MODULES: Mapping[str, Callable[[], nn.Sequential]] = {
    name: partial(new_blocks if name == BLOCKS else new_mlp, width) for name, width in WIDTHS.items()
}


def small_batches(name: str, number: int) -> list[tuple[Tensor, Tensor]]:
    """So many batches of a workload, in which a few different ones come again and again."""
    random = torch.Generator().manual_seed(1)
    shape = (ROWS, WIDTHS[name])
    made = [
        (torch.randn(shape, generator=random), torch.rand(shape, generator=random)) for _ in range(_DIFFERENT_BATCHES)
    ]
    return [made[index % len(made)] for index in range(number)]


def fused_adam(module: nn.Module) -> torch.optim.Adam:
    """The optimizer of every contender on torch."""
    return torch.optim.Adam(module.parameters(), RATE, fused=True)
