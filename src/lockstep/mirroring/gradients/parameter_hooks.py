"""Hooks that a program registers on parameters, and where they see the gradient of one device.

    fit      backward passes, without them -> sum over replicas, divided once -> hooks -> clip, update
    a loop   one replica: in its backward pass, as torch calls them; several: refused

In a backward pass a hook would see the gradient of one replica's rows, of a microbatch, or of a sum that is not yet
divided; ``clamp`` of such parts is not ``clamp`` of the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.mirroring.gradients.local_sum import Copies, spread
from lockstep.mirroring.partition import PartitionPolicy


class _Switch:
    """Whether updates call the hooks, and backward passes do not."""

    at_updates = False


class HookAtUpdate:
    """Stands for a user's hook in the parameter's dict, where its handle still removes it."""

    def __init__(self, hook: Callable[[Tensor], Any], switch: _Switch) -> None:
        self.hook, self._switch = hook, switch

    def __call__(self, tensor: Tensor) -> Any:
        return None if self._switch.at_updates else self.hook(tensor)


class ParameterHooks:
    """The hooks on the parameters of one optimizer.

    Args:
        parameters: those of the optimizer, each with its copies.
        partition: says which parameter autograd gives the gradient of a weight.
    """

    def __init__(self, parameters: Sequence[Copies], partition: PartitionPolicy) -> None:
        self._parameters, self._partition = parameters, partition
        self._index = {id(copies[0]): index for index, copies in enumerate(parameters)}
        self._hooked: dict[int, tuple[nn.Parameter, ...]] = {}  # by number, the parameters that have the hooks
        self._switch = _Switch()

    @property
    def at_updates(self) -> bool:
        """Whether updates call the hooks, and backward passes do not."""
        return self._switch.at_updates

    @at_updates.setter
    def at_updates(self, value: bool) -> None:
        self._switch.at_updates = value

    @property
    def any(self) -> bool:
        """Whether an update has hooks to call."""
        return self._switch.at_updates and bool(self._hooked)

    def take_all(self) -> None:
        """Takes the hooks of all parameters. Outside replicas only."""
        self._hooked.clear()  # of some they may have been removed
        for copies in self._parameters:
            self.take(copies[0])

    def take(self, weight: nn.Parameter) -> bool:
        """Has updates call the hooks of a parameter from now on; False if it is none of this optimizer's.

        Raises UsageError for a weight of which this worker holds a part.
        """
        index, holders = self._index.get(id(weight)), holders_of(weight, self._partition)
        if index is None:
            return False
        for hooks in (hooks for holder in holders for hooks in (holder._backward_hooks, _post_hooks(holder)) if hooks):
            for key, hook in [pair for pair in hooks.items() if _is_users(pair[1])]:
                refuse_divided(weight, hook, self._partition)
                self._hooked[index] = holders
                # Under its key, by which the handle that the program has got removes it.
                if not isinstance(hook, HookAtUpdate):
                    hooks[key] = HookAtUpdate(hook, self._switch)
        return True

    @torch.no_grad()
    def call(self, leaders: Sequence[int]) -> None:
        """Calls them with the first leader's gradients, the sums; all leaders get the results. Called once."""
        first, *followers = leaders
        for index, holders in self._hooked.items():
            weight = self._parameters[index][first]
            if weight.grad is None:
                continue
            hooks = [_unwrapped(hook) for holder in holders for hook in _users(holder._backward_hooks)]
            weight.grad = _through(hooks, weight.grad)
            called = [_call_post_hooks(holder, weight) for holder in holders]
            for leader in followers if any(called) else ():  # such a hook may be an optimizer of its own
                self._parameters[index][leader].copy_(weight)
        spread([self._parameters[index] for index in self._hooked], leaders)


def holders_of(weight: nn.Parameter, partition: PartitionPolicy) -> tuple[nn.Parameter, ...]:
    """The parameters that may have hooks for a weight, in the order of their calls."""
    source = partition.source_of(weight)
    return (weight,) if source is weight else (source, weight)


def call_in_backward(weight: nn.Parameter, gradient: Tensor, divided: bool) -> None:
    """Adds to a weight the gradient that its source in a part has got, by the weight's hooks, as autograd does."""
    users: list[Any] = []
    for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks):
        for hook in hooks.values() if hooks else ():
            # As ``_is_users``, written out: this is done for each weight and microbatch of a divided model.
            if type(hook) is HookAtUpdate or not type(hook).__module__.startswith("lockstep."):
                users.append(hook)
    if divided and users:
        raise divided_error(weight, users[0])
    if users:
        gradient = _through(_users(weight._backward_hooks), gradient)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
    for hook in _users(_post_hooks(weight)) if users else ():
        hook(weight)


def _through(hooks: Iterable[Callable[[Tensor], Any]], gradient: Tensor) -> Tensor:
    for hook in hooks:
        result = hook(gradient)
        gradient = gradient if result is None else result
    return gradient


def _call_post_hooks(holder: nn.Parameter, weight: nn.Parameter) -> bool:
    """Calls a holder's hooks for accumulated gradients, with the weight's as its own; whether there are any."""
    hooks = [_unwrapped(hook) for hook in _users(_post_hooks(holder))]
    for hook in hooks:
        # The source in a part has no ".grad" of its own outside the backward pass: it borrows the weight's.
        if holder is not weight:
            holder.grad = weight.grad
        hook(holder)
        if holder is not weight:
            weight.grad, holder.grad = holder.grad, None
    return bool(hooks)


def hooked(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Any]]:
    """The parameters that have a user's hook, and the first hook of each."""
    for parameter in parameters:
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks and (users := _users(hooks)):
                yield parameter, users[0]
                break


def refuse_hook(parameter: nn.Parameter, hook: Any, *, is_part: bool) -> None:
    """Raises a UsageError for a hook on a parameter that several replicas train in a loop of the user's."""
    advice = (
        "use optimizer.register_step_pre_hook, which sees the sums of what this worker holds"
        if is_part
        else "read or change .grad in the step, between backward() and optimizer.step(), where it is the sum over all "
        "replicas"
    )
    raise UsageError(
        f"a parameter of shape {tuple(parameter.shape)} has a hook ({_name(hook)}), which would see one replica's "
        f"gradient and not the sum; remove it, and {advice}"
    )


def refuse_divided(weight: nn.Parameter, hook: Any, partition: PartitionPolicy) -> None:
    """Raises a UsageError for a hook on a weight of which this worker holds a part."""
    if partition.is_divided(weight):
        raise divided_error(weight, hook)


def divided_error(weight: nn.Parameter, hook: Any) -> UsageError:
    """The error for a hook on a weight of which this worker holds a part."""
    return UsageError(
        f"a parameter of shape {tuple(weight.shape)} has a hook ({_name(hook)}), and the layout divides it among "
        "workers, none of which has its whole gradient; remove it, and use clip_norm=, or for what is done to each "
        "number by itself optimizer.register_step_pre_hook"
    )


def warn_of_backward_hooks(module: nn.Module) -> None:
    """Warns of hooks on modules that see gradients in the backward pass of a sum, which is divided only later."""
    for name, part in module.named_modules():
        for hook in (*part._backward_pre_hooks.values(), *part._backward_hooks.values()):
            warnings.warn(
                f"the {type(part).__name__} {name!r} has a backward hook ({_name(hook)}), and fit runs the backward "
                "pass of the sum over a replica's rows, or a microbatch's: the hook sees gradients that are not yet "
                "divided by the count, so that clipping them there is not clipping those of the mean; use clip_norm=, "
                "or a loop of your own with ls.compute_average_loss",
                stacklevel=2,
            )
            return


def _post_hooks(parameter: nn.Parameter) -> dict[int, Any] | None:
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks


def _users(hooks: dict[int, Any] | None) -> list[Any]:
    return [hook for hook in hooks.values() if _is_users(hook)] if hooks else []


def _is_users(hook: Any) -> bool:
    # The engine's are objects of classes of this package; those of ``parallel`` cannot be imported here.
    return type(hook) is HookAtUpdate or not type(hook).__module__.startswith("lockstep.")


def _unwrapped(hook: Any) -> Any:
    return hook.hook if isinstance(hook, HookAtUpdate) else hook


def _name(hook: Any) -> str:
    return str(getattr(_unwrapped(hook), "__qualname__", type(_unwrapped(hook)).__name__))
