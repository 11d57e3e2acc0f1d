"""Gradients as the user's program sees them: the sums over all replicas, in the step and in hooks on parameters.

    backward -> param.grad is read in the step -> [barrier: sum] -> every replica sees the sum, in memory of its own
             -> clipped, scaled or logged, as on one device -> optimizer.step() uses replica 0's

So ``clip_grad_norm_`` between ``backward()`` and ``step()`` does what it does on one device. A backward pass after the
read adds to replica 0's sums, and in the other replicas to nothing, so that every gradient counts once. Hooks that the
user has registered on parameters are called once, with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from lockstep._torch_compat import DisableTorchFunction
from lockstep.collectives.reduce import mark_summed
from lockstep.errors import UsageError
from lockstep.mirroring.gradients.exchange import Copies
from lockstep.replicas.context import ReplicaContext


class EngineHook:
    """A hook of this package on a parameter. It holds a bound method weakly, so as not to keep the strategy alive."""

    def __init__(self, call: Callable[..., None], *args: Any) -> None:
        self._call: Callable[[], Any] = WeakMethod(call) if isinstance(call, MethodType) else lambda: call
        self._args = args

    def __call__(self, _: torch.Tensor) -> None:
        call = self._call()
        if call is not None:
            call(*self._args)


class HeldHook:
    """A hook of the user's, on a parameter of the user's module.

    Attributes:
        held: whether a run is in progress, in which the hook waits for the sum.
        stepped: whether a mirrored optimizer will sum the parameter's gradients.
        calls: how many backward passes have reached it since the last update.
    """

    def __init__(self, hook: Callable[..., Any], parameter: nn.Parameter) -> None:
        self.hook = hook
        self._parameter = ref(parameter)
        self.held = False
        self.stepped = False
        self.calls = 0

    def __call__(self, given: torch.Tensor) -> Any:
        """Called by torch in a backward pass: calls the user's hook outside runs, and only counts in them."""
        if not self.held:
            return self.hook(given)
        if not self.stepped:
            raise UsageError(
                f"a parameter of shape {tuple(given.shape)} has a hook ({_name(self.hook)}), and no mirrored optimizer "
                "sums its gradients; call optimizer = strategy.mirror(optimizer) over it, or remove the hook"
            )
        parameter = self._parameter()
        with DisableTorchFunction():
            fresh = parameter is not None and given is not parameter and parameter.grad is None
        self.calls = 1 if fresh else self.calls + 1
        return None


def hold(parameters: Iterable[nn.Parameter], stepped: Callable[[], set[int]]) -> list[HeldHook]:
    """Before a run: the user's hooks on parameters wait from now on. ``stepped`` returns what optimizers will sum."""
    held: list[HeldHook] = []
    known: set[int] | None = None
    for parameter in parameters:
        for hooks in _hooks_of(parameter):
            for key, hook in list(hooks.items()):
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
    on_gradient, on_parameter = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # runs at every step
    return bool((on_gradient and _waiting(on_gradient)) or (on_parameter and _waiting(on_parameter)))


def hooked(parameters: Sequence[Copies]) -> list[Copies]:
    """Those of an optimizer's parameters that have hooks which wait."""
    return [copies for copies in parameters if has_waiting(copies[0])]


def forget(parameters: Sequence[Copies]) -> None:
    """The gradients were cleared."""
    for copies in hooked(parameters):
        for each in (hook for hooks in _hooks_of(copies[0]) for hook in _waiting(hooks)):
            each.calls = 0


def run_hooks(parameters: Sequence[Copies], leaders: Sequence[int]) -> None:
    """Calls the hooks that wait with the sums of the first leader, and gives the other leaders the result. Called once.

    Raises UsageError if several backward passes were added up, of which the hook would have seen each.
    """
    first, *others = leaders
    for copies in parameters:
        parameter, hooks = copies[first], copies[0]
        on_gradient, on_parameter = _waiting(hooks._backward_hooks), _waiting(hooks._post_accumulate_grad_hooks)
        for each in (*on_gradient, *on_parameter):
            if each.calls > 1:
                raise UsageError(
                    f"{each.calls} backward passes have gone through a parameter of shape {tuple(parameter.shape)} "
                    f"that has a hook ({_name(each.hook)}), and replicas have only their sum; remove it, and change "
                    "the gradients after optimizer.sum_gradients(), before optimizer.step()"
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


def _hooks_of(parameter: torch.Tensor) -> list[dict[int, Any]]:
    """The dicts of hooks that the parameter has: on its gradient, and on itself when the gradient is complete."""
    every: tuple[Any, ...] = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [hooks for hooks in every if hooks]


def _waiting(hooks: Any) -> list[HeldHook]:
    return [each for each in hooks.values() if isinstance(each, HeldHook) and each.held] if hooks else []


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


class GivenSums:
    """The summed gradients of one optimizer that replicas were given.

    ``keeps_sums`` says whether the first local replica is the first of all, whose gradients are the sums.
    """

    def __init__(self, parameters: Sequence[Copies], *, keeps_sums: bool) -> None:
        self._parameters = parameters
        self._keeps_sums = keeps_sums
        replicas = len(parameters[0]) if parameters else 0
        self._index = [{id(copies[replica]): at for at, copies in enumerate(parameters)} for replica in range(replicas)]
        self._given = [False] * replicas
        # By replica, the numbers of the parameters whose ".grad" is a sum that it was given, and not its own.
        self._sums: list[set[int]] = [set() for _ in range(replicas)]
        self._hooked = False

    def given_to(self, replica: int) -> bool:
        """Whether the gradients of a local replica are the sums now, and nothing was added since."""
        return self._given[replica]

    def give(self, context: ReplicaContext) -> None:
        """Gives each replica its own copy of the sums, which the first holds. Every replica must call it."""
        replica = context.local_replica
        if not self._hooked:
            context.meet("watch of the gradients", None, lambda _: self._hook())
        if replica:
            for copies in self._parameters:
                total = copies[0].grad
                copies[replica].grad = None if total is None else total.to(copies[replica].device, copy=True)
        context.meet("sums of gradients", None, lambda _: None)  # the first replica may change its own from here on
        if context.num_replicas_in_sync > 1:
            for copies in self._parameters:
                if (gradient := copies[replica].grad) is not None:
                    mark_summed(gradient)
        if replica or not self._keeps_sums:
            self._sums[replica] = {at for at, copies in enumerate(self._parameters) if copies[replica].grad is not None}
        self._given[replica] = True

    def take_back(self, replica: int, *, all_but_first: bool = False) -> None:
        """Drops what a replica was given, so that its gradients are its own; but not the first one's, if asked."""
        if replica or not all_but_first:
            with DisableTorchFunction():  # the step guard would take it for an assignment by the step
                for at in self._sums[replica]:
                    self._parameters[at][replica].grad = None
        self.forget(replica)

    def forget(self, replica: int) -> None:
        """The gradients of a local replica have been cleared."""
        self._given[replica] = False
        self._sums[replica].clear()

    def assigned(self, replica: int, parameter: Any, value: Any) -> None:
        """The step assigns a parameter's ".grad"."""
        if value is None:
            self._given[replica] = False
        if not self._given[replica]:
            self._sums[replica].discard(self._index[replica].get(id(parameter), -1))

    def _hook(self) -> None:
        for at, copies in enumerate(self._parameters):
            for replica, copy in enumerate(copies):
                if copy.requires_grad and copy.is_leaf:
                    copy.register_hook(EngineHook(self._accumulating, replica, at))  # type: ignore[no-untyped-call]
        self._hooked = True

    def _accumulating(self, replica: int, at: int) -> None:
        """A backward pass brings a gradient: what a replica was given is no part of it."""
        self._given[replica] = False
        if at in self._sums[replica]:
            self._sums[replica].discard(at)
            with DisableTorchFunction():
                self._parameters[at][replica].grad = None
