"""Hooks that the user has registered on parameters: they see the sum of all replicas' gradients, once.

    on one device    backward -> hook(gradient) ------------------------------> update
    in replicas      backward -> parts of it -> [sum, division] -> hook(sum) -> clipping, update

They stay where torch keeps them, each in a wrapper that does nothing in a run; so ``handle.remove()`` works, and
outside replicas they act as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.mirroring.exchange import Copies


class EngineHook:
    """A hook that this package has registered on a parameter, to be told from the user's.

    Args:
        call: called with the gradient or the parameter; its result is ignored.
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, given: torch.Tensor) -> None:
        self._call(given)


class HeldHook:
    """A hook of the user's, on a parameter of the user's module.

    Args:
        hook: the user's.
        parameter: whose.

    Attributes:
        held: whether a run is under way, in which it waits for the sum.
        stepped: whether a mirrored optimizer will sum the parameter's gradients.
        calls: how many backward passes it has let pass since the last update.
    """

    def __init__(self, hook: Callable[..., Any], parameter: nn.Parameter) -> None:
        self.hook = hook
        self._parameter = ref(parameter)
        self.held = False
        self.stepped = False
        self.calls = 0

    def __call__(self, given: torch.Tensor) -> Any:
        """From torch, in a backward pass: the user's outside runs, nothing in them."""
        if not self.held:
            return self.hook(given)
        if not self.stepped:
            raise UsageError(
                f"a parameter of shape {tuple(given.shape)} has a hook ({_name(self.hook)}), and no mirrored optimizer "
                "sums its gradients, so that the hook would see one replica's; call optimizer = "
                "strategy.mirror(optimizer) over it, or remove the hook"
            )
        parameter = self._parameter()
        with torch._C.DisableTorchFunction():
            fresh = parameter is not None and given is not parameter and parameter.grad is None
        self.calls = 1 if fresh else self.calls + 1
        return None


def hold(parameters: Iterable[nn.Parameter], stepped: Callable[[], set[int]]) -> list[HeldHook]:
    """Before a run: the user's hooks on parameters wait from now on, those registered since the last run too.

    Args:
        parameters: of the users' modules.
        stepped: gives the ids of those whose gradients a mirrored optimizer sums; asked only where there are hooks.
    """
    held: list[HeldHook] = []
    known: set[int] | None = None
    for parameter in parameters:
        kinds: tuple[Any, ...] = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        for hooks in kinds:
            for key, hook in list(hooks.items()) if hooks else ():
                if isinstance(hook, EngineHook):
                    continue
                known = stepped() if known is None else known
                each = hooks[key] = hook if isinstance(hook, HeldHook) else HeldHook(hook, parameter)
                each.held, each.stepped = True, id(parameter) in known
                held.append(each)
    return held


def release(held: Iterable[HeldHook]) -> None:
    """After a run: outside replicas hooks act as they do without this package."""
    for each in held:
        each.held = False


def has_waiting(parameter: torch.Tensor) -> bool:
    """Whether the parameter has hooks that wait."""
    on_gradient, on_parameter = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return bool((on_gradient and _waiting(on_gradient)) or (on_parameter and _waiting(on_parameter)))


def hooked(parameters: Sequence[Copies]) -> list[Copies]:
    """Those of an optimizer's parameters that have hooks which wait."""
    return [copies for copies in parameters if has_waiting(copies[0])]


def forget(parameters: Sequence[Copies]) -> None:
    """The gradients were cleared."""
    for copies in hooked(parameters):
        for each in (*_waiting(copies[0]._backward_hooks), *_waiting(copies[0]._post_accumulate_grad_hooks)):
            each.calls = 0


def run_hooks(parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
    """Runs what waits, on the sums that the first leader holds, and gives the other leaders what comes of it.

    Called once, while all replicas wait.

    Args:
        parameters: as ``hooked`` gives them.
        leaders: of the storages of the weights.

    Raises:
        UsageError: several backward passes were added up, of which the hook would have seen each.
    """
    first, *others = leaders
    for copies in parameters:
        parameter = copies[first]
        on_gradient, on_parameter = _waiting(copies[0]._backward_hooks), _waiting(copies[0]._post_accumulate_grad_hooks)
        for each in (*on_gradient, *on_parameter):
            if each.calls > 1:
                raise UsageError(
                    f"{each.calls} backward passes have gone through a parameter of shape {tuple(parameter.shape)} "
                    f"that has a hook ({_name(each.hook)}) since the last update; on one device it sees each by "
                    "itself, and in replicas only their sum is known; remove the hook, and change the gradients after "
                    "optimizer.sum_gradients(), before optimizer.step()"
                )
            each.calls = 0
        if parameter.grad is None:
            continue
        with torch.no_grad():
            for each in on_gradient:
                changed = each.hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed
            for each in on_parameter:
                each.hook(parameter)
            for leader in others:
                gradient, other = parameter.grad, copies[leader]
                other.grad = None if gradient is None else gradient.to(other.device, copy=True)


def _waiting(hooks: Any) -> list[HeldHook]:
    return [each for each in hooks.values() if isinstance(each, HeldHook) and each.held] if hooks else []


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
