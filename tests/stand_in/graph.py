"""A stand-in for a CUDA graph: records what replicas do on the CPU, operator by operator, and does it again.

It has a CUDA graph's meaning. Recorded, nothing is done: what the recorded operators wrote is put back, what they made
holds garbage until a replay. Replayed, the same operators read and write the same memory, with the numbers that Python
gave them when they were recorded; generators go on. Reading a number on the host, or drawing from a generator that is
no replica's, fails as it does on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from tests.stand_in.streams import BesideCompiledCode
from torch.utils._pytree import tree_leaves

from lockstep.replicas.device.host_syncs import host_waits

_WRITES_UNSAID = {"aten.native_batch_norm": ("running_mean", "running_var")}


class StandInGraph:
    """See ``lockstep.replicas.device.driver.DeviceGraph``.

    Args:
        generators: of the replicas, registered.
        lent: gives the generator whose numbers the default one draws at the moment; None for its own.

    Attributes:
        operators: the names of what was recorded, in order.
        replays: how often it has been replayed.
    """

    def __init__(self, generators: Sequence[torch.Generator], lent: Callable[[], torch.Generator | None]) -> None:
        self._generators = tuple(generators)
        self._lent = lent
        self._calls: list[_Call] = []
        self._made: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._lock = threading.RLock()
        self.replays = 0

    @property
    def operators(self) -> list[str]:
        return [str(call.func) for call in self._calls]

    @contextmanager
    def recording(self) -> Iterator[None]:
        drawn = [generator.get_state() for generator in self._generators]
        try:
            with _Recorder(self):  # which replicas run under too
                yield
        finally:
            for generator, state in zip(self._generators, drawn, strict=True):
                generator.set_state(state)
            for storage, content in self._before.values():
                storage.copy_(content)
            for storage in self._made.values():
                storage.fill_(255)  # NaN, and -1
            self._before.clear()

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for call in self._calls:
                call.again()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Does what is recorded, to have results of the right shape."""
        with self._lock:
            generator = self._generator(func, args, kwargs)
            self._keep(func, args, kwargs)
            result = func(*args, **kwargs)
            if not func.is_view and not func._schema.is_mutable:
                outside = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor) and _key(leaf) not in outside:
                        self._made[_key(leaf)] = leaf.untyped_storage()
            self._calls.append(_Call(func, args, kwargs, result, generator))
        return result

    def _generator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
        """Whose numbers an operator draws from the default generator; None where it draws none."""
        if host_waits(func, args, kwargs):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        named = dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | kwargs
        draws = torch.Tag.nondeterministic_seeded in func.tags and named.get("dropout_p") != 0.0
        if "dropout_p" in [each.name for each in func._schema.arguments] and "dropout_p" not in named:
            draws = False
        drawn = given[0] if given else self._lent() if draws else None
        if (given or draws) and not any(drawn is generator for generator in self._generators):
            raise RuntimeError(f"{func} draws from a generator that is not registered with the graph")
        return None if given else drawn

    def _keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keeps what the operator will write to, if it was there before the recording."""
        unsaid = _WRITES_UNSAID.get(str(func.overloadpacket), ())
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.name in unsaid or (argument.alias_info is not None and argument.alias_info.is_write):
                self._keep_all(value)
        for argument in func._schema.arguments:
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._keep_all(kwargs[argument.name])

    def _keep_all(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in self._made and _key(leaf) not in self._before:
                storage = leaf.untyped_storage()
                self._before[_key(leaf)] = (storage, storage.clone())


class GraphPool:
    """Memory for graphs. When the last of them is dropped it is given up, as torch does, and no other one may come."""

    def __init__(self) -> None:
        self._graphs: WeakSet[HeldGraph] = WeakSet()
        self._was_used = False

    def take(self, graph: HeldGraph) -> None:
        if self._was_used and not self._graphs:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._was_used = True
        self._graphs.add(graph)


class HeldGraph:
    """What the engine has of a graph, whose record outlasts it for the tests.

    Args:
        graph: the graph.
        pool: where it allocates.
    """

    def __init__(self, graph: StandInGraph, pool: GraphPool) -> None:
        self.graph = graph
        self._pool = pool
        self.replay = graph.replay

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._pool.take(self)
        with self.graph.recording():
            yield


@dataclass(frozen=True)
class _Call:
    func: Any
    args: Any
    kwargs: dict[str, Any]
    result: Any
    generator: torch.Generator | None

    def again(self) -> None:
        with _drawing(self.generator):
            fresh = self.func(*self.args, **self.kwargs)
        for old, new in zip(tree_leaves(self.result), tree_leaves(fresh), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


@contextmanager
def _drawing(generator: torch.Generator | None) -> Iterator[None]:
    """The default generator draws ``generator``'s numbers."""
    if generator is None:
        yield
        return
    default = torch.default_generator
    others = default.get_state()
    default.set_state(generator.get_state())
    yield
    generator.set_state(default.get_state())
    default.set_state(others)


class _Recorder(BesideCompiledCode):
    def __init__(self, graph: StandInGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._graph.run(func, args, kwargs or {})


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
