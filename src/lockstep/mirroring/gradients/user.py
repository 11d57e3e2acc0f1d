"""Gradients as the user's program sees them: the sums over all replicas, in the step and in hooks on parameters.

    backward -> param.grad is read in the step -> [barrier: sum] -> every replica sees the sum, in memory of its own
             -> clipped, scaled or logged, as on one device -> optimizer.step() uses replica 0's

So ``clip_grad_norm_`` between ``backward()`` and ``step()`` does what it does on one device. A backward pass after the
read adds to replica 0's sums, and in the other replicas to nothing, so that every gradient counts once. Hooks that the
user has registered on parameters are called once, with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from lockstep._torch_compat import DisableTorchFunction
from lockstep.collectives.reduce import mark_summed
from lockstep.errors import UsageError
from lockstep.mirroring.gradients.local import Copies
from lockstep.replicas.context import ReplicaContext


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
        with DisableTorchFunction():
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


class GivenSums:
    """The sums of one optimizer's gradients, as replicas were given them.

    Args:
        parameters: per parameter its local copies, one per local replica.
        keeps_sums: whether the first local replica is the first of all, whose gradients are the sums.
    """

    def __init__(self, parameters: Sequence[Copies], *, keeps_sums: bool) -> None:
        self._parameters = parameters
        self._keeps_sums = keeps_sums
        replicas = len(parameters[0]) if parameters else 0
        self._index = [{id(copies[replica]): at for at, copies in enumerate(parameters)} for replica in range(replicas)]
        self._given = [False] * replicas
        # By replica, the numbers of the parameters whose ".grad" is no part of its own, but a sum that it was given.
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
        """Drops what a replica was given, so that its gradients are its own part alone.

        Args:
            replica: a local one.
            all_but_first: leave the first local replica's, which the update is to take.
        """
        if replica or not all_but_first:
            with DisableTorchFunction():  # the replica's guard would take it for the step's own doing
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
        own = WeakMethod(self._accumulating)
        for at, copies in enumerate(self._parameters):
            for replica, copy in enumerate(copies):
                if copy.requires_grad and copy.is_leaf:
                    copy.register_hook(EngineHook(partial(_report, own, replica, at)))  # type: ignore[no-untyped-call]
        self._hooked = True

    def _accumulating(self, replica: int, at: int) -> None:
        """A backward pass brings a gradient: what a replica was given is no part of it."""
        self._given[replica] = False
        if at in self._sums[replica]:
            self._sums[replica].discard(at)
            with DisableTorchFunction():
                self._parameters[at][replica].grad = None


def _report(own: WeakMethod[Any], replica: int, at: int, _: torch.Tensor) -> None:
    """The hook of a parameter; it must not keep the strategy alive."""
    accumulating = own()
    if accumulating is not None:
        accumulating(replica, at)
