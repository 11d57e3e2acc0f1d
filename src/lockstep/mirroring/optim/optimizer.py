"""The mirrored optimizer: a ``torch.optim.Optimizer`` whose step updates all replicas.

Its groups, state and ``state_dict`` are the plain optimizer's, so schedulers and checkpoints work on it as on the plain
one. ``step`` runs one update.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep._torch_compat import DisableTorchFunction
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.gradients.local import Copies, GradientExchange
from lockstep.mirroring.gradients.user import GivenSums, forget
from lockstep.mirroring.optim.kernels import HeldState
from lockstep.mirroring.optim.misuse import guard_groups
from lockstep.mirroring.optim.step import LockstepUpdate, StepResult, Totals, UpdateTimes
from lockstep.replicas.context import ReplicaContext, get_replica_context

FindCopies = Callable[[], Mapping[int, Sequence[nn.Parameter]]]
MakeExchange = Callable[[Sequence[Copies], Sequence[Sequence[int]]], GradientExchange]
"""Given the parameters' copies and the replicas by storage: how the gradients are summed."""

_SCALER = "torch.amp.grad_scaler"


class Owner(Protocol):
    """What an optimizer needs of its strategy."""

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        """One per local replica."""

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), /) -> Any:
        """Runs ``fn`` in every replica."""

    def local_results(self, value: Any, /) -> tuple[Any, ...]:
        """What ``run`` returned, one per local replica."""


class MirroredOptimizer(Optimizer):
    """An optimizer whose ``step`` is a collective. Made by ``strategy.mirror(optimizer)``.

    Args:
        owner: the strategy.
        optimizer: the plain optimizer over the parameters of mirrored modules.
        groups: the replicas by storage of the weights.
        find_copies: gives the id of each parameter of a mirrored module -> its copies, one per replica.
        make_exchange: how the gradients are summed.

    Attributes:
        sums_after_runs: whether a run that leaves gradients ends with their sums, so that what looks at them outside
            replicas sees those of one device. Who runs micro-batches and calls ``update`` itself needs no such sums.
    """

    _step_supports_amp_scaling = False  # a scaler unscales; the plain optimizer may do that by itself

    def __init__(
        self,
        owner: Owner,
        optimizer: Optimizer,
        groups: Sequence[Sequence[int]],
        find_copies: FindCopies,
        make_exchange: MakeExchange,
    ) -> None:
        # Optimizer.__init__ is not called: all that it would set up is the plain optimizer's.
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS evaluates its closure many times a step; choose a first-order optimizer")
        self._owner = owner
        self._plain = optimizer
        self._groups = groups
        self._find_copies = find_copies
        self._make_exchange = make_exchange
        self._holds_sums = False
        self.sums_after_runs = True
        self._summed_after_run = False
        self._held: set[object] = set()
        self._was_held = False
        self._lost: str = ""
        self._left: list[tuple[int, int]] | None = None
        self._parameters: list[Sequence[nn.Parameter]] = []
        self._prepare()

    @property
    def plain(self) -> Optimizer:
        """The user's own optimizer."""
        return self._plain

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The plain optimizer's. In a replica they can be read only.

        Raises:
            UsageError: torch's GradScaler asks in one of several replicas, which would all unscale by one scaler.
        """
        if get_replica_context() is not None and len(self._owner.devices) > 1 and _asked_by(_SCALER):
            raise UsageError(
                "a GradScaler unscales and steps once for all replicas, and not in each; in the step keep "
                "scaler.scale(loss).backward() and call optimizer.sum_gradients(), and after strategy.run "
                "scaler.step(optimizer), scaler.update() and optimizer.zero_grad()"
            )
        return self._plain.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The plain optimizer's; where workers share it, of this one's pieces of the parameters."""
        return self._plain.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The plain optimizer's."""
        return self._plain.defaults

    @property
    def times(self) -> tuple[UpdateTimes | None, ...]:
        """Where the time of the last update went, one item per replica; None where it was skipped."""
        return self._update.times

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sums the gradients over all replicas and updates once. Every replica must call it.

        Afterwards replica 0's parameters hold the summed gradients and the other replicas' none, so that without
        ``zero_grad`` further gradients add up as they do on one device.

        Outside replicas it is a step of all of them, on every worker that calls it, as all must: by the gradients that
        ``sum_gradients`` left with the user's module, whatever has been done with them since; or, if it has not been
        called since the last step, by the sums.

        Args:
            closure: evaluated on each replica before; its result is returned. Only inside a replica.

        Raises:
            UsageError: called in a replica of another strategy, or outside replicas with a closure; or gradients were
                added to those that ``sum_gradients`` had summed.
        """
        context = get_replica_context()
        if context is None:
            return self._step_outside(closure)
        self._check_owner(context)
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        replica = context.local_replica
        given = self._given.given_to(replica)
        self._given.take_back(replica, all_but_first=given)
        if given or self._holds_sums:
            self._update.apply(context)
            self._holds_sums = self._summed_after_run = False
            return loss
        # The counts add up to 1: what the replicas back-propagated are parts of one loss, summed and not averaged.
        self._update.run(context, Totals(0.0, float(context.replica_id_in_sync_group == 0)))
        self._summed_after_run = False
        return loss

    def sum_gradients(self) -> None:
        """The first half of a step, for a program that looks at the gradients, clips or changes them before the rest.

        Leaves the gradients of all replicas of all workers, summed, with the parameters of the user's module, on every
        worker. What follows happens outside replicas, alike on all workers, and ends with ``step()`` there, or with
        ``zero_grad()``. Inside a replica every replica must call it; outside, every worker.

        Raises:
            UsageError: called in a replica of another strategy.

        Example:
            >>> import torch, lockstep as ls
            >>> strategy = ls.MirroredStrategy()
            >>> mirrored = strategy.mirror(torch.nn.Linear(2, 1))
            >>> optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))
            >>> def backward(x):
            ...     mirrored(x).sum().backward()
            ...     optimizer.sum_gradients()
            >>> for x in strategy.distribute_dataset([torch.ones(4, 2)]):
            ...     strategy.run(backward, (x,))
            ...     norm = torch.nn.utils.clip_grad_norm_(mirrored.parameters(), 1.0)
            ...     optimizer.step()
            >>> round(float(norm), 4)  # of (4, 4) for the weights and 4 for the bias
            6.9282
        """
        context = get_replica_context()
        if context is None:
            self._owner.run(self.sum_gradients)
            return
        self._check_owner(context)
        self._check_whole()
        self._given.take_back(context.local_replica)
        self._update.sum(context)
        self._holds_sums = True

    def give_sums(self, context: ReplicaContext) -> None:
        """Lets the calling replica's parameters hold the summed gradients, for a step that looks at them.

        Every replica must call it; what a replica has been given already stays. ``step`` takes replica 0's then.
        """
        replica = context.local_replica
        if not self._given.given_to(replica):
            self._check_whole()
            with DisableTorchFunction():
                self._given.take_back(replica)
                self._update.sum(context)
                self._given.give(context)

    def gradient_assigned(self, context: ReplicaContext, parameter: nn.Parameter, value: Any) -> None:
        """Notes that a step assigns the ".grad" of one of the calling replica's parameters."""
        self._given.assigned(context.local_replica, parameter, value)

    @property
    def parameters(self) -> Sequence[Copies]:
        """Per parameter its copies, one per local replica."""
        return self._parameters

    def clip_sums(self, clip_norm: float) -> torch.Tensor:
        """Scales what ``sum_gradients`` left so that its global norm is at most ``clip_norm``; returns the norm before.

        What ``torch.nn.utils.clip_grad_norm_`` does outside replicas, divided among their threads: the threads that it
        would use itself go on spinning for some milliseconds, on the cores of the replicas that update next. Outside
        replicas only; every worker must call it.

        Args:
            clip_norm: infinite does not scale.

        Raises:
            UsageError: called inside a replica.
        """
        if get_replica_context() is not None:
            raise UsageError("clip_sums reaches all replicas; call it outside strategy.run, after sum_gradients")
        norms = self._owner.run(self._clip, (clip_norm,))
        norm: torch.Tensor = self._owner.local_results(norms)[0]
        return norm

    def update(
        self,
        context: ReplicaContext,
        *,
        totals: Totals,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StepResult:
        """``step`` for gradients of sums: divides them once by the summed count. Every replica must call it.

        All replicas' gradients are None afterwards. A summed count of 0 skips the update.

        On GPUs nothing is read, if torch has a fused kernel of the optimizer: the result's numbers are tensors, and an
        update whose total is not finite is skipped there, with all that follow until ``reset_nonfinite``.

        Args:
            context: the calling replica's.
            totals: this replica's sums since the last update.
            clip_norm: the largest global norm of the divided gradients; None does not clip.
            scaler: by whose scale the losses were multiplied (fp16); it decides whether to skip.

        Raises:
            NonFiniteLossError: the summed loss is NaN or infinite; no weight has been touched. Not where the result's
                total is a tensor: there whoever reads it has to see to it.
        """
        self._check_owner(context)
        self._check_whole()
        self._given.take_back(context.local_replica)
        result = self._update.run(context, totals, clip_norm, scaler)
        self.zero_grad()
        return result

    def reset_nonfinite(self) -> None:
        """Lets updates happen again on GPUs after one whose total was not finite. Outside replicas only."""
        self._update.skips.reset_nonfinite()

    @property
    def of_storages(self) -> tuple[Optimizer, ...]:
        """The plain optimizer, and its copies for other storages of the weights."""
        return self._update.updaters.of_storages

    @property
    def not_fused(self) -> str | None:
        """Why updates are not made by torch's fused kernels for GPUs; None where they are."""
        return self._update.updaters.not_fused

    def held(self, module: nn.Module, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """Inside the block no backward pass of these local replicas sends gradients to other workers.

        Args:
            module: the user's module; where this optimizer steps none of its parameters, nothing is held.
            replicas: numbers of local replicas.
        """
        own = {id(copies[0]) for copies in self._parameters}
        steps = any(id(parameter) in own for parameter in module.parameters())
        return self._held_back(replicas) if steps else nullcontext()

    @contextmanager
    def _held_back(self, replicas: Sequence[int]) -> Iterator[None]:
        block = object()
        self._held.add(block)
        self._was_held = True
        try:
            with self._update.held(replicas):
                yield
        finally:
            self._held.discard(block)

    def sum_after_run(self) -> None:
        """After a run: leaves the sums of the gradients that replicas have made with the user's module.

        What looks at gradients outside replicas, or changes or clears them, then does it to those of one device, and
        further backward passes add to them. Outside replicas, where one worker has all of these.
        """
        held, self._was_held = self._was_held, bool(self._held)
        replicas = range(len(self._owner.devices))
        if (
            held
            or not self.sums_after_runs
            or self._holds_sums
            or self._lost
            or all(map(self._given.given_to, replicas))
        ):
            return
        if any(copy.grad is not None for copies in self._parameters for copy in copies[1:]):
            for replica in replicas:  # one that had no backward pass since may still have sums of before
                self._given.take_back(replica)
            self._owner.run(self._sum)
            self._summed_after_run = True

    def note_left(self) -> None:
        """After a run of several workers: which gradients it leaves, each worker its own replicas'."""
        summed = not self.sums_after_runs or self._holds_sums or self._lost
        self._left = None if summed or self._given.given_to(0) else self.gradient_marks()

    def check_left(self) -> None:
        """Before the next run, or an update outside.

        Raises:
            UsageError: what the last run left was changed since, though not cleared.
        """
        left, self._left = self._left, None
        if left is None or self.gradient_marks() in (left, None):
            return
        gradients = [each.grad for copies in self._parameters for each in copies if each.grad is not None]
        if any(bool(each.count_nonzero()) for each in gradients):
            raise UsageError(
                "gradients were changed outside replicas after a run, and each worker has its own replicas' share of "
                "them alone; call optimizer.sum_gradients() on every worker before they are looked at or "
                "changed, and optimizer.zero_grad() to clear those of all replicas"
            )

    def _sum(self) -> None:
        context = get_replica_context()
        if context is not None:
            self._update.sum(context)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the current replica's gradients; outside a replica those of all."""
        context = get_replica_context()
        # The replica's function mode would be asked at every access to a ".grad".
        with DisableTorchFunction():
            for copies in self._parameters:
                for parameter in copies if context is None else [copies[context.local_replica]]:
                    if set_to_none or parameter.grad is None:
                        parameter.grad = None
                    else:  # in place, as torch's does
                        if parameter.grad.grad_fn is not None:
                            parameter.grad.detach_()
                        else:
                            parameter.grad.requires_grad_(False)
                        parameter.grad.zero_()
        for replica in range(len(self._owner.devices)) if context is None else (context.local_replica,):
            self._given.forget(replica)
        self._holds_sums = self._summed_after_run = False
        self._lost = ""
        if context is None or context.local_replica == 0:
            with DisableTorchFunction():
                forget(self._parameters)

    def gradient_marks(self) -> list[tuple[int, int]] | None:
        """By what to tell whether a run has changed gradients that were there before it; None where none were."""
        summed = self._holds_sums or self._summed_after_run
        if not summed and all(copies[-1].grad is None for copies in self._parameters):
            return None
        gradients = [parameter.grad for copies in self._parameters for parameter in copies]
        return [(id(each), each._version) for each in gradients if each is not None]

    def run_failed(self, before: list[tuple[int, int]] | None) -> None:
        """Clears what the replicas that did not fail have left of a step. Outside replicas only.

        Args:
            before: what ``gradient_marks`` gave when the run began.
        """
        if before is None or self.gradient_marks() != before:
            self.zero_grad()
            if before is not None:
                self._lost = (
                    "a run failed while gradients of several runs were being added up, and they are lost; call "
                    "optimizer.zero_grad() and begin the accumulation again"
                )

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's. Where workers share the state it is put together: all of them must call it then."""
        with self._update.updaters.whole_state():
            return self._plain.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads into the plain optimizer and its copies. Outside a replica only.

        Where workers share the state, each takes its share of a whole one.

        Raises:
            UsageError: called inside a replica.
        """
        if get_replica_context() is not None:
            raise UsageError("load_state_dict reaches all replicas; call it outside strategy.run")
        self._plain.load_state_dict(dict(state_dict))
        self._update.updaters.reset()

    def held_state(self) -> list[HeldState]:
        """What this worker keeps of the state: of each parameter all of it, or of a piece, or nothing."""
        return self._update.updaters.held()

    def take_held_state(self, held: Sequence[HeldState]) -> None:
        """Sets the state to other values for what ``held_state`` gave."""
        self._update.updaters.take_held(held)

    def align_copies(self) -> None:
        """Gives the copies for the other storages the plain optimizer's state, where that was changed by hand."""
        self._update.updaters.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of a mirrored module to the plain optimizer.

        Raises:
            UsageError: its parameters are of no mirrored module; the optimizer stays as it was.
        """
        self._update.updaters.join()
        self._plain.add_param_group(param_group)
        try:
            self._prepare()
        except UsageError:
            del self._plain.param_groups[-1]
            self._prepare()
            raise

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the plain optimizer, which is what the hook is given."""
        return self._plain.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the plain optimizer, which is what the hook is given."""
        return self._plain.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the plain optimizer, which is what the hook is given."""
        return self._plain.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Registers on the plain optimizer, which is what the hook is given."""
        return self._plain.register_load_state_dict_post_hook(hook, prepend)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Registers on the plain optimizer; the hook runs once an update."""
        return self._plain.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Registers on the plain optimizer; the hook runs once an update."""
        return self._plain.register_step_post_hook(hook)

    def __getattr__(self, name: str) -> Any:
        """What only the plain optimizer has. Its methods reach all storages of the weights, outside replicas.

        Raises:
            UsageError: (when it is called) such a method was called in one of several replicas.
        """
        plain = self.__dict__.get("_plain")
        if plain is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(plain, name)
        return _OfAllStorages(self, value) if isinstance(value, MethodType) and value.__self__ is plain else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what only the plain optimizer has on that one."""
        own = self.__dict__
        if "_update" in own and name not in own and name in vars(self._plain) and not hasattr(type(self), name):
            setattr(self._plain, name, value)
        else:
            object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._plain)})

    def __getstate__(self) -> NoReturn:
        raise UsageError("a mirrored optimizer belongs to its strategy's threads; save its state_dict() instead")

    def __repr__(self) -> str:
        return f"MirroredOptimizer({self._plain!r})"

    def _prepare(self) -> None:
        guard_groups(self._plain)
        # Those of a layer that the user has replaced since are no module's any more; a plain optimizer keeps them too.
        mirrored = {id(copies[0]): copies for copies in self._parameters} | dict(self._find_copies())
        found: list[Sequence[nn.Parameter]] = []
        for group in self._plain.param_groups:
            for parameter in group["params"]:
                copies = mirrored.get(id(parameter))
                if copies is None:
                    raise UsageError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} whose module is not "
                        "mirrored; call strategy.mirror(module) first, keep what it returns, and give the optimizer "
                        "that module's parameters"
                    )
                found.append(copies)
        self._parameters = found
        exchange = self._make_exchange(self._parameters, self._groups)
        self._given = GivenSums(self._parameters, keeps_sums=exchange.keeps_sums)
        self._update = LockstepUpdate(
            self._plain,
            self._parameters,
            self._groups,
            exchange,
            on_gpus=all(device.kind == "GPU" for device in self._owner.devices),
        )

    def _step_outside(self, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise UsageError(
                "step(closure) evaluates the closure in every replica; call it inside the function that strategy.run "
                "runs, or call step() outside without a closure"
            )
        self._check_whole()
        replicas = range(len(self._owner.devices))
        if self._parameters and all(map(self._given.given_to, replicas)):
            self._holds_sums = True
            for replica in replicas:
                self._given.take_back(replica, all_but_first=True)
        if self._holds_sums:
            self._check_only_sums()
        else:
            self.sum_gradients()
        self._owner.run(self._apply)
        self._holds_sums = False

    def _apply(self) -> None:
        context = get_replica_context()
        if context is not None:
            self._update.apply(context)

    def _clip(self, clip_norm: float) -> torch.Tensor | None:
        context = get_replica_context()
        return None if context is None else self._update.clip(context, clip_norm)

    def _check_only_sums(self) -> None:
        if any(parameter.grad is not None for copies in self._parameters for parameter in copies[1:]):
            raise UsageError(
                "gradients were added after sum_gradients; call it when all are there, and step() or zero_grad() "
                "before the next backward pass"
            )

    def _check_whole(self) -> None:
        if self._lost:
            raise UsageError(self._lost)

    def _check_owner(self, context: ReplicaContext) -> None:
        if context.strategy is not self._owner:
            raise UsageError(
                "this optimizer was mirrored by another strategy than the one that runs this replica; use one strategy"
            )


class _OfAllStorages:
    """A method that only the plain optimizer has, such as schedule-free's ``train()`` and ``eval()``.

    Args:
        mirrored: its mirrored optimizer.
        method: of the plain one.
    """

    def __init__(self, mirrored: MirroredOptimizer, method: MethodType) -> None:
        self._mirrored = mirrored
        self._method = method
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if get_replica_context() is not None and len(self._mirrored._owner.devices) > 1:
            raise UsageError(
                f"{self._method.__qualname__} acts on what all replicas share, and was called in one of "
                f"{len(self._mirrored._owner.devices)}; call it outside strategy.run"
            )
        result = self._method(*args, **kwargs)
        if len(self._mirrored.of_storages) > 1:
            self._mirrored.align_copies()
        return result


def _asked_by(module: str) -> bool:
    """Whether the caller of the function that asks this is one of a module."""
    return bool(sys._getframe(2).f_globals.get("__name__") == module)
