"""The parts of a plain PyTorch loop that the single process and DDP share, and the single process itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Batch, Layout, Trial
from lockstep.errors import ConfigError

_LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def memory_format(layout: Layout) -> torch.memory_format:
    """The name that torch has for a layout.

    Raises:
        ConfigError: "auto", which only a strategy understands, or "framework", which is not torch's.
    """
    if layout not in _LAYOUTS:
        raise ConfigError(f"layout={layout!r} is for our strategies; a plain loop takes one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[layout]


def laid_out(batches: Sequence[Batch], layout: Layout) -> list[Batch]:
    """The batches with their pictures in the memory format; other tensors stay as they are."""
    target = memory_format(layout)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=target) if tensor.dim() == 4 else tensor

    return [tree_map_only(Tensor, convert, batch) for batch in batches]


def trained_parameters(module: nn.Module) -> int:
    """How many numbers an optimizer changes: frozen parameters do not count, tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def train(trial: Trial, module: nn.Module, batches: Sequence[Batch], laps: Laps, *, divisor: float) -> None:
    """The usual loop: clear, forward, backward, update.

    Args:
        trial: the work.
        module: in training mode, wrapped for whoever trains it.
        batches: this process's part of each global batch.
        laps: the stopwatch.
        divisor: of the summed loss.
    """
    workload = trial.workload
    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True)
    laps.trained = trained_parameters(module)
    for x, y in batches:
        optimizer.zero_grad()
        total, _ = workload.loss(module(**x) if isinstance(x, dict) else module(x), y)
        loss = total / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        laps.lap(loss.item())


def train_alone(trial: Trial, seat: Seat, laps: Laps) -> None:
    """One process, the whole batch, all cores as intra-op threads."""
    torch.set_num_threads(trial.cores)
    torch.manual_seed(0)
    layout = trial.contender.layout
    module = trial.workload.make_module().train().to(memory_format=memory_format(layout))  # type: ignore[call-overload]
    batches = laid_out(trial.workload.make_batches(laps.total), layout)
    train(trial, module, batches, laps, divisor=trial.workload.count)
