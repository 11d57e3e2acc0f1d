"""The path from ``fit`` to the module's forward on a CPU is short, and does not pass through the CUDA-graph code."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from lockstep.train.model import Model

MOST_FRAMES = 12  # of which 4 are torch's: two for each call of a module, the mirrored one and the user's own


class Recording(nn.Module):
    """Keeps the frames of its first call, from its own to the outermost."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.frames: list[tuple[str, str]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.frames:
            self.frames = [(frame.function, frame.filename) for frame in inspect.stack()]
        out: Tensor = self.inner(x)
        return out


def test_fit_reaches_forward_in_few_frames():
    module = Recording()
    model = Model(module)
    model.compile(optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), loss=nn.functional.mse_loss)
    model.fit([(torch.zeros(4, 2), torch.zeros(4, 1))], verbose=0)
    functions = [function for function, _ in module.frames]
    path = module.frames[: functions.index("fit") + 1]  # forward, ..., fit
    assert len(path) <= MOST_FRAMES, path
    assert not any("cuda_graphs" in file for _, file in path)
