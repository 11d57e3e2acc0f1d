"""The only replica of a strategy, run in the caller's thread: a small step costs little more than the plain loop's.

A replica's thread, its barrier and its function mode are there for other replicas: one alone could have none of them.
Its random numbers stay its own, since torch's default generator holds them during the run. Measured with an MLP whose
plain step takes 470 us: the mode costs 160 to 230 us a step, the way to the thread and back 22, the generators 5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from lockstep.replicas.caller_state import CallerState

T = TypeVar("T")

# Threads that never draw from torch's default generator: of this package but for those that read data, of progress
# bars, of the queues to DataLoaders' processes, of torch.compile's processes, and of Jupyter's kernel.
_DRAW_NOTHING = (
    *("lockstep-replica-", "lockstep-sums", "lockstep-store", "lockstep-heartbeat", "tqdm_monitor", "pytest_timeout"),
    *("QueueFeederThread", "InductorSubproc", "IPythonHistorySavingThread", "IOPub", "Heartbeat", "Control"),
)


class CallerThread:
    """Calls the replica's body in the calling thread, while torch's default generator has the state of ``generator``.

    Args:
        generator: the replica's CPU generator.
        threads: the replica's intra-op threads.
    """

    def __init__(self, generator: torch.Generator, threads: int) -> None:
        self._generator = generator
        self._threads = threads
        self._running: int | None = None  # the number of the thread in which a body runs

    @property
    def is_here(self) -> bool:
        """Whether a body runs in the calling thread."""
        return self._running == threading.get_ident()

    def suits(self, caller: CallerState) -> bool:
        """Whether the numbers there are those of the replica's own thread.

        Other threads could draw from torch's default generator meanwhile: then the replica keeps to its own thread,
        whose function mode has a generator for itself.
        """
        if not caller.is_ordinary or torch.get_num_threads() != self._threads:
            return False
        for thread in threading.enumerate():
            if not thread.name.startswith(_DRAW_NOTHING) and thread.ident != threading.get_ident():
                return False
        return True

    def run(self, body: Callable[[], T]) -> T:
        """Calls the body; its grad mode and the caller's random numbers are as before afterwards."""
        default, is_replicas = torch.default_generator, False
        state, grad, cache = default.get_state(), torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        # No context manager: Ctrl-C can come while one is entered, and what it had set by then would stay.
        try:
            self._running = threading.get_ident()
            # As in a replica's thread (``CallerState.set_switches``): a cache would change how gradients are added up.
            torch.set_autocast_cache_enabled(False)
            default.set_state(self._generator.get_state())
            is_replicas = True
            return body()
        finally:
            self._running = None
            if is_replicas:
                self._generator.set_state(default.get_state())
            default.set_state(state)
            torch.set_grad_enabled(grad)
            torch.set_autocast_cache_enabled(cache)
