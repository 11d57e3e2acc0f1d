"""One run of a step: a body per replica, in the replicas' threads, to one result each or to one error.

    run -- a job to each thread -- slot, random numbers, caller's state, context -- body -- leave
     `---------------- waits until all have left; then results, or the first error -----------'

``IssuePolicy`` decides how many replicas of one device issue work at once; the strategy decides what a body does.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from lockstep._torch_compat import compiled_code_for, is_profiled
from lockstep.config import LogicalDevice
from lockstep.errors import ReplicaError
from lockstep.replicas.barrier import IssueSlot, ReplicaBarrier, ReplicaStopped
from lockstep.replicas.caller_state import CallerState, Profile
from lockstep.replicas.caller_thread import CallerThread
from lockstep.replicas.context import ReplicaContext, SoleReplicaContext, get_replica_context
from lockstep.replicas.cpu.linear import linear, onednn_is_faster
from lockstep.replicas.cpu.memory import keep_freed_memory
from lockstep.replicas.cpu.openmp_team import end_openmp_team, end_teams_before_forks
from lockstep.replicas.device.driver import driver_of
from lockstep.replicas.device.memory import DeviceMemory
from lockstep.replicas.device.streams import GpuReplica, GpuSlot, RunStreams
from lockstep.replicas.issue_gate import IssueGate
from lockstep.replicas.issue_policy import IssuePolicy
from lockstep.replicas.owner import Owner
from lockstep.replicas.rng.default_generator import patch_default_generator
from lockstep.replicas.rng.function_mode import ReplicaRng
from lockstep.replicas.rng.generators import ReplicaGenerators, replica_generator
from lockstep.replicas.threads import ReplicaThreads, run_in_merge_call

ErrorNote = Callable[[str, int, BaseException], str]
"""Makes the note on an error of a replica, given the replica's name and local number; empty for none."""
STOP_GRACE_S = 1.0
"""Seconds that the others of a failed run get to reach a collective or their end before they are interrupted."""
STOP_LIMIT_S = 30.0
"""Seconds after the interrupt at which a replica that still runs is given up."""


def core_shares(devices: Sequence[LogicalDevice], cores: int) -> tuple[int, ...]:
    """Each replica's intra-op threads: an equal part of the cores for the CPU's replicas, at least one.

    By the layout alone: torch adds up large tensors in a different order with another number of threads.
    """
    on_cpu = sum(device.kind == "CPU" for device in devices)
    return tuple(max(1, cores // on_cpu) if device.kind == "CPU" else 1 for device in devices)


def _make_rng(device: LogicalDevice, generator: torch.Generator) -> ReplicaRng:
    # A device of kind "GPU" that computes on CPU tensors (the tests' stand-in) swaps the default generator by itself.
    swaps = device.kind == "GPU" and device.torch_device.type == "cpu"
    instead = {F.linear: linear} if device.kind == "CPU" and onednn_is_faster() else {}
    return ReplicaRng(generator, applies=(lambda: False) if swaps else get_replica_context, instead=instead)


def _make_gpu(device: LogicalDevice, generator: torch.Generator) -> GpuReplica | None:
    driver = driver_of(device)
    return None if driver is None else GpuReplica(device, driver, generator.initial_seed())


class ReplicaRunner:
    """Runs bodies in the replicas' threads, one for each of ``devices``.

    A replica waits up to ``timeout_s`` seconds in one collective. ``first_replica`` is the number of the first one
    among the replicas of all workers. ``failing`` is called with the error of a failed run at once, before its other
    replicas have stopped. ``threads`` is the number of intra-op threads of each; None divides the cores.

    Attributes:
        seed: of the replicas' random numbers.
        threads: the number of intra-op threads of each replica.
    """

    def __init__(
        self,
        devices: Sequence[LogicalDevice],
        *,
        seed: int,
        timeout_s: float,
        first_replica: int = 0,
        failing: Callable[[BaseException], None] | None = None,
        threads: int | None = None,
    ) -> None:
        cores = torch.get_num_threads()
        shares = core_shares(devices, cores) if threads is None else (threads,) * len(devices)
        self._devices = tuple(devices)
        numbers = range(first_replica, first_replica + len(devices))
        self._names = [f"replica {number} ({device.name})" for number, device in zip(numbers, devices, strict=True)]
        self._timeout_s = timeout_s
        self._failing = failing
        generators = [replica_generator(seed, number) for number in numbers]
        self._random = list(map(_make_rng, devices, generators))
        self._gpu = list(map(_make_gpu, devices, generators))
        self._on_gpus = [gpu for gpu in self._gpu if gpu is not None]
        self._streams = RunStreams(devices)
        self._meeting_streams = self._streams if self._streams.any_meeting else None
        on_same = Counter(device.physical.name for device in devices)
        self._policies = {
            device.physical.name: IssuePolicy(
                min(on_same[device.physical.name], max(1, cores // share)) if device.kind == "CPU" else 1
            )
            for device, share in zip(devices, shares, strict=True)
        }
        # At the first strategy, and not at import: programs that only import lockstep keep their allocator as it is.
        if any(device.kind == "CPU" for device in devices):
            keep_freed_memory()
        patch_default_generator()
        end_teams_before_forks()
        self._has_teams = max(shares, default=1) > 1
        self._stopped: ReplicaBarrier | None = None
        self._current: ReplicaBarrier | None = None
        self._one_run = threading.Lock()
        self._threads = ReplicaThreads(shares, first=first_replica)
        is_alone = len(devices) == 1 and devices[0].kind == "CPU"
        self._callers_thread = CallerThread(generators[0], shares[0]) if is_alone else None
        self._only_slot = IssueGate(1)
        self.seed, self.threads = seed, shares

    def run(
        self,
        strategy: Owner,
        fn: Callable[..., Any],
        bodies: Sequence[Callable[[], Any]],
        rows: Sequence[int | None],
        note: ErrorNote,
        *,
        is_plain: bool = False,
    ) -> list[Any]:
        """Returns the bodies' results in replica order, or raises the first failing replica's own error.

        The bodies call ``fn``, by which the issue policy knows a step again. ``rows`` has each replica's shard length,
        None where unknown, for messages; ``note`` makes the note on an error. ``is_plain``: the only body may run
        in the caller's thread, since no torch call in it means something else in a replica, random numbers aside.
        """
        self._threads.check_caller()
        caller, callers_thread = CallerState.capture(), self._callers_thread
        if callers_thread is not None and callers_thread.is_here:
            raise run_in_merge_call()
        with self._one_run:
            if self._stopped is not None and self._stopped.missing:
                missing = ", ".join(self._stopped.missing)
                raise ReplicaError(f"{missing} never stopped after an earlier error; make a new strategy")
            if is_plain and callers_thread is not None and callers_thread.suits(caller) and not is_profiled():
                return [self._run_here(callers_thread, strategy, bodies[0])]
            # Replicas of one thread each have no teams, so there the caller's team stays
            # (test_replicas_of_one_thread_each_leave_the_caller_s_team_alone).
            if self._has_teams:
                end_openmp_team()
            began = time.perf_counter()
            with compiled_code_for(len(self._devices)):  # dynamo's settings are part of the context, which is copied
                run = _Run(self._names, self._timeout_s, self._meeting_streams, caller, note)
            self._current = run.barrier
            for gpu in self._on_gpus:
                gpu.account.begin_run()
            with self._streams if self._on_gpus else nullcontext():
                try:
                    self._submit(run, strategy, bodies, self._slots(fn, rows, alone=caller.one_at_a_time))
                    run.barrier.wait_until_settled()
                except BaseException as interruption:  # Ctrl-C: stop the replicas, then let it pass
                    run.barrier.abort(interruption)
                    self._stop(run, interruption)
                    raise
                if run.barrier.cause is not None:
                    self._stop(run, run.barrier.cause)
                    raise run.barrier.cause
            took = time.perf_counter() - began
            # Runs under the caller's modes go one at a time whatever the policy says, so their times say nothing.
            for policy in () if caller.one_at_a_time else self._policies.values():
                policy.record(fn, took)
        return run.results

    def _run_here(self, thread: CallerThread, strategy: Owner, body: Callable[[], Any]) -> Any:
        """Runs the body of the only replica in the caller's thread."""
        replica = SoleReplicaContext(strategy, self._devices[0], self._only_slot)
        return thread.run(partial(copy_context().run, _in_replica, replica, body))

    def _submit(
        self, run: _Run, strategy: Owner, bodies: Sequence[Callable[[], Any]], slots: Sequence[IssueSlot]
    ) -> None:
        """Hands out the bodies."""
        for replica, body in enumerate(bodies):
            context = ReplicaContext(strategy, replica, self._devices[replica], run.barrier, slots[replica])
            job = partial(run.contexts[replica].run, run.job, context, slots[replica], self._random[replica], body)
            self._threads.submit(replica, job)
            run.submitted = replica + 1

    @property
    def thread_ids(self) -> tuple[int | None, ...]:
        """The number that the system gave each replica's thread."""
        return self._threads.ids

    @property
    def generators(self) -> ReplicaGenerators:
        return ReplicaGenerators([random.generator for random in self._random], self._gpu)

    @property
    def function_modes(self) -> Sequence[ReplicaRng]:
        """The mode of each replica, through which its calls of torch functions go."""
        return self._random

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """The memory of each replica's GPU, or share of one, in replica order; those on a CPU are left out."""
        return tuple(gpu.account.memory() for gpu in self._on_gpus)

    def abort(self, cause: BaseException) -> None:
        """Ends the run in progress, if there is one, with ``cause``. From any thread."""
        if self._current is not None:
            self._current.abort(cause)

    def close(self) -> None:
        self._threads.close()

    def _slots(self, fn: Callable[..., Any], rows: Sequence[int | None], *, alone: bool) -> list[IssueSlot]:
        # One gate for all devices where the caller's modes or hooks run: they are one object for all replicas.
        one = IssueGate(1) if alone else None
        gates: dict[str, IssueGate] = {}
        for name, policy in self._policies.items():
            gates[name] = one or IssueGate(policy.width(fn))
        slots: list[IssueSlot] = []
        for device, gpu, length in zip(self._devices, self._gpu, rows, strict=True):
            gate = gates[device.physical.name]
            slots.append(gate if gpu is None else GpuSlot(gate, gpu, length, alone=len(self._devices) == 1))
        return slots

    def _stop(self, run: _Run, cause: BaseException) -> None:
        self._stopped = barrier = run.barrier
        if self._failing is not None:
            self._failing(cause)
        for replica in range(run.submitted, len(self._devices)):
            barrier.leave(replica, ReplicaStopped())
        # First without an interrupt: a replica that reaches a collective or its end in time stops in an orderly way.
        if barrier.wait_until_left(STOP_GRACE_S):
            self._stopped = None
            return
        interrupted = [self._names.index(name) for name in barrier.missing]
        for replica in interrupted:
            self._threads.interrupt(replica, ReplicaStopped)
        if barrier.wait_until_left(STOP_LIMIT_S):
            for replica in interrupted:
                self._threads.forget_interrupt(replica)


class _Run:
    """The state of one run: its barrier, its results, the caller's state, and how many replicas have their bodies."""

    def __init__(
        self, names: Sequence[str], timeout_s: float, streams: RunStreams | None, caller: CallerState, note: ErrorNote
    ) -> None:
        self.barrier = ReplicaBarrier(names, timeout_s, streams)
        self.results: list[Any] = [None] * len(names)
        self.submitted = 0
        self._names, self._caller, self._note = names, caller, note
        # One for each replica: a Context that another thread has entered cannot be entered (RuntimeError).
        self.contexts = [copy_context() for _ in names]
        self._profiles = [Profile.of_caller() for _ in names] if is_profiled() else None

    def job(self, context: ReplicaContext, slot: IssueSlot, random: ReplicaRng, body: Callable[[], Any]) -> None:
        """The job of a replica's thread, in a context of its own. It never raises; ``leave`` takes the error."""
        replica = context.local_replica
        try:
            try:
                slot.acquire()
                try:
                    self.barrier.stop_if_ended()
                    context.make_current()
                    self._caller.set_switches()
                    with self._surroundings(context, slot, random):
                        self.results[replica] = body()
                    if isinstance(slot, GpuSlot):
                        slot.check()
                finally:
                    slot.release()
            except BaseException as raised:  # noqa: BLE001  leave hands it to the caller of run
                _add_note(self._note, self._names[replica], replica, raised)
                self.barrier.leave(replica, raised)
            else:
                self.barrier.leave(replica)
        except ReplicaStopped as interrupt:  # it came when the body had just ended
            self.barrier.leave(replica, interrupt)

    def _surroundings(
        self, context: ReplicaContext, slot: IssueSlot, random: ReplicaRng
    ) -> AbstractContextManager[object]:
        """The block around a body: the replica's random numbers, and what few callers and all GPUs have beside them."""
        caller, profiles = self._caller, self._profiles
        if caller.is_ordinary and profiles is None and not isinstance(slot, GpuSlot):
            return random
        profile = None if profiles is None else profiles[context.local_replica]
        with ExitStack() as stack:
            stack.enter_context(caller.default_device(context.device.torch_device))
            stack.enter_context(caller.applied())
            stack.enter_context(nullcontext() if profile is None else profile.recorded())
            stack.enter_context(random)
            stack.enter_context(caller.modes_applied())
            stack.enter_context(slot.naming_device() if isinstance(slot, GpuSlot) else nullcontext())
            return stack.pop_all()


def _in_replica(replica: ReplicaContext, body: Callable[[], Any]) -> Any:
    replica.make_current()
    return body()


def _add_note(note: ErrorNote, name: str, replica: int, raised: BaseException) -> None:
    if isinstance(raised, ReplicaStopped):
        return
    text = note(name, replica, raised)
    with suppress(Exception):  # its class may refuse
        if text:
            raised.add_note(text)
