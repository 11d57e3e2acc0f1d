"""One run: a body per replica, in the replicas' threads, to one result each or to one error.

    run -- a job to each thread -- turn, random numbers, caller's state, context -- body -- leave
     `---------------- waits until all have left; then results, or the first error -----------'

It joins the parts of this package; what a body does is the strategy's business.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lockstep.collectives.rendezvous import Rendezvous, ReplicaStopped
from lockstep.collectives.turns import Turn, Turns
from lockstep.config import LogicalDevice
from lockstep.errors import ReplicaError, UsageError
from lockstep.replicas.caller_state import CallerState
from lockstep.replicas.context import ReplicaContext, in_context
from lockstep.replicas.cuda import CudaReplicaState, CudaTurn
from lockstep.replicas.default_generator import know_replicas
from lockstep.replicas.generators import ReplicaGenerators
from lockstep.replicas.host_memory import keep_freed_memory
from lockstep.replicas.issue import IssuePolicy
from lockstep.replicas.linear import linear, onednn_is_faster
from lockstep.replicas.random import ReplicaRandom, in_a_replica, replica_generator
from lockstep.replicas.threads import ReplicaThreads

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy

STOP_GRACE_S = 1.0
"""Seconds that the others of a failed run get to reach a collective or their end before they are interrupted."""
STOP_LIMIT_S = 30.0
"""Seconds after the interrupt at which a replica that still runs is given up."""


def core_shares(devices: Sequence[LogicalDevice], cores: int) -> tuple[int, ...]:
    """Each replica's intra-op threads: an equal part of the cores for the CPU's replicas, at least one.

    The share follows from the layout alone. torch adds up large tensors in a different order with another number of
    threads, so a share that changed while running would change the numbers.
    """
    on_cpu = sum(device.kind == "CPU" for device in devices)
    return tuple(max(1, cores // on_cpu) if device.kind == "CPU" else 1 for device in devices)


def _instead(device: LogicalDevice) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What a replica's calls of torch's functions are exchanged for."""
    return {F.linear: linear} if device.kind == "CPU" and onednn_is_faster() else {}


class ReplicaRunner:
    """Runs bodies in the replicas' threads.

    Args:
        devices: one logical device per replica.
        seed: of all replicas' random numbers.
        timeout_s: how many seconds a replica waits in one collective.
        first_replica: the number of the first of them among the replicas of all workers.
        failing: hears of the error of a run that has failed at once, before its other replicas have stopped.
    """

    def __init__(
        self,
        devices: Sequence[LogicalDevice],
        *,
        seed: int,
        timeout_s: float,
        first_replica: int = 0,
        failing: Callable[[BaseException], None] | None = None,
    ) -> None:
        cores = torch.get_num_threads()
        shares = core_shares(devices, cores)
        self._devices = tuple(devices)
        numbers = range(first_replica, first_replica + len(devices))
        self._names = [f"replica {number} ({device.name})" for number, device in zip(numbers, devices, strict=True)]
        self._timeout_s = timeout_s
        self._failing = failing
        generators = [replica_generator(seed, number) for number in numbers]
        self._random = [
            ReplicaRandom(generator, applies=in_a_replica, instead=_instead(device))
            for device, generator in zip(devices, generators, strict=True)
        ]
        self._cuda = [
            CudaReplicaState(device.torch_device, generator.initial_seed()) if device.kind == "GPU" else None
            for device, generator in zip(devices, generators, strict=True)
        ]
        sharing = Counter(device.physical.name for device in devices)
        self._policies = {
            device.physical.name: IssuePolicy(
                min(sharing[device.physical.name], max(1, cores // share)) if device.kind == "CPU" else 1
            )
            for device, share in zip(devices, shares, strict=True)
        }
        if any(device.kind == "CPU" for device in devices):
            keep_freed_memory()
        know_replicas()
        self._stopped: Rendezvous | None = None
        self._current: Rendezvous | None = None
        self._one_run = threading.Lock()
        self._threads = ReplicaThreads(shares)

    def run(
        self,
        strategy: Strategy,
        fn: Callable[..., Any],
        bodies: Sequence[Callable[[], Any]],
        rows: Sequence[int | None],
    ) -> list[Any]:
        """Runs one body per replica and returns their results in replica order.

        Args:
            strategy: whose replicas these are.
            fn: what the bodies call, by which the issue policy knows a step again.
            bodies: one per replica, without arguments.
            rows: each replica's shard length, None where unknown; for messages.

        Raises:
            BaseException: the first failing replica's own exception, with the replica and device as a note.
            CollectiveError: the replicas did not meet at the same collective.
            UsageError: the strategy has been closed, or a replica of it asks, from a ``merge_call``.
        """
        if self._threads.closed:
            raise UsageError("the strategy has been closed and its threads have ended; make a new one")
        if self._threads.has_current:
            raise UsageError(
                "a run of all replicas was asked for in a merge_call, which is part of a run that waits for it; do it "
                "in the replicas, before or after the merge_call"
            )
        with self._one_run:
            if self._stopped is not None and self._stopped.missing:
                missing = ", ".join(self._stopped.missing)
                raise ReplicaError(f"{missing} never stopped after an earlier error; make a new strategy")
            began = time.perf_counter()
            run = _Run(strategy, self._names, self._timeout_s)
            self._current = run.rendezvous
            turns = self._turns(fn, rows)
            try:
                for replica, body in enumerate(bodies):
                    context = ReplicaContext(strategy, replica, self._devices[replica], run.rendezvous, turns[replica])
                    self._threads.submit(replica, run.job(context, turns[replica], self._random[replica], body))
                    run.submitted = replica + 1
                run.rendezvous.wait_until_settled()
            except BaseException as interruption:  # Ctrl-C: stop the replicas, then let it pass
                run.rendezvous.abort(interruption)
                self._stop(run, interruption)
                raise
            if run.rendezvous.cause is not None:
                self._stop(run, run.rendezvous.cause)
                raise run.rendezvous.cause
            for policy in self._policies.values():
                policy.record(fn, time.perf_counter() - began)
        return run.results

    @property
    def generators(self) -> ReplicaGenerators:
        """Where the replicas' random numbers stand."""
        return ReplicaGenerators(self._devices, [random.generator for random in self._random], self._cuda)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Runs inside the block leave no trace: the replicas' random numbers, and the memory they are held to have.

        Whoever opens the block frees what was allocated in it before it ends.
        """
        drawn = [random.generator.get_state() for random in self._random]
        on_gpu = [None if state is None else (state.random, state.held) for state in self._cuda]
        try:
            yield
        finally:
            for random, numbers in zip(self._random, drawn, strict=True):
                random.generator.set_state(numbers)
            for state, before in zip(self._cuda, on_gpu, strict=True):
                if state is not None and before is not None:
                    state.random, state.held = before

    def abort(self, cause: BaseException) -> None:
        """Ends the run under way, if there is one, with ``cause``. From any thread."""
        if self._current is not None:
            self._current.abort(cause)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._threads.close()

    def _turns(self, fn: Callable[..., Any], rows: Sequence[int | None]) -> list[Turn]:
        gates = {name: Turns(policy.width(fn)) for name, policy in self._policies.items()}
        turns: list[Turn] = []
        for device, state, length in zip(self._devices, self._cuda, rows, strict=True):
            gate = gates[device.physical.name]
            turns.append(gate if state is None else CudaTurn(gate, device, state, length))
        return turns

    def _stop(self, run: _Run, cause: BaseException) -> None:
        self._stopped = run.rendezvous
        if self._failing is not None:
            self._failing(cause)
        for replica in range(run.submitted, len(self._devices)):
            run.rendezvous.leave(replica, ReplicaStopped())
        if run.rendezvous.wait_until_left(STOP_GRACE_S):
            self._stopped = None
            return
        interrupted = [self._names.index(name) for name in run.rendezvous.missing]
        for replica in interrupted:
            self._threads.interrupt(replica, ReplicaStopped)
        if run.rendezvous.wait_until_left(STOP_LIMIT_S):
            for replica in interrupted:
                self._threads.forget_interrupt(replica)


class _Run:
    """The state of one run: its meeting point and its results."""

    def __init__(self, strategy: Strategy, names: Sequence[str], timeout_s: float) -> None:
        self.rendezvous = Rendezvous(names, timeout_s)
        self.results: list[Any] = [None] * len(names)
        self.submitted = 0
        self._names = names
        self._caller = [CallerState.capture() for _ in names]

    def job(
        self, context: ReplicaContext, turn: Turn, random: ReplicaRandom, body: Callable[[], Any]
    ) -> Callable[[], None]:
        """What the replica's thread is given to do. It never raises; ``leave`` takes the error."""
        replica = context.local_replica
        caller = self._caller[replica]

        def in_turn() -> Any:
            turn.acquire()
            try:
                self.rendezvous.stop_if_ended()
                with caller.applied(), random, in_context(context):
                    return body()
            finally:
                turn.release()

        def outcome() -> BaseException | None:
            try:
                self.results[replica] = caller.context.run(in_turn)
            except BaseException as raised:  # noqa: BLE001  leave hands it to the caller of run
                if not isinstance(raised, ReplicaStopped):
                    raised.add_note(f"raised in {self._names[replica]}")
                return raised
            return None

        def job() -> None:
            try:
                self.rendezvous.leave(replica, outcome())
            except ReplicaStopped as interrupt:  # it came when the body had just ended
                self.rendezvous.leave(replica, interrupt)

        return job
