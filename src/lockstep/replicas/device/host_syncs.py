"""Host synchronisations: which operators make the host wait for a device, and on which lines.

    with HostSyncs() as reads:
        strategy.run(step, (batch,))
    reads.syncs   ->   [("aten._local_scalar_dense", "train.py:30")]

It watches operators, not the device, so a program on a CPU shows what would wait on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep._torch_compat import TorchDispatchMode
from lockstep.replicas.context import get_replica_context

# torch, this package and what inspects losses: function modes are called between a program's line and the operator.
_BETWEEN = (
    *(str(path) + os.sep for path in (Path(torch.__file__).parent, Path(__file__).parents[1])),
    str(Path(__file__).parents[2] / "train" / "loss"),
)

# Their result, or its shape, is known to the host only when the device has computed it.
_READING = frozenset(
    {
        *("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.bincount"),
        *("aten.repeat_interleave", "aten._unique", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive"),
        "aten.unique_dim_consecutive",
    }
)
_INDEXING = frozenset({"aten.index", "aten.index_put", "aten.index_put_"})
_COPYING = frozenset({"aten._to_copy", "aten.copy_"})

_watching: ContextVar[HostSyncs | None] = ContextVar("lockstep_host_reads", default=None)


class HostSync(NamedTuple):
    """One wait: the operator, and the nearest line of the program or a library, such as "train.py:30"."""

    operator: str
    line: str


class BesideCompiledCode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode under which compiled code runs, which it does under no other mode. It is off while torch compiles."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class HostSyncs(BesideCompiledCode):
    """Records what makes the host wait, or would on a GPU, in the block and in the replicas that it runs.

    ``syncs`` are the waits, in the order of the calls in each thread.
    """

    def __init__(self, syncs: list[HostSync] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.syncs: list[HostSync] = [] if syncs is None else syncs
        self._tokens: list[Token[HostSyncs | None]] = []

    def __enter__(self) -> HostSyncs:
        self._tokens.append(_watching.set(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _watching.reset(self._tokens.pop())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            self.syncs.append(HostSync(_name(func), _line()))
        return func(*args, **kwargs)


def recording_host_syncs() -> AbstractContextManager[Any]:
    """In a replica's thread: a block whose waits are recorded too, if its caller has them recorded."""
    caller = _watching.get()
    return nullcontext() if caller is None else HostSyncs(caller.syncs)


def _waits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = _name(func)
    if name not in _COPYING and _is_the_hosts_own(args):
        return False
    if name in _READING:
        return not (name == "aten.repeat_interleave" and kwargs.get("output_size") is not None)
    if name in _INDEXING:
        return _by_mask(name, args)
    return name in _COPYING and _copies_to_host(name, args, kwargs)


def _is_the_hosts_own(args: Sequence[Any]) -> bool:
    """Whether a replica of a real GPU reads a tensor that is on the host anyway."""
    context = get_replica_context()
    elsewhere = context is not None and context.device.torch_device.type != "cpu"
    return elsewhere and bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu"


def _by_mask(name: str, args: Sequence[Any]) -> bool:
    """Whether a mask chooses rows, which have to be counted; a single number written through a mask needs no count."""
    masked = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return masked and (name == "aten.index" or args[2].numel() != 1)


def _copies_to_host(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if name == "aten.copy_":
        into, source = args[0], args[1]
        late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return bool(into.device.type == "cpu" != source.device.type and not late)
    into, late = kwargs.get("device"), kwargs.get("non_blocking", False)
    return bool(into is not None and into.type == "cpu" != args[0].device.type and not late)


def _name(func: Any) -> str:
    return str(func.overloadpacket)


def _line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_BETWEEN) or frame.f_code.co_name == "__torch_dispatch__"  # other modes
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
