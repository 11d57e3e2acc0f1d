"""One update of all replicas.

    replica r:  [barrier: totals, NaN check] -> sum a slice -> [barrier: between storages] -> divide
                -> [barrier: user's hooks] -> [barrier: norm; clip] -> update a slice
                -> [barrier: end; with ZeRO-1, all workers get all weights]

Gradients are summed, never averaged; the count divides them once, where one is given. ``sum`` and ``apply`` are the two
halves, for a program that looks at the sums in between, outside replicas. On GPUs the host reads nothing: totals,
counts, norms and the decision to skip stay there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import Optimizer

from lockstep._torch_compat import DisableTorchFunction, foreach_mul_, foreach_norm
from lockstep.mirroring.gradients.local import Copies, GradientExchange, divide, gradients_of
from lockstep.mirroring.gradients.user import hooked, run_hooks
from lockstep.mirroring.optim.kernels import AmpAdapter, StorageOptimizers
from lockstep.mirroring.optim.misuse import plain_settings
from lockstep.mirroring.optim.nonfinite import Number, Skips, check_finite, divisor, on_device, summed
from lockstep.replicas.context import ReplicaContext
from lockstep.replicas.hooks import current_observer


def balance(sizes: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Divides items into ``parts`` of about equal total size, largest first to the least loaded (Graham's LPT rule).

    Args:
        sizes: one size per item.
        parts: how many parts, at least 1.

    Returns:
        The item numbers of each part in ascending order; parts may be empty. The same sizes give the same division.
    """
    loads = [0] * parts
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        part = min(range(parts), key=lambda part: (loads[part], part))
        loads[part] += sizes[item]
        members[part].append(item)
    return tuple(tuple(sorted(part)) for part in members)


@dataclass(frozen=True, kw_only=True)
class UpdateTimes:
    """Moments of one replica's update, in seconds of ``time.perf_counter()``.

    Args:
        arrived_s: the replica reached the update.
        opened_s: all replicas had.
        exchanged_s: the gradients of this replica's slice of the parameters were summed.
        updated_s: the slice was updated. Where an update cannot be divided among the replicas (an optimizer that is
            not elementwise, fp16), one of them does it while the others wait, and this is the end of that wait.
        closed_s: all replicas were done.
    """

    arrived_s: float
    opened_s: float
    exchanged_s: float
    updated_s: float
    closed_s: float

    @property
    def waiting_s(self) -> float:
        """Seconds spent waiting for other replicas, before and after the work."""
        return (self.opened_s - self.arrived_s) + (self.closed_s - self.updated_s)

    @property
    def exchange_s(self) -> float:
        """Seconds spent summing gradients."""
        return self.exchanged_s - self.opened_s

    @property
    def update_s(self) -> float:
        """Seconds spent dividing, clipping and updating."""
        return self.updated_s - self.exchanged_s


class UpdateClock:
    """One replica's stopwatch over its updates."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def start(self, now_s: float) -> None:
        """The replica has arrived."""
        self._marks = [now_s]

    def mark(self, now_s: float) -> None:
        """The next part is done."""
        self._marks.append(now_s)

    def finish(self, now_s: float) -> None:
        """All are done. What was not marked until now was done while this replica waited."""
        self._marks += [now_s] * (len(UpdateTimes.__dataclass_fields__) - len(self._marks))

    @property
    def times(self) -> UpdateTimes | None:
        """The last update's; None before the first, and after one that was skipped or did not come to its end."""
        if len(self._marks) != len(UpdateTimes.__dataclass_fields__):
            return None
        return UpdateTimes(**dict(zip(UpdateTimes.__dataclass_fields__, self._marks, strict=True)))


_LOG = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Totals:
    """One replica's sums since the last update.

    Args:
        total: the sum of its loss values, a number or a tensor of one element.
        count: how many there were: examples, or tokens.
    """

    total: float | torch.Tensor
    count: float | torch.Tensor


@dataclass(frozen=True)
class StepResult:
    """What an update did, equal on all replicas. What a GPU may still be computing is a tensor that nobody has read.

    Args:
        total: the loss summed over all replicas.
        count: the count summed over all replicas.
        grad_norm: the gradients' norm before clipping; None if not asked for.
        skipped: nothing was counted, fp16 gradients overflowed, or, where it is a tensor of 0.0 or 1.0, this total or a
            former one was not finite: no weight was touched.
    """

    total: Number
    count: Number
    grad_norm: Number | None = None
    skipped: bool | torch.Tensor = False


class LockstepUpdate:
    """Sums gradients over all replicas and updates every storage of the weights alike.

    Args:
        optimizer: the user's optimizer, over replica 0's parameters.
        parameters: per parameter its copies, one per replica.
        groups: the replicas by storage of the weights, replica 0's group first; the first of each leads it.
        exchange: how the gradients are summed.
        on_gpus: whether all replicas are on GPUs, where nothing is read that need not be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Copies],
        groups: Sequence[Sequence[int]],
        exchange: GradientExchange,
        *,
        on_gpus: bool = False,
    ) -> None:
        self._exchange = exchange
        self._settings = partial(plain_settings, optimizer)
        self._parameters = parameters
        self._groups = {member: tuple(group) for group in groups for member in group}
        self._leaders = tuple(group[0] for group in groups)
        self.updaters = StorageOptimizers(optimizer, parameters, self._leaders, exchange.sharing, on_gpus=on_gpus)
        self._on_gpus = on_gpus
        self._home = parameters[0][0].device if parameters else torch.device("cpu")
        self.skips = Skips(self._home)
        self._told = False
        self._hooked: list[Copies] = []
        sizes = [copies[0].numel() for copies in parameters]
        self._slices: dict[int, list[int]] = {}
        for group in groups:
            self._slices |= dict(zip(group, map(list, balance(sizes, len(group))), strict=True))
        self._clocks = tuple(UpdateClock() for _ in self._groups)

    @property
    def times(self) -> tuple[UpdateTimes | None, ...]:
        """Where the time of the last update went, one item per replica."""
        return tuple(clock.times for clock in self._clocks)

    def held(self, replicas: Sequence[int]) -> AbstractContextManager[None]:
        """Inside the block no backward pass of these local replicas sends gradients to other workers."""
        return self._exchange.held(replicas)

    def run(
        self,
        context: ReplicaContext,
        totals: Totals,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StepResult:
        """One update. Every replica must call it; all get an equal result.

        Raises:
            NonFiniteLossError: the summed total is NaN or infinite; no weight has been touched. Not where the result's
                total is a tensor: there whoever reads it raises this.
        """
        # Nothing here is random, and the replica's function mode would be asked at every access to a ".grad": for
        # MobileNetV2 it made 11 ms of an update that takes 2.
        observer, replica = current_observer(), context.local_replica
        with DisableTorchFunction():
            if observer is None:
                return self._run(context, totals, clip_norm, scaler)
            own = [copies[replica] for copies in self._parameters]
            observer.update_begins(context, own, totals)
            result = self._run(context, totals, clip_norm, scaler)
            observer.update_ended(context, own)
            return result

    def sum(self, context: ReplicaContext) -> None:
        """The first half: leaves the sums over all replicas with replica 0's copies, on every worker.

        Every replica must call it.
        """
        observer, replica = current_observer(), context.local_replica
        with DisableTorchFunction():
            if observer is not None:
                own = [copies[replica] for copies in self._parameters]
                observer.update_begins(context, own, Totals(0.0, float(context.replica_id_in_sync_group == 0)))
            context.meet("sum of gradients", None, lambda _: self._exchange.open(0.0, 1.0, self._settings))
            self._exchange.run(context, self._slices[replica])
            context.meet("end of the sum of gradients", None, self._end_sum)

    def _end_sum(self, _: list[None]) -> None:
        run_hooks(hooked(self._parameters), self._leaders[:1])
        self._clear(self._leaders[1:])

    def clip(self, context: ReplicaContext, clip_norm: float) -> torch.Tensor:
        """Between the halves: clips the sums of replica 0's copies; gives their norm before. All must call it."""
        first = self._leaders[0]
        own = self._groups[context.local_replica][0] == first
        mine = [index for index in self._slices[context.local_replica] if own]
        with DisableTorchFunction():
            norm: torch.Tensor = context.meet("gradient norm", self._norms(mine, first), self._global_norm)
            if math.isfinite(clip_norm):
                _clip(gradients_of([self._parameters[index] for index in mine], first), norm, clip_norm)
        return norm

    def apply(self, context: ReplicaContext) -> None:
        """The second half: updates every storage by the gradients that replica 0's copies hold. All must call it."""
        observer, replica = current_observer(), context.local_replica
        leader = self._groups[replica][0]
        with DisableTorchFunction():
            context.meet("optimizer update", None, self._take_over)
            if self.updaters.divisible:
                mine = [self._parameters[index][leader] for index in self._slices[replica]]
                self.updaters.step_slice(leader, mine)
            context.meet("end of the optimizer update", None, self._close)
            if observer is not None:
                observer.update_ended(context, [copies[replica] for copies in self._parameters])

    def _take_over(self, _: list[None]) -> None:
        """Gives all leaders the first one's gradients as they are now."""
        first, *others = self._leaders
        for copies in self._parameters:
            gradient = copies[first].grad
            for leader in others:
                copies[leader].grad = None if gradient is None else gradient.to(copies[leader].device, copy=True)
        self.updaters.align()

    def _run(
        self,
        context: ReplicaContext,
        totals: Totals,
        clip_norm: float | None,
        scaler: torch.amp.GradScaler | None,
    ) -> StepResult:
        replica = context.local_replica
        leader, mine, clock = self._groups[replica][0], self._slices[replica], self._clocks[replica]
        clock.start(time.perf_counter())
        result: StepResult = context.meet("optimizer update", totals, self._open)
        clock.mark(time.perf_counter())
        if result.skipped is True:
            return result
        self._exchange.run(context, mine)
        clock.mark(time.perf_counter())
        if scaler is not None:
            return self._run_scaled(context, result, clip_norm, scaler)
        gradients = gradients_of([self._parameters[index] for index in mine], leader)
        divide(gradients, divisor(result.count))
        if self._hooked:
            context.meet("hooks on parameters", None, lambda _: run_hooks(self._hooked, self._leaders))
            gradients = gradients_of([self._parameters[index] for index in mine], leader)
        norm = None
        if clip_norm is not None:
            norm = context.meet("gradient norm", self._norms(mine, leader), self._global_norm)
            _clip(gradients, norm, clip_norm)
        if self.updaters.divisible:
            chosen = [self._parameters[index][leader] for index in mine]
            self.updaters.step_slice(leader, chosen, on_device(result.skipped))
            clock.mark(time.perf_counter())
        context.meet("end of the optimizer update", None, self._close)
        clock.finish(time.perf_counter())
        return StepResult(result.total, result.count, _told_norm(norm, result.skipped), result.skipped)

    def _open(self, totals: list[Totals]) -> StepResult:
        """The sums of all replicas, and whether the update is skipped: on the device where that may decide it."""
        home = self._home if self._decides_on_device() else None
        total = summed([each.total for each in totals], home)
        count = summed([each.count for each in totals], home)
        if home is None:
            total, count = self._exchange.open(float(total), float(count), self._settings)
        if not isinstance(total, torch.Tensor):
            check_finite(total)
        self.updaters.align()
        self._hooked = hooked(self._parameters)
        return StepResult(total, count, skipped=self.skips.of(total, count))

    def _decides_on_device(self) -> bool:
        """Whether updates can be skipped without the host knowing; says once why not."""
        if not self._on_gpus:
            return False
        why = self.updaters.not_fused
        reason = None if why is None else f"no fused kernels update the weights: {why}"
        if reason is None and not self._exchange.stays_on_device:
            reason = "the workers exchange losses and counts through the host"
        if reason is not None and not self._told:
            self._told = True
            _LOG.info("the host waits for the GPU in every update: %s", reason)
        return reason is None

    def _close(self, _: list[None]) -> None:
        if not self.updaters.divisible:
            for leader in self._leaders:
                self.updaters.step(leader)
        self.updaters.finish()
        self._leave_sums_with_first()

    def _leave_sums_with_first(self) -> None:
        self._clear(self._leaders[1:] if self._exchange.keeps_sums else self._leaders)

    def _clear(self, leaders: Sequence[int]) -> None:
        for copies in self._parameters:
            for leader in leaders:
                copies[leader].grad = None

    def _norms(self, indices: Sequence[int], leader: int) -> dict[int, torch.Tensor]:
        """The norm of each gradient by parameter number; only replica 0's group is asked."""
        if leader != self._leaders[0]:
            return {}
        with_gradient = [index for index in indices if self._parameters[index][leader].grad is not None]
        gradients = gradients_of([self._parameters[index] for index in with_gradient], leader)
        norms = foreach_norm(gradients) if gradients else ()
        return dict(zip(with_gradient, norms, strict=True))

    def _global_norm(self, parts: list[dict[int, torch.Tensor]]) -> torch.Tensor:
        norms = {index: norm for part in parts for index, norm in part.items()}
        return self._exchange.norm(norms)

    def _run_scaled(
        self, context: ReplicaContext, opened: StepResult, clip_norm: float | None, scaler: torch.amp.GradScaler
    ) -> StepResult:
        """The rest of an fp16 update, in one thread: torch's scaler wants to see all gradients at once."""

        def finish(_: list[None]) -> StepResult:
            everything = AmpAdapter(self.updaters, self._parameters, self._leaders, opened.skipped)
            gradients = {leader: gradients_of(self._parameters, leader) for leader in self._leaders}
            for each in gradients.values():
                divide(each, divisor(opened.count))
            scaler.scale(torch.ones((), device=self._parameters[0][0].device))  # makes its state on first use
            scaler.unscale_(everything)
            run_hooks(self._hooked, self._leaders)
            gradients = {leader: gradients_of(self._parameters, leader) for leader in self._leaders}
            norm = None
            if clip_norm is not None:
                first = self._leaders[0]
                norm = self._global_norm([self._norms(range(len(self._parameters)), first)])
                for each in gradients.values():
                    _clip(each, norm, clip_norm)
            scaler.step(everything)
            self.updaters.finish()
            scaler.update()
            self._leave_sums_with_first()
            told = _told_norm(norm, opened.skipped)
            return StepResult(opened.total, opened.count, told, everything.skipped)

        result: StepResult = context.meet("scaled optimizer update", None, finish)
        self._clocks[context.local_replica].finish(time.perf_counter())
        return result


def _told_norm(norm: torch.Tensor | None, skip: bool | torch.Tensor) -> Number | None:
    """The norm as it is reported: read, but where the host waits for nothing else either."""
    return norm if norm is None or isinstance(skip, torch.Tensor) else float(norm)


def _clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, clip_norm: float) -> None:
    """Scales gradients in place, as torch.nn.utils.clip_grad_norm_ does (Pascanu et al. 2013)."""
    if not gradients:
        return
    coefficient = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    foreach_mul_(list(gradients), coefficient.to(gradients[0].device))
