"""A recorded run of a device: what its streams were given once, given again in one call.

Recorded, nothing is computed; replayed, the same kernels run on the same addresses. Numbers that Python computed are
part of the recording. Random generators that were registered go on from replay to replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch


class DeviceGraph(Protocol):
    """One recording of one device."""

    def recording(self) -> AbstractContextManager[None]:
        """Opens a block: what is issued in it, on streams that fork from the current one and join it, is recorded.

        Raises:
            RuntimeError: something in the block cannot be recorded. The device can be used as before then.
        """

    def in_replica(self) -> AbstractContextManager[None]:
        """What a replica's part of the recorded run is run in, in its own thread."""

    def replay(self) -> None:
        """Runs the recording on the current stream, without waiting for it."""


class CudaDeviceGraph:
    """A CUDA graph.

    Args:
        device: the GPU.
        generators: whose numbers are drawn in the recording, and go on in the replays.
        pool: where recordings that are never replayed at the same time allocate; from ``torch.cuda.graph_pool_handle``.
        stream: on which it is recorded, no share's. Kept by the driver: torch has 32, and hands them out in turn.
    """

    def __init__(
        self, device: torch.device, generators: Sequence[torch.Generator], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self._device = device
        self._stream = stream
        self._generators = tuple(generators)
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            self._graph.register_generator_state(generator)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """See ``DeviceGraph``. Other threads may use the device meanwhile: data is copied there ahead of time."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what eager steps have kept is the recording's to take
            self._stream.wait_stream(torch.cuda.current_stream())
            # Not torch.cuda.graph: where the end of a failed recording raises, it leaves its stream the current one.
            with torch.cuda.stream(self._stream):
                self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):  # it says once more that the recording failed
                        self._graph.capture_end()
                    self._give_up()
                    raise
                try:
                    self._graph.capture_end()
                except BaseException:  # never ended twice: torch counts the recordings under way
                    self._give_up()
                    raise

    def in_replica(self) -> AbstractContextManager[None]:
        """The replica's stream has joined the recording; there is nothing to enter."""
        return nullcontext()

    def replay(self) -> None:
        """See ``DeviceGraph``."""
        self._graph.replay()

    def _give_up(self) -> None:
        """Leaves stream, allocator and generators as they were before a recording that has failed and ended."""
        try:
            self._graph.pool()
        except RuntimeError:  # there is no graph that would give the pool back
            self._give_pool_back()
        self._graph.reset()
        for generator in self._generators:  # one that was left recording refuses to draw ever after
            generator.graphsafe_set_state(generator.clone_state())

    def _give_pool_back(self) -> None:
        """What torch leaves out: before 2.13 the end of the pool's use and its release, in 2.13.0 the release."""
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        except RuntimeError:  # the allocator has been told
            if not torch.__version__.startswith("2.13.0"):
                return
        torch._C._cuda_releasePool(self._device.index, self._pool)
