"""What a recorded step takes for granted, besides its inputs: addresses, settings, and the absence of hooks.

New values at the same addresses are seen by a replay; new tensors are not, nor are a dropout's new ``p`` or another
training mode. So all of it is looked at before every replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from lockstep.train.graphs.unfit import UnfitError
from lockstep.train.job import Job

_PLAIN = (bool, int, float, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class Standing:
    """A snapshot of all that a recorded step of a job has in it as it is now.

    Args:
        job: whose step.
        free: the names of hyperparameters that may change, because the recorded step reads them from tensors.
    """

    def __init__(self, job: Job, free: Iterable[str]) -> None:
        self._job = job
        self._free = frozenset(["params", *free])
        # Attributes of the user's module alone: what is set on it reaches the other copies at the next run, and what
        # is set on those is nobody's.
        self._parts = [_Part(part) for part in job.module.module.modules()]
        every = [[*copy.parameters(), *copy.buffers()] for copy in job.module.copies]
        self._own = every[0]
        self._tensors = [tensor for copy in every for tensor in copy]
        self._addresses = self._addresses_now()
        self._settings = self._settings_now()

    def change(self) -> str | None:
        """What is another now; None if nothing is."""
        for part in self._parts:
            if not part.stands:
                return f"a {part.name} has other attributes, parameters or children than before"
        if self._addresses_now() != self._addresses:
            return "weights, buffers or the state of the optimizer are in other memory than before"
        if self._settings_now() != self._settings:
            return "settings of the optimizer, of precision or of autograd are others than before"
        return None

    def _addresses_now(self) -> list[int]:
        every = [tensor.data_ptr() for tensor in self._tensors]
        every += [
            value.data_ptr()
            for optimizer in self._optimizers()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return every

    def _settings_now(self) -> list[Any]:
        every: list[Any] = [tensor.requires_grad for tensor in self._own]
        for optimizer in self._optimizers()[:1]:
            every += [
                value for group in optimizer.param_groups for name, value in group.items() if name not in self._free
            ]
        every += [
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.allow_tf32,
        ]
        return every

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Asked for anew every time: those of other storages are made anew when state is loaded."""
        return () if self._job.optimizer is None else self._job.optimizer.of_storages


class _Part:
    """One module of the user's: its plain attributes, and which tensors and children it has."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._plain = {name: value for name, value in part.__dict__.items() if isinstance(value, _PLAIN)}
        self._held = self._held_now()

    @property
    def name(self) -> str:
        """Its class, for messages."""
        return type(self._part).__name__

    @property
    def stands(self) -> bool:
        """Whether all is as it was."""
        attributes, held = self._part.__dict__, self._held_now()
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        return same and all(attributes.get(name) == value for name, value in self._plain.items())

    def _held_now(self) -> Sequence[object]:
        part = self._part
        return [*part._parameters.values(), *part._buffers.values(), *part._modules.values()]


def refuse_hooks(module: nn.Module) -> None:
    """Finds Python code that would run once, when the step is recorded, and never again.

    Raises:
        UnfitError: there is some.
    """
    everywhere = vars(torch.nn.modules.module)
    if any(everywhere.get(name) for name in _GLOBAL_HOOKS):
        raise UnfitError("hooks on all modules would run once, while the step is recorded, and never again")
    for part in module.modules():
        if any(part.__dict__.get(name) for name in _HOOKS):
            raise UnfitError(
                f"the hooks of a {type(part).__name__} would run once, while the step is recorded; remove them"
            )
    for parameter in module.parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnfitError("the hooks of a parameter would run once, while the step is recorded; remove them")
