"""What can be captured, and what a captured step assumes: addresses, settings, and the absence of hooks.

A replay sees new values at the same addresses. It does not see new tensors, a new ``p`` of a dropout, or another
training mode. So all of it is compared before every replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from lockstep.replicas.device.driver import DeviceDriver, driver_of
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup

_PLAIN = (bool, int, float, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PRECISIONS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn,
)


class NotCapturableError(Exception):
    """Steps cannot be captured. The message says why, and what to do if something can be done. It never leaves fit."""


def driver_for(strategy: Strategy) -> DeviceDriver | None:
    """The driver of the GPU that all replicas are on; None if they are on CPUs. Several GPUs are not capturable."""
    devices = strategy.devices
    driver = driver_of(devices[0])
    if driver is None:
        return None
    if not strategy.workers.is_single:
        raise NotCapturableError("several workers exchange gradients, and a CUDA graph cannot wait for another process")
    if len({device.physical.name for device in devices}) > 1:
        raise NotCapturableError("the replicas are on several GPUs, and only those of one GPU are captured together")
    return driver


def check_setup(setup: TrainSetup) -> None:
    """Raises a NotCapturableError if the steps of a setup cannot be captured."""
    if setup.config.precision == "fp16":
        raise NotCapturableError('precision="fp16" asks on the host whether gradients overflowed; "bf16" does not')
    if setup.module.pipeline is not None or setup.module.shards_weights:
        raise NotCapturableError("the model is divided among workers")
    for part in setup.module.module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise NotCapturableError(
                f"{type(part).__name__} with sparse=True has gradients of changing size; use sparse=False"
            )


def check_hooks(module: nn.Module) -> None:
    """Raises a NotCapturableError if there are hooks: they would run once, during the capture, and never again."""
    hooked = ["all modules"] if any(_global_hooks()) else []
    hooked += [f"a {type(part).__name__}" for part in module.modules() if any(_hooks_of(part))]
    weights = module.parameters()
    hooked += ["a parameter" for each in weights if each._backward_hooks or each._post_accumulate_grad_hooks]
    if hooked:
        raise NotCapturableError(f"the hooks of {hooked[0]} would run once, during the capture; remove them")


class StepGuards:
    """A snapshot of everything outside its inputs that a captured step depends on.

    Only the user's own module is compared: what is set there reaches the other copies at the next run.

    Args:
        setup: the setup of the step.
        free: the names of hyperparameters that may change, because the captured step reads them from tensors.
    """

    def __init__(self, setup: TrainSetup, free: Iterable[str]) -> None:
        self._optimizer = setup.optimizer
        self._free = frozenset(["params", *free])
        own = setup.module.module
        self._modules = [_ModuleGuard(part) for part in own.modules()]
        self._tensors = [*own.parameters(), *own.buffers()]
        self._hooks = [*_global_hooks(), *(hooks for part in own.modules() for hooks in _hooks_of(part))]
        self._hooked = any(self._hooks)
        self._states = self._states_now()
        self._addresses = self._addresses_now()
        self._settings = self._settings_now()

    def change(self) -> str | None:
        """What has changed; None if nothing has."""
        for module in self._modules:
            if not module.holds:
                return f"{type(module.part).__name__} has other attributes, parameters or children than before"
        states = self._states_now()
        if len(states) != len(self._states) or not all(map(is_, states, self._states)):
            return "the state of the optimizer was loaded"
        if self._addresses_now() != self._addresses:
            return "weights, buffers or the state of the optimizer have moved in memory"
        if self._settings_now() != self._settings or any(self._hooks) != self._hooked:
            return "settings of the optimizer, of precision or of autograd have changed, or hooks"
        return None

    def _states_now(self) -> list[Any]:
        """The states of the optimizers of all storages; loading a state replaces all of them together."""
        return [] if self._optimizer is None else [each.state for each in self._optimizer.storages.every]

    def _addresses_now(self) -> list[int]:
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        for state in self._states[:1]:
            values = (value for each in state.values() for value in each.values())
            addresses += [value.data_ptr() for value in values if isinstance(value, torch.Tensor)]
        return addresses

    def _settings_now(self) -> list[Any]:
        settings: list[Any] = [tensor.requires_grad for tensor in self._tensors]
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        settings += [value for group in groups for name, value in group.items() if name not in self._free]
        return [
            *settings,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
            # Read one by one: torch's older names for them raise errors once a program has set one of these.
            *(each.fp32_precision for each in _PRECISIONS),
        ]


class _ModuleGuard:
    """One module: its plain attributes, and which tensors and children it has.

    Compared before every replay, so it takes few steps of Python: about 2 microseconds.
    """

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        plain = [name for name, value in part.__dict__.items() if isinstance(value, _PLAIN)]
        self._read = itemgetter(*plain)  # at least two: every module has `training` and more of torch's own
        self._plain = self._read(part.__dict__)
        self._attributes = len(part.__dict__)
        self._held = [
            (members, tuple(members.values())) for members in (part._parameters, part._buffers, part._modules)
        ]

    @property
    def holds(self) -> bool:
        """Whether nothing has changed."""
        attributes = self.part.__dict__
        if len(attributes) != self._attributes or self._read(attributes) != self._plain:
            return False
        return all(len(now) == len(before) and all(map(is_, now.values(), before)) for now, before in self._held)


def _hooks_of(part: nn.Module) -> list[Any]:
    return [part.__dict__[name] for name in _HOOKS]


def _global_hooks() -> list[Any]:
    return [vars(torch.nn.modules.module)[f"_global{name}"] for name in _HOOKS]
