"""Everything that a step of training changes, noted before trial steps and put back after them, bit for bit.

Copies are kept in host memory: on a GPU they must not take what the trial is to measure.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable

_Undo = Callable[[], None]


class TrialState:
    """What trial steps may change: weights, buffers, gradients, training mode, optimizers, variables, random numbers.

    The replicas' own random numbers are the strategy's business.

    Args:
        modules: the strategy's mirrored modules.
        optimizers: its mirrored optimizers.
        variables: its variables.
    """

    def __init__(
        self,
        modules: Iterable[MirroredModule],
        optimizers: Iterable[MirroredOptimizer],
        variables: Iterable[MirroredVariable],
    ) -> None:
        self._undo: list[_Undo] = [_random_numbers()]
        for module in modules:
            self._undo += _module(module)
        for optimizer in optimizers:
            self._undo.append(_optimizer(optimizer))
        for variable in variables:
            self._undo += [_tensor(value) for value in variable.values]

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes everything what it was. May be called more than once."""
        for undo in self._undo:
            undo()


class _Kept:
    """A tensor and a copy of what it held. Not a tensor itself, so that it is a leaf of any structure."""

    def __init__(self, live: torch.Tensor) -> None:
        self.live = live
        self._held = live.detach().to("cpu", copy=True)

    def put_back(self) -> torch.Tensor:
        self.live.detach().copy_(self._held)
        return self.live


def _tensor(live: torch.Tensor) -> _Undo:
    kept = _Kept(live)

    def undo() -> None:
        kept.put_back()

    return undo


def _module(module: MirroredModule) -> list[_Undo]:
    # The replicas' copies may share the storage of their weights: each storage is kept once.
    every = [parameter for duplicate in module.copies for parameter in duplicate.parameters()]
    weights = {(weight.data_ptr(), weight.shape): weight for weight in every}
    parts = [part for duplicate in module.copies for part in duplicate.modules()]
    return [
        *map(_tensor, weights.values()),
        *map(_gradient, every),
        *(_buffer(part, name, buffer) for part in parts for name, buffer in part.named_buffers(recurse=False)),
        *(_mode(part) for part in [module, *parts]),
    ]


def _gradient(parameter: nn.Parameter) -> _Undo:
    kept = None if parameter.grad is None else _Kept(parameter.grad)

    def undo() -> None:
        parameter.grad = None if kept is None else kept.put_back()

    return undo


def _buffer(part: nn.Module, name: str, buffer: torch.Tensor) -> _Undo:
    kept = _Kept(buffer)

    def undo() -> None:
        setattr(part, name, kept.put_back())  # a module may give a buffer a new tensor

    return undo


def _mode(part: nn.Module) -> _Undo:
    training = part.training

    def undo() -> None:
        part.training = training

    return undo


def _optimizer(optimizer: MirroredOptimizer) -> _Undo:
    state = {parameter: _kept(of_parameter) for parameter, of_parameter in optimizer.state.items()}
    groups = [_kept({name: value for name, value in g.items() if name != "params"}) for g in optimizer.param_groups]

    def undo() -> None:
        optimizer.state.clear()
        optimizer.state.update({parameter: _put_back(kept) for parameter, kept in state.items()})
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **_put_back(kept)})
        optimizer.align_copies()

    return undo


def _kept(structure: Any) -> Any:
    return tree_map(lambda leaf: _Kept(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), structure)


def _put_back(structure: Any) -> Any:
    return tree_map(lambda leaf: leaf.put_back() if isinstance(leaf, _Kept) else copy.deepcopy(leaf), structure)


def _random_numbers() -> _Undo:
    """What torch, Python, and NumPy where it is loaded, draw next."""
    numpy = sys.modules.get("numpy")
    of_cpu, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_gpus = torch.cuda.get_rng_state_all() if in_use else []

    def undo() -> None:
        torch.set_rng_state(of_cpu)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)

    return undo
