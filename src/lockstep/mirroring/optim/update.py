"""One update of all replicas.

    replica r:  [barrier: totals, NaN check] -> sum a slice -> [barrier: between storages] -> divide
                -> [barrier: norm; clip] -> update a slice -> [barrier: end; with ZeRO-1, all workers get all weights]
    few weights on a CPU: [barrier: all of this, in the thread of the last to arrive]

Gradients are summed, never averaged; the count divides them once, if one is given. ``apply`` is the second half alone,
for a program that looks at the sums of ``gradient_sums`` before it. On GPUs the host reads nothing, so it may be some
updates ahead when it learns of a non-finite loss: every update after that one is skipped too, until
``reset_nonfinite``.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep._torch_compat import DisableTorchFunction, foreach_mul_, foreach_norm
from lockstep.collectives.sum_order import tree_sum
from lockstep.errors import NonFiniteLossError
from lockstep.mirroring.gradients.local_sum import Copies, GradientExchange, Number, divide, gradients_of, spread
from lockstep.mirroring.gradients.parameter_hooks import ParameterHooks
from lockstep.mirroring.optim.misuse import plain_settings
from lockstep.mirroring.optim.storage_optimizers import AmpAdapter, StorageOptimizers, on_device
from lockstep.replicas.context import ReplicaContext
from lockstep.replicas.watcher import Totals

_LOG = logging.getLogger("lockstep")
_FEW = 2**19
"""Up to so many weights one thread makes the whole update; measured, see ``_run_at_once``."""


@dataclass(frozen=True)
class UpdateTimes:
    """Moments of one replica's update, in seconds of ``time.perf_counter()``."""

    arrived_s: float  # the replica reached the update
    opened_s: float  # all replicas had
    exchanged_s: float  # the gradients of this replica's slice of the parameters were summed
    updated_s: float  # the slice was updated, or the wait for a replica that makes the whole update was over
    closed_s: float  # all replicas were done

    @property
    def exchange_s(self) -> float:
        return self.exchanged_s - self.opened_s

    @property
    def update_s(self) -> float:
        return self.updated_s - self.exchanged_s


_NUM_MOMENTS = len(UpdateTimes.__dataclass_fields__)


@dataclass(frozen=True)
class StepResult:
    """What an update did, equal on all replicas. A tensor may still be in computation on a GPU; nobody has read it.

    ``skipped``: no weight was changed, since the count was 0, fp16 gradients overflowed, or (a tensor of 0.0 or 1.0)
    this total or an earlier one was not finite.
    """

    total: Number  # the loss summed over all replicas
    count: Number
    grad_norm: Number | None = None  # before clipping; None if not asked for
    skipped: bool | Tensor = False


def _summed_on(home: torch.device, values: list[Number]) -> Number:
    """The sum in double precision and the order of ``sum_order``, on a device, without reading tensors."""
    moved = [
        value.to(home, torch.float64, non_blocking=True) if isinstance(value, Tensor) else value for value in values
    ]
    return tree_sum(moved, operator.add)


def _divisor(count: Number) -> Number:
    """What gradients are divided by: the count, and 1 if an update without one is skipped on the device."""
    # Not torch.where: its number would be copied to the device, for which the host waits.
    return count.masked_fill(count == 0, 1.0) if isinstance(count, Tensor) else count


def _is_one(count: Number) -> bool:
    return not isinstance(count, Tensor) and count == 1.0


def balance(sizes: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Divides items into ``parts`` of about equal size, largest first to the least loaded (Graham's LPT rule)."""
    loads = [0] * parts
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        part = min(range(parts), key=lambda part: (loads[part], part))
        loads[part] += sizes[item]
        members[part].append(item)
    return tuple(tuple(sorted(part)) for part in members)


def slices_of(parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """By local replica, the numbers of the parameters that it sums and updates for its storage group."""
    sizes = [copies[0].numel() for copies in parameters]
    return {replica: part for group in groups for replica, part in zip(group, balance(sizes, len(group)), strict=True)}


class _Slice:
    """The parameters that one replica sums and updates, in the storage of ``leader``: by number, copies, and leader's.

    Made once, and not in every update: the parameters of a mirrored optimizer stay the same.
    """

    def __init__(self, indices: Sequence[int], leader: int, copies: Sequence[Copies]) -> None:
        self.indices, self.leader, self.copies = indices, leader, copies
        self.parameters = [of_parameter[leader] for of_parameter in copies]


def check_finite(total: float) -> None:
    """Raises NonFiniteLossError for a loss that is NaN or infinite."""
    if not math.isfinite(total):
        raise NonFiniteLossError(
            f"the loss is {total}; the weights are those before this update",
            "Lower the learning rate, clip the gradients (clip_norm=1.0), or look for bad values in the data",
        )


class Skips:
    """Decides which updates are skipped, on replica 0's device ``home``, without reading from it."""

    def __init__(self, home: torch.device) -> None:
        self._home = home
        self._bad: Tensor | None = None

    def reset_nonfinite(self) -> None:
        """Lets updates happen again."""
        if self._bad is not None:
            self._bad.zero_()

    def of(self, total: Number, count: Number) -> bool | Tensor:
        """Whether this update is skipped: a bool, or a float32 tensor of 0.0 or 1.0 that nobody has read."""
        if not isinstance(count, Tensor) and not count:
            return True
        if not isinstance(total, Tensor) and not isinstance(count, Tensor):
            return False
        if self._bad is None:  # stays at one address, where captured steps find it; fused kernels read float32
            self._bad = torch.zeros((), dtype=torch.float32, device=self._home)
        if isinstance(total, Tensor):
            self._bad.copy_(torch.maximum(self._bad, (~torch.isfinite(total)).float()))
        return torch.maximum(self._bad, (count == 0).float()) if isinstance(count, Tensor) else self._bad.clone()


def gradient_norms(parameters: Sequence[Copies], indices: Iterable[int], replica: int) -> dict[int, Tensor]:
    """The norm of each gradient that ``replica`` has of the parameters with these numbers, by number."""
    gradients = {index: gradient for index in indices if (gradient := parameters[index][replica].grad) is not None}
    return dict(zip(gradients, foreach_norm(list(gradients.values())) if gradients else (), strict=True))


def scale_to_norm(gradients: Sequence[Tensor], norm: Tensor, clip_norm: float) -> None:
    """Scales gradients in place, so that a global ``norm`` above ``clip_norm`` becomes that."""
    if gradients:
        coefficient = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        foreach_mul_(list(gradients), coefficient.to(gradients[0].device))


class LockstepUpdate:
    """Sums gradients over all replicas and updates every storage of the weights alike; each group's first leads it."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Copies],
        groups: Sequence[Sequence[int]],
        exchange: GradientExchange,
        *,
        hooks: ParameterHooks | None = None,
        on_gpus: bool = False,
        find_other_parameters: Callable[[], Iterable[Copies]] = tuple,
    ) -> None:
        self._exchange, self._hooks = exchange, hooks
        self._settings = partial(plain_settings, optimizer)
        self._parameters = parameters
        self._leaders = tuple(group[0] for group in groups)
        self._leader_of = {member: group[0] for group in groups for member in group}
        self.optimizers = StorageOptimizers(
            optimizer,
            parameters,
            self._leaders,
            exchange.sharing,
            on_gpus=on_gpus,
            holds=exchange.holds,
            find_other_parameters=find_other_parameters,
        )
        self._on_gpus = on_gpus
        numbers = sum(copies[0].numel() for copies in parameters)
        self._is_at_once = exchange.is_local and len(self._leaders) == 1 and not on_gpus and numbers <= _FEW
        self._home = parameters[0][0].device if parameters else torch.device("cpu")
        self.skips = Skips(self._home)
        self._logged_waiting = False
        self._slices = {
            replica: _Slice(indices, self._leader_of[replica], [parameters[index] for index in indices])
            for replica, indices in slices_of(parameters, groups).items()
        }
        self._moments: list[list[float]] = [[] for _ in self._leader_of]  # of the last update, by replica

    @property
    def times(self) -> tuple[UpdateTimes | None, ...]:
        """The times of the last update, one item for each replica; None if it was skipped or failed."""
        return tuple(UpdateTimes(*moments) if len(moments) == _NUM_MOMENTS else None for moments in self._moments)

    def run(
        self,
        context: ReplicaContext,
        totals: Totals,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StepResult:
        """One update. Every replica must call it; all get an equal result. See ``MirroredOptimizer.update``."""
        # Nothing here is random, and the replica's function mode would be asked at every access to a ".grad": for
        # MobileNetV2 it made 11 ms of an update that takes 2.
        with DisableTorchFunction():
            if not context.watchers:
                return self._run(context, totals, clip_norm, scaler)
            replica = context.local_replica
            parameters = [copies[replica] for copies in self._parameters]
            for watcher in context.watchers:
                watcher.update_begins(replica, parameters, totals)
            result = self._run(context, totals, clip_norm, scaler)
            for watcher in context.watchers:
                watcher.update_ended(replica, parameters)
            return result

    def is_of_one_device(self, context: ReplicaContext) -> bool:
        """Whether there is nothing to sum, and nobody who looks: an update of one replica, on a CPU."""
        has_hooks = self._hooks is not None and self._hooks.any
        is_seen = self._on_gpus or context.watchers or has_hooks
        return context.num_replicas_in_sync == 1 and self._exchange.is_local and not is_seen

    def run_plain(self, context: ReplicaContext) -> None:
        """The update where ``is_of_one_device``, by the gradients as they are: ``run`` with a count of 1."""
        part, moments = self._slices[0], self._moments[0]
        began = time.perf_counter()
        moments[:] = [began]  # one alone says that the update has failed
        with DisableTorchFunction():
            self.optimizers.align()
            self.optimizers.others_are_whole = True
            if self.optimizers.divisible:
                self.optimizers.step_slice(part.leader, part.parameters)
            else:
                context.meet("optimizer update", None, lambda _: self.optimizers.step(part.leader))
        ended = time.perf_counter()
        moments[:] = [began, began, began, ended, ended]

    def clip(self, context: ReplicaContext, clip_norm: float) -> Tensor:
        """Before ``apply``: clips the sums in replica 0's copies; returns their norm before. All must call it."""
        part = self._slices[context.local_replica]
        with DisableTorchFunction():
            norm: Tensor = context.meet("gradient norm", self._norms(part.indices, part.leader), self._global_norm)
            if math.isfinite(clip_norm) and part.leader == self._leaders[0]:
                scale_to_norm(gradients_of(part.copies, part.leader), norm, clip_norm)
        return norm

    def apply(self, context: ReplicaContext) -> None:
        """Updates every storage by the gradients in replica 0's copies. All must call it."""
        replica, first = context.local_replica, self._leaders[0]
        part = self._slices[replica]
        with DisableTorchFunction():
            for watcher in context.watchers:
                watcher.sums_applied(replica, [copies[first] for copies in self._parameters if replica == first])
            self.optimizers.others_are_whole = context.num_replicas_in_sync == 1
            context.meet("optimizer update", None, self._begin_apply)
            if self.optimizers.divisible:
                self.optimizers.step_slice(part.leader, part.parameters)
            context.meet("end of the optimizer update", None, self._close)
            for watcher in context.watchers:
                watcher.update_ended(replica, [copies[replica] for copies in self._parameters])

    def _begin_apply(self, _: list[None]) -> None:
        spread(self._parameters, self._leaders)  # the first one's, as they are now
        self.optimizers.align()

    def _run(
        self, context: ReplicaContext, totals: Totals, clip_norm: float | None, scaler: torch.amp.GradScaler | None
    ) -> StepResult:
        replica = context.local_replica
        part = self._slices[replica]
        moments = self._moments[replica] = [time.perf_counter()]
        result: StepResult
        if self._is_at_once and scaler is None:
            result = context.meet("optimizer update", totals, partial(self._run_at_once, clip_norm))
            return result
        result = context.meet("optimizer update", totals, self._open)
        moments.append(time.perf_counter())
        if result.skipped is True:
            return result
        self.optimizers.others_are_whole = context.num_replicas_in_sync == 1 and _is_one(result.count)
        self._exchange.run(context, part.indices)
        moments.append(time.perf_counter())
        if scaler is not None:
            finish = partial(self._finish_scaled, result, clip_norm, scaler)
            result = context.meet("scaled optimizer update", None, finish)
            moments += [time.perf_counter()] * (_NUM_MOMENTS - len(moments))
            return result
        gradients = gradients_of(part.copies, part.leader)
        divide(gradients, _divisor(result.count))
        if self._hooks is not None and self._hooks.any:
            context.meet("hooks on parameters", self._hooks, lambda hooks: hooks[0].call(self._leaders))
            gradients = gradients_of(part.copies, part.leader)
        norm = None
        if clip_norm is not None:
            norm = context.meet("gradient norm", self._norms(part.indices, part.leader), self._global_norm)
            if math.isfinite(clip_norm):
                scale_to_norm(gradients, norm, clip_norm)
        if self.optimizers.divisible:
            self.optimizers.step_slice(part.leader, part.parameters, on_device(result.skipped))
            moments.append(time.perf_counter())
        context.meet("end of the optimizer update", None, self._close)
        moments += [time.perf_counter()] * (_NUM_MOMENTS - len(moments))
        return StepResult(result.total, result.count, _reported(norm, result.skipped), result.skipped)

    def _run_at_once(self, clip_norm: float | None, totals: list[Totals]) -> StepResult:
        """A whole update of one storage, in one thread: the same numbers, without two more barriers.

        These barriers take 0.15 ms of a step of two replicas on two cores, and 0.55 ms of a step of four. With 330,000
        weights a step with slices takes 1.06 of one without, and with 5 million the same time (Adam, torch 2.13).
        """
        opened = time.perf_counter()
        result, leader = self._open(totals), self._leaders[0]
        if result.skipped is True:
            return result
        self.optimizers.others_are_whole = len(totals) == 1 and _is_one(result.count)
        self._exchange.run_at_once()
        exchanged = time.perf_counter()
        divide(gradients_of(self._parameters, leader), _divisor(result.count))
        if self._hooks is not None and self._hooks.any:
            self._hooks.call(self._leaders)
        norm = None
        if clip_norm is not None:
            norm = self._global_norm([self._norms(range(len(self._parameters)), leader)])
            if math.isfinite(clip_norm):
                scale_to_norm(gradients_of(self._parameters, leader), norm, clip_norm)
        divisible = self.optimizers.divisible
        if divisible:
            self.optimizers.step_slice(leader, [copies[leader] for copies in self._parameters])
        updated = time.perf_counter()
        self._close([])
        closed = time.perf_counter()
        for moments in self._moments:
            moments += [opened, exchanged, updated if divisible else closed, closed]
        return StepResult(result.total, result.count, _reported(norm, result.skipped), result.skipped)

    def _open(self, totals: list[Totals]) -> StepResult:
        """The sums of all replicas, and whether the update is skipped: on the device, if that may decide it."""
        total: Number
        count: Number
        if self._decides_on_device():
            total = _summed_on(self._home, [replica_totals.total for replica_totals in totals])
            count = _summed_on(self._home, [replica_totals.count for replica_totals in totals])
        else:
            rows = [(float(replica_totals.total), float(replica_totals.count)) for replica_totals in totals]
            total, count = self._exchange.open(rows, self._settings)
        if not isinstance(total, Tensor):
            check_finite(total)
        self.optimizers.align()
        return StepResult(total, count, skipped=self.skips.of(total, count))

    def _decides_on_device(self) -> bool:
        """Whether updates can be skipped without the host; logs once why not."""
        if not self._on_gpus:
            return False
        why = self.optimizers.not_fused
        reason = None if why is None else f"no fused kernels update the weights: {why}"
        if reason is None and not self._exchange.stays_on_device:
            reason = "the workers exchange losses and counts through the host"
        if reason is not None and not self._logged_waiting:
            self._logged_waiting = True
            _LOG.info("the host waits for the GPU in every update: %s", reason)
        return reason is None

    def _close(self, _: list[None]) -> None:
        if not self.optimizers.divisible:
            for leader in self._leaders:
                self.optimizers.step(leader)
        self.optimizers.finish()
        self._clear_all_but_first()

    def _clear_all_but_first(self) -> None:
        for copies in self._parameters:
            for leader in self._leaders[1:] if self._exchange.keeps_sums else self._leaders:
                copies[leader].grad = None

    def _norms(self, indices: Sequence[int], leader: int) -> dict[int, Tensor]:
        """The norm of each gradient by parameter number; of replica 0's group alone."""
        if leader != self._leaders[0]:
            return {}
        return gradient_norms(self._parameters, indices, leader)

    def _global_norm(self, parts: list[dict[int, Tensor]]) -> Tensor:
        return self._exchange.norm({index: norm for part in parts for index, norm in part.items()})

    def _finish_scaled(
        self, opened: StepResult, clip_norm: float | None, scaler: torch.amp.GradScaler, _: list[None]
    ) -> StepResult:
        """The rest of an fp16 update, in one thread: torch's scaler must see all gradients at once."""
        everything = AmpAdapter(self.optimizers, self._parameters, self._leaders, opened.skipped)
        for leader in self._leaders:
            divide(gradients_of(self._parameters, leader), _divisor(opened.count))
        scaler.scale(torch.ones((), device=self._parameters[0][0].device))  # makes its state on first use
        scaler.unscale_(everything)
        norm = None
        if clip_norm is not None:
            norm = self._global_norm([self._norms(range(len(self._parameters)), self._leaders[0])])
            for leader in self._leaders if math.isfinite(clip_norm) else ():
                scale_to_norm(gradients_of(self._parameters, leader), norm, clip_norm)
        scaler.step(everything)
        self.optimizers.finish()
        scaler.update()
        self._clear_all_but_first()
        return StepResult(opened.total, opened.count, _reported(norm, opened.skipped), everything.skipped)


def _reported(norm: Tensor | None, skip: bool | Tensor) -> Number | None:
    """The norm of the result: a number, or a tensor if the host waits for nothing else either."""
    return norm if norm is None or isinstance(skip, Tensor) else float(norm)
