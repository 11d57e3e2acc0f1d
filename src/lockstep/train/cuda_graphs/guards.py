"""What a recorded step takes for granted, besides its inputs: addresses, settings, and the absence of hooks.

New values at the same addresses are seen by a replay; new tensors are not, nor are a dropout's new ``p`` or another
training mode. So all of it is looked at before every replay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from lockstep.replicas.device.driver import DeviceDriver, driver_of
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup

_LOG = logging.getLogger("lockstep")


class NotCapturableError(Exception):
    """Steps cannot be recorded; the message says why, and what to do where there is something. Never leaves fit."""


class Reasons:
    """Tells the log why steps are not recorded, each reason once."""

    def __init__(self) -> None:
        self._told: list[str] = []

    @property
    def told(self) -> tuple[str, ...]:
        """All reasons so far, in order."""
        return tuple(self._told)

    def tell(self, reason: str) -> None:
        """Logs a reason that has not been told before."""
        if reason not in self._told:
            self._told.append(reason)
            _LOG.info("no CUDA graphs of whole steps: %s", reason)


def driver_for(strategy: Strategy) -> DeviceDriver | None:
    """The driver of the one device that all replicas are on; None where there is no device that records.

    Raises:
        NotCapturableError: there is one, but not one for all.
    """
    devices = strategy.devices
    driver = driver_of(devices[0])
    if driver is None:
        return None
    if not strategy.workers.is_single:
        raise NotCapturableError(
            "several workers exchange gradients, and a recorded step cannot wait for another process"
        )
    if len({device.physical.name for device in devices}) > 1:
        raise NotCapturableError("the replicas are on several GPUs, and only those of one GPU are recorded together")
    return driver


def refuse(setup: TrainSetup) -> None:
    """Finds what cannot be recorded in a setup.

    Raises:
        NotCapturableError: there is something.
    """
    if setup.config.precision == "fp16":
        raise NotCapturableError('precision="fp16" asks on the host whether gradients overflowed; "bf16" does not')
    if setup.module.pipeline is not None or setup.module.shares_weights:
        raise NotCapturableError("the model is divided among workers")
    for part in setup.module.module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise NotCapturableError(
                f"a {type(part).__name__} with sparse=True has gradients of changing size; use sparse=False"
            )


_PLAIN = (bool, int, float, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PRECISIONS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn,
)
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


class StepGuards:
    """A snapshot of all that a recorded step of a setup has in it as it is now.

    Of the modules it is the user's own that is looked at: what is set there reaches the other copies at the next run,
    and what is set on those is nobody's.

    Args:
        setup: whose step.
        free: the names of hyperparameters that may change, because the recorded step reads them from tensors.
    """

    def __init__(self, setup: TrainSetup, free: Iterable[str]) -> None:
        self._setup = setup
        self._free = frozenset(["params", *free])
        own = setup.module.module
        self._parts = [_ModuleGuard(part) for part in own.modules()]
        self._tensors = [*own.parameters(), *own.buffers()]
        self._hooks = [*_global_hooks(), *(hooks for part in own.modules() for hooks in _hooks_of(part))]
        self._hooked = any(self._hooks)
        self._states = self._states_now()
        self._addresses = self._addresses_now()
        self._settings = self._settings_now()

    def change(self) -> str | None:
        """What is another now; None if nothing is."""
        for part in self._parts:
            if not part.stands:
                return f"a {part.name} has other attributes, parameters or children than before"
        states = self._states_now()
        if len(states) != len(self._states) or not all(map(is_, states, self._states)):
            return "the optimizer's state was loaded"
        if self._addresses_now() != self._addresses:
            return "weights, buffers or the state of the optimizer are in other memory than before"
        if self._settings_now() != self._settings or any(self._hooks) != self._hooked:
            return "settings of the optimizer, of precision, of autograd, or hooks are others than before"
        return None

    def _states_now(self) -> list[Any]:
        """Those of copies for other storages too: they are made anew, all together, when state is loaded."""
        optimizer = self._setup.optimizer
        return [] if optimizer is None else [each.state for each in optimizer.of_storages]

    def _addresses_now(self) -> list[int]:
        every = [tensor.data_ptr() for tensor in self._tensors]
        for state in self._states[:1]:
            every += [
                value.data_ptr()
                for each in state.values()
                for value in each.values()
                if isinstance(value, torch.Tensor)
            ]
        return every

    def _settings_now(self) -> list[Any]:
        every: list[Any] = [tensor.requires_grad for tensor in self._tensors]
        if self._setup.optimizer is not None:
            groups = self._setup.optimizer.param_groups
            every += [value for group in groups for name, value in group.items() if name not in self._free]
        every += [
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
            # One by one: torch's older names for them raise errors where a program has set one of these.
            *(each.fp32_precision for each in _PRECISIONS),
        ]
        return every


class _ModuleGuard:
    """One module of the user's: its plain attributes, and which tensors and children it has.

    Looked at before every replay, so in few steps of Python: some 2 microseconds.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        plain = [name for name, value in part.__dict__.items() if isinstance(value, _PLAIN)]
        self._read = itemgetter(*plain)  # of at least two: every module has its mode, and more of torch's own
        self._plain = self._read(part.__dict__)
        self._named = len(part.__dict__)
        held = (part._parameters, part._buffers, part._modules)
        self._held = [(those, tuple(those.values())) for those in held]

    @property
    def name(self) -> str:
        """Its class, for messages."""
        return type(self._part).__name__

    @property
    def stands(self) -> bool:
        """Whether all is as it was."""
        attributes = self._part.__dict__
        if len(attributes) != self._named or self._read(attributes) != self._plain:
            return False
        return all(len(now) == len(before) and all(map(is_, now.values(), before)) for now, before in self._held)


def _hooks_of(part: nn.Module) -> list[Any]:
    return [part.__dict__[name] for name in _HOOKS]


def _global_hooks() -> list[Any]:
    return [vars(torch.nn.modules.module)[name] for name in _GLOBAL_HOOKS]


def check_hooks(module: nn.Module) -> None:
    """Finds Python code that would run once, when the step is recorded, and never again.

    Raises:
        NotCapturableError: there is some.
    """
    if any(_global_hooks()):
        raise NotCapturableError("hooks on all modules would run once, while the step is recorded, and never again")
    for part in module.modules():
        if any(_hooks_of(part)):
            raise NotCapturableError(
                f"the hooks of a {type(part).__name__} would run once, when the step is recorded; remove them"
            )
    for parameter in module.parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise NotCapturableError("the hooks of a parameter would run once, when the step is recorded; remove them")
