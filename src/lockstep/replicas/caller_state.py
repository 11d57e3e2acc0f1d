"""The caller's thread-local state, carried into the replica threads.

``with torch.no_grad(): strategy.run(step)`` has to mean what it says although the step runs in other threads. Carried
are the grad mode, inference mode, autocast, and context variables; not function modes, which belong to their thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass

import torch

from lockstep.replicas.host_reads import watched


@dataclass(frozen=True)
class CallerState:
    """A snapshot of one thread's state; ``capture`` takes it and ``applied`` puts it on in another thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    context: Context

    @classmethod
    def capture(cls) -> CallerState:
        """The calling thread's state now."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
            context=copy_context(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the torch part of the state on for the calling thread; the context variables are run in, not put on."""
        with ExitStack() as stack:
            stack.enter_context(_no_shared_casts())
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            # torch runs a backward pass for a GPU in a thread of its own per device: replicas that share the device
            # would wait there for each other in a collective's backward pass. In the calling thread they cannot.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(watched())
            yield


@contextmanager
def _no_shared_casts() -> Iterator[None]:
    """Autocast in this thread keeps no casts for a second use, unless it is asked to.

    torch keeps them in one place for all threads, and any thread that leaves autocast clears it. So whether a tensor
    that is used twice is cast twice, and its gradients are added up in float32 or in bfloat16, would hang on the other
    replicas' timing: four replicas with reentrant checkpointing came out differently in every run.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
