"""Hooks on parameters: those of this package, and the refusal of a user's, which would see one replica's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from lockstep.errors import UsageError


class EngineHook:
    """A hook of this package on a parameter. It holds a bound method weakly, so as not to keep the strategy alive."""

    def __init__(self, call: Callable[..., None], *args: Any) -> None:
        self._call: Callable[[], Any] = WeakMethod(call) if isinstance(call, MethodType) else lambda: call
        self._args = args

    def __call__(self, _: torch.Tensor) -> None:
        call = self._call()
        if call is not None:
            call(*self._args)


def refuse_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Raises a UsageError if a user's hook is on one of these parameters, which several replicas train."""
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            for hook in hooks.values() if hooks else ():
                if not isinstance(hook, EngineHook):
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} has a hook ({name}), which would see one "
                        "replica's gradient and not the sum; remove it, and read or change .grad in the step, between "
                        "backward() and optimizer.step(), where it is the sum over all replicas"
                    )
