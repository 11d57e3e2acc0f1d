"""Follows tensors: in whose memory they are, which streams used them, and whether the order of that was kept.

    write on stream A ... read on stream B     B must have waited for an event of A behind the write
    read on B, memory of A, dropped            A must have waited for an event of B behind the read before it
                                               allocates again, or the memory was kept for B (``use_on``)

The second is the rule of torch's allocator: freed memory is used again at once on the stream it was allocated on.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.stand_in.streams import BesideCompiledCode, Clock, Stream
from torch.utils._pytree import tree_leaves

_ASKS_FOR_SHAPE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty"}


class Block:
    """One storage.

    Args:
        stream: in whose memory it is; None for what nobody followed.
        size: bytes.
    """

    def __init__(self, stream: Stream | None, size: int) -> None:
        self.stream = stream
        self.size = size
        self.written: tuple[str, int] | None = None
        self.used: Clock = Counter()
        self.kept_for: set[str] = set()

    def use(self, stream: Stream, *, writes: bool) -> None:
        """The last work of ``stream`` has read it, or written to it."""
        self.used[stream.name] = stream.now
        if writes:
            self.written = (stream.name, stream.now)


class Memory:
    """The memory of one device: pools by stream, as torch's allocator has them, and the blocks that are in use.

    Args:
        capacity: bytes of the device.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use: Counter[str] = Counter()
        self.reserved: Counter[str] = Counter()
        self.peak = 0
        self.resizes = 0
        self.faults: list[str] = []
        self._blocks: dict[int, Block] = {}
        self._freed: dict[str, list[Clock]] = {}

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor that has been seen."""
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def allocate(self, tensor: torch.Tensor, stream: Stream | None) -> Block:
        """A new tensor, on ``stream``.

        Raises:
            torch.OutOfMemoryError: the device has no more.
        """
        storage = tensor.untyped_storage()
        block = Block(stream, storage.nbytes())
        self._blocks[storage._cdata] = block
        weakref.finalize(storage, self._free, storage._cdata)
        if stream is not None:
            self._check_reuse(stream)
            self.in_use[stream.name] += block.size
            self.peak = max(self.peak, self.in_use.total())
            self._reserve(stream.name)
        return block

    def give_back(self) -> None:
        """Pools keep no more than is in use."""
        if self.reserved != +self.in_use:
            self.reserved = Counter(self.in_use)
            self.resizes += 1

    def keep(self, pool: str, size: int) -> None:
        """A pool takes room that no tensor is in, as fragments of a real one are."""
        self.reserved[pool] += size
        self.resizes += 1

    def _reserve(self, pool: str) -> None:
        more = self.in_use[pool] - self.reserved[pool]
        if more <= 0:
            return
        if self.reserved.total() + more > self.capacity:
            self.give_back()
            if self.reserved.total() > self.capacity:
                raise torch.OutOfMemoryError(f"the stand-in has {self.capacity} bytes and {more} more were needed")
        self.reserved[pool] = max(self.reserved[pool], self.in_use[pool])
        self.resizes += 1

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is None or block.stream is None:
            return
        own = block.stream.name
        self.in_use[own] -= block.size
        pending = Counter({name: n for name, n in block.used.items() if name != own and name not in block.kept_for})
        if pending:
            self._freed.setdefault(own, []).append(pending)

    def _check_reuse(self, stream: Stream) -> None:
        for pending in self._freed.pop(stream.name, ()):
            for name, number in pending.items():
                if not stream.knows(name, number):
                    self.faults.append(f"{stream.name} uses memory again that {name} may still be using")


class Propagation(BesideCompiledCode):
    """Tells a memory of every operation of one thread.

    Args:
        memory: the device's.
        stream: gives the thread's current stream.
    """

    def __init__(self, memory: Memory, stream: Callable[[], Stream]) -> None:
        super().__init__()
        self._memory = memory
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            stream = self._stream()
            stream.advance()
            for tensor, writes in _accesses(func, args, kwargs):
                self._access(tensor, writes, stream, func)
        for tensor in _tensors(result):
            if self._memory.block(tensor) is None:
                self._memory.allocate(tensor, self._stream()).use(self._stream(), writes=True)
        return result

    def _access(self, tensor: torch.Tensor, writes: bool, stream: Stream, func: Any) -> None:
        block = self._memory.block(tensor)
        if block is None:
            block = self._memory.allocate(tensor, None)
        earlier = block.used.items() if writes else [block.written] if block.written else []
        for name, since in earlier:
            if not stream.knows(name, since):
                what = "writes" if writes else "reads"
                used = "used" if writes else "written"
                self._memory.faults.append(f"{func} on {stream.name} {what} what {name} may not have {used} yet")
        block.use(stream, writes=writes)


def _accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an operation is given, and whether it writes to them."""
    if func._schema.name.removeprefix("aten::") in _ASKS_FOR_SHAPE:
        return
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(given.get(argument.name)):
            yield tensor, writes


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(structure)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu"
    ]
