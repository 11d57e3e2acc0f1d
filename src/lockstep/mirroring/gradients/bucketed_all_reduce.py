"""Sums gradients between workers in buckets, during the backward pass (as DDP does; Li et al. 2020).

    gradient hook of each parameter, in each local replica:  the gradient is there
    all gradients of the next bucket are there:  a flat tensor for each node of the local replicas -> asynchronous sum
    optimizer step:  sum the buckets that are not full -> wait for all -> the leaders' ".grad"

All workers send buckets in the order of the plan. In ``no_sync`` a backward pass sends nothing, and the next one sends
the accumulated gradients. A gradient that changes after its bucket was sent (a second backward pass without
``no_sync``, clipping by hand) is noticed at the step, which then sends all buckets again. Frozen parameters are not
sent; every step checks which ones are frozen.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import nn

from lockstep._torch_compat import DisableTorchFunction, foreach_add_, foreach_copy_
from lockstep.collectives.communicator import Communicator
from lockstep.collectives.process_group import ProcessGroup
from lockstep.collectives.sum_order import Node, tree_sum
from lockstep.config import LogicalDevice
from lockstep.errors import UsageError
from lockstep.mirroring.gradients.local_sum import Copies, GradientExchange, Settings, spread, views_of
from lockstep.mirroring.gradients.state import EngineHook
from lockstep.replicas.context import ReplicaContext
from lockstep.replicas.device.driver import StreamEvent, driver_of

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that something is sent soon."""
LAST_BUCKET_BYTES = 2**18
"""The last ones are smaller, since nothing is computed while they are sent."""
_FRACTION_OF_REST = 2
"""A bucket holds at most half of what is left. Over 1 Gbit/s MobileNetV2 (9 MB) waited 67 ms a step for one bucket of
all but the first megabyte, and 0.1 ms for these, or for thirds, whose number costs another 3 ms of CPU time."""
_SAMPLED_BYTES = 32
_LOG = logging.getLogger("lockstep")
_Snapshot = tuple[torch.Tensor, torch.Tensor | None, int]
"""A parameter, its gradient at some time, and the gradient's version."""


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[str], bucket_bytes: int, indices: Container[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Divides parameters into buckets, whose gradients are sent in one flat tensor; the last parameters come first.

    Args:
        sizes: bytes of each parameter's gradient.
        kinds: what must be equal inside a bucket: the dtype.
        bucket_bytes: the largest bucket; a larger parameter is alone.
        indices: the numbers of the parameters that have gradients; None is all of them.
    """
    buckets: list[list[int]] = []
    parameters = [parameter for parameter in range(len(sizes)) if indices is None or parameter in indices]
    free, kind, rest = 0, "", sum(sizes[parameter] for parameter in parameters)
    for parameter in reversed(parameters):
        if not buckets or sizes[parameter] > free or kinds[parameter] != kind:
            largest = bucket_bytes if buckets else min(bucket_bytes, FIRST_BUCKET_BYTES)
            free = min(largest, max(LAST_BUCKET_BYTES, rest // _FRACTION_OF_REST))
            kind = kinds[parameter]
            buckets.append([])
        buckets[-1].append(parameter)
        free -= sizes[parameter]
        rest -= sizes[parameter]
    return tuple(map(tuple, buckets))


class GradientMarks:
    """The last event that each local replica on a GPU has recorded."""

    def __init__(self, devices: Sequence[LogicalDevice]) -> None:
        self._sources = [(driver_of(device), device.torch_device) for device in devices] if len(devices) > 1 else []
        self._last: list[StreamEvent | None] = [None] * len(self._sources)

    def note(self, replica: int) -> None:
        """Notes that a gradient of a replica is there; called by its hook, in the thread that has made it."""
        driver, device = self._sources[replica] if self._sources else (None, None)
        if driver is not None and device is not None:
            self._last[replica] = StreamEvent(driver, device, driver.record(driver.current_stream(device)))

    def precede(self) -> None:
        """What the calling thread queues from now on, on each device, runs after the gradients noted there."""
        for mark in self._last:
            if mark is not None:
                mark.wait()


class BucketExchange(GradientExchange):
    """Sums the gradients of one optimizer over all replicas of all workers, over its own connection, ``stream``."""

    def __init__(
        self,
        parameters: Sequence[Copies],
        leaders: Sequence[int],
        *,
        workers: Communicator,
        bucket_bytes: int,
        stream: ProcessGroup,
        travel_as: torch.dtype | None,
        marks: GradientMarks,
    ) -> None:
        self._parameters = parameters
        self._leaders = tuple(leaders)
        self._workers = workers
        self._bucket_bytes = bucket_bytes
        self._stream = stream
        self._travel_as = travel_as
        self._marks = marks
        self.keeps_sums = workers.is_chief
        self._warned = False
        self._pauses: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        # The parameters hold the hooks, and outlive an exchange that add_param_group replaces by another one.
        finalize(self, _remove, self._handles)
        self._make_plan()

    def open(self, totals: Sequence[tuple[float, float]], settings: Settings) -> tuple[float, float]:
        """Exchanges the totals, and completes the exchange of gradients. Every worker must call it.

        Raises CollectiveError if another worker has other settings, frozen parameters or first bytes of weights.
        """
        self._workers.add_digest(self._digest(settings))
        changed = any(bucket.changed for bucket in self._in_flight)
        outdated = _trained(self._parameters) != self._trained
        # The flags travel with the totals: one exchange of numbers an update, whatever has to be agreed.
        rows = [(*pair, changed, outdated) for pair in totals]
        total, count, num_changed, num_outdated = self._workers.sum_numbers("optimizer update", rows)
        changed, outdated = bool(num_changed), bool(num_outdated)
        if changed and not self._warned:
            self._warned = True
            _LOG.warning(
                "gradients changed after they had been sent to the other workers, so all of them were sent again; "
                "where several backward passes add up, run all but the last in `with mirrored.no_sync():`, and clip "
                "what the optimizer's sum_gradients() leaves"
            )
        self._finish(changed=changed, outdated=outdated)
        return total, count

    def _digest(self, settings: Settings) -> int:
        """Of what must be equal on all workers: settings, frozen weights, and the first bytes of weights on a CPU.

        A program that writes weights on one worker alone rarely leaves these unchanged. Reading GPUs would wait.
        """
        weights = [copies[0] for copies in self._parameters]
        digest = zlib.crc32("\n".join(settings()).encode())
        digest = zlib.crc32(bytes([weight.requires_grad for weight in weights]), digest)
        sampled = (weight for weight in weights if weight.is_cpu and type(weight) is nn.Parameter)
        for weight in sampled:
            if weight.layout is torch.strided and (size := min(weight.nbytes, _SAMPLED_BYTES)):
                digest = zlib.crc32(ctypes.string_at(weight.data_ptr(), size), digest)
        return digest

    @contextmanager
    def sending_paused(self, replicas: Sequence[int]) -> Iterator[None]:
        with self._lock:
            self._pauses.update(replicas)
        try:
            yield
        finally:
            with self._lock:
                self._pauses.subtract(replicas)

    def run(self, context: ReplicaContext, indices: Sequence[int]) -> None:
        pass

    def _finish(self, *, changed: bool, outdated: bool) -> None:
        """Sends the rest, or all again, waits for all buckets, and writes the sums to the leaders' ".grad"."""
        buckets = self._all_arrived()
        if outdated:
            self._make_plan()
        if changed or outdated:
            self._begin_cycle()
            buckets = self._all_arrived()
        self._begin_cycle()
        sums = [(self._parameters[index], total) for bucket in buckets for index, total in bucket.sums()]
        for copies, total in sums:
            # Of all replicas, though only leaders get sums: what another one kept would count in the next step.
            for copy in copies:
                copy.grad = None
            copies[self._leaders[0]].grad = total
        spread([copies for copies, _ in sums], self._leaders)

    def _all_arrived(self) -> list[_Bucket]:
        while len(self._in_flight) < len(self._plan):
            self._start(len(self._in_flight))
        for bucket in self._in_flight:
            bucket.wait(self._stream)
        return self._in_flight

    def _begin_cycle(self) -> None:
        self._missing = [
            sum(parameter in self._hooked for parameter in members) * len(self._parameters[0]) for members in self._plan
        ]
        self._arrivals: set[tuple[int, int]] = set()
        self._in_flight: list[_Bucket] = []
        self._starting = False

    def _make_plan(self) -> None:
        """Divides the parameters that are trained on any worker into buckets. Every worker must call it."""
        self._trained = _trained(self._parameters)
        flags = bytes(index in self._trained for index in range(len(self._parameters)))
        flags_of_workers = self._workers.all_gather_bytes("which gradients travel", flags)
        firsts = [copies[0] for copies in self._parameters]
        self._plan = plan_buckets(
            [parameter.numel() * parameter.element_size() for parameter in firsts],
            [f"{parameter.dtype} {parameter.device}" for parameter in firsts],
            self._bucket_bytes,
            # Of any worker: one that has frozen a weight still sends its part of the bucket, or the sizes would differ.
            {index for index, trained in enumerate(zip(*flags_of_workers, strict=True)) if any(trained)},
        )
        self._bucket_of = {index: bucket for bucket, members in enumerate(self._plan) for index in members}
        self._hooked = frozenset(index for index in self._bucket_of if self._parameters[index][0].requires_grad)
        _remove(self._handles)
        for index in self._hooked:
            for replica, copy in enumerate(self._parameters[index]):
                # Not register_hook, which is called with one pass's gradient before it is added to ".grad".
                hook = EngineHook(self._note_gradient, replica, index)
                self._handles.append(copy.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._begin_cycle()

    def _note_gradient(self, replica: int, index: int) -> None:
        """The backward pass of a replica has completed a gradient."""
        bucket = self._bucket_of[index]
        self._marks.note(replica)
        with self._lock:
            if self._pauses[replica] > 0:
                return
            if (replica, index) in self._arrivals:  # a second pass: ``changed`` tells the next update to send all again
                return
            self._arrivals.add((replica, index))
            self._missing[bucket] -= 1
            # One thread at a time: all workers must start their sums in one order, and two replicas that complete two
            # buckets at once would race.
            if self._starting or not self._next_is_full():
                return
            self._starting = True
        self._start_full()

    def _next_is_full(self) -> bool:
        position = len(self._in_flight)
        return position < len(self._missing) and not self._missing[position]

    def _start_full(self) -> None:
        """Sends the buckets that are full, in order, from one thread at a time."""
        while True:
            self._start(len(self._in_flight))
            with self._lock:
                if not self._next_is_full():
                    self._starting = False
                    return

    def _start(self, position: int) -> None:
        members = self._plan[position]
        # A hook runs in its replica's thread, whose function mode would be asked at every call: 1.3 ms of MobileNetV2's
        # 5.9 for all buckets.
        with torch.no_grad(), DisableTorchFunction():
            self._marks.precede()
            parameters = [self._parameters[index] for index in members]
            bucket = _Bucket(members, parameters, self._workers.nodes[self._workers.index], self._travel_as)
            bucket.work = self._stream.start_sum(bucket.parts)
        self._in_flight.append(bucket)


class _Bucket:
    """One bucket in flight: for each node of the local replicas a flat tensor of sums, and of each sum's addends."""

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[Copies],
        nodes: Sequence[Node],
        travel_as: torch.dtype | None,
    ) -> None:
        self._members = members
        self._parameters = [copies[0] for copies in parameters]
        # Before anything is read: a replica may be in its next backward pass already, which must be noticed.
        all_copies = [copy for copies in parameters for copy in copies]
        self._snapshots = [_snapshot(copy) for copy in all_copies]
        self._counts = [sum(copy.grad is not None for copy in copies) for copies in parameters]
        first = nodes[0].begin
        node_sums = [_NodeSum(parameters, range(node.begin - first, node.end - first)).total() for node in nodes]
        self._sum = node_sums[0]
        converts = travel_as is not None and self._sum.dtype == torch.float32
        self.parts = [part.to(travel_as) for part in node_sums] if converts else node_sums
        self.work: Any = None

    @property
    def changed(self) -> bool:
        """Whether a gradient is another one, or was written to, since it was taken."""
        return any(map(_is_changed, self._snapshots))

    def wait(self, stream: ProcessGroup) -> None:
        if self.work is not None:
            stream.wait(self.work, "the exchange of gradients")
            self.work = None
            if self.parts[0] is not self._sum:
                self._sum.copy_(self.parts[0])
            self.parts = []

    def sums(self) -> list[tuple[int, torch.Tensor | None]]:
        """Each parameter's number and summed gradient; None where no replica of any worker had one."""
        # With a gradient here the sum has one too: the host would wait for a GPU to read the counts.
        flags = self._counts if all(self._counts) else self._sum[-len(self._members) :].tolist()
        views = views_of(self._sum, self._parameters)
        return [(index, view if flag else None) for index, view, flag in zip(self._members, views, flags, strict=True)]


class _NodeSum:
    """The sum of a bucket's gradients over the replicas of a node, in the order of ``sum_order``, in memory of its own.

    The memory is new each time: that of the last one is gradients that the user may still hold.
    """

    def __init__(self, parameters: Sequence[Copies], replicas: Sequence[int]) -> None:
        self._parameters, self._replicas = parameters, replicas
        self._firsts = [copies[0] for copies in parameters]

    def total(self) -> torch.Tensor:
        """A flat tensor: the sums one after another, then for each the number of gradients that it has."""
        replicas: Sequence[torch.Tensor | int] = self._replicas
        summed = tree_sum(replicas, self._plus)
        return self._flat(summed) if isinstance(summed, int) else summed

    def _plus(self, one: torch.Tensor | int, other: torch.Tensor | int) -> torch.Tensor:
        """Adds what is a replica's number, whose gradients are meant, or a flat tensor."""
        into = self._flat(one) if isinstance(one, int) else one
        if isinstance(other, torch.Tensor):
            return into.add_(other)
        pairs = [(view, gradient) for view, gradient in self._gradients(other, into) if gradient is not None]
        if pairs:
            foreach_add_(*map(list, zip(*pairs, strict=True)))
        self._add_counts(into, other)
        return into

    def _flat(self, replica: int) -> torch.Tensor:
        home = self._firsts[0]
        numbers = sum(parameter.numel() for parameter in self._firsts)
        # The counts travel in the same tensor: a second message for them would cost another round trip a bucket.
        flat = torch.empty(numbers + len(self._firsts), dtype=home.dtype, device=home.device)
        flat[numbers:].zero_()
        copied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for view, gradient in self._gradients(replica, flat):
            if gradient is None:
                view.fill_(-0.0)  # which changes nothing that it is added to; 0.0 would make a -0.0 positive
            else:
                copied[0].append(view)
                copied[1].append(gradient)
        if copied[0]:
            foreach_copy_(*copied)
        self._add_counts(flat, replica)
        return flat

    def _gradients(self, replica: int, into: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each parameter's place in a flat tensor, and the gradient that a replica has for it."""
        for view, copies in zip(views_of(into, self._firsts), self._parameters, strict=True):
            gradient = copies[replica].grad
            if gradient is not None and gradient.is_sparse:
                raise UsageError(
                    f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, and gradients travel "
                    "dense between workers; make its layer with sparse=False"
                )
            yield view, None if gradient is None else gradient.to(view.device)

    def _add_counts(self, flat: torch.Tensor, replica: int) -> None:
        """Notes which gradients a replica has, without a copy from the host, which would wait for a GPU."""
        place = len(flat) - len(self._parameters)
        for has_gradient, run in itertools.groupby(copies[replica].grad is not None for copies in self._parameters):
            end = place + len(list(run))
            if has_gradient:
                flat[place:end].add_(1)
            place = end


def _snapshot(parameter: torch.Tensor) -> _Snapshot:
    # The version counts writes in place, so that no values are compared, for which the host would wait for a GPU.
    gradient = parameter.grad
    return parameter, gradient, _version(gradient)


def _is_changed(snapshot: _Snapshot) -> bool:
    parameter, gradient, version = snapshot
    return parameter.grad is not gradient or _version(gradient) != version


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _trained(parameters: Sequence[Copies]) -> frozenset[int]:
    """The numbers of those that require a gradient, or that were given one by hand."""
    return frozenset(
        index
        for index, copies in enumerate(parameters)
        if copies[0].requires_grad or any(copy.grad is not None for copy in copies)
    )


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
