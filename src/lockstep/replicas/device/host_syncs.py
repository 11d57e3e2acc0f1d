"""Host synchronisations: which operators make the host wait for a device, and on which lines.

    with HostSyncs() as reads:
        strategy.run(step, (batch,))
    reads.syncs   ->   [("aten._local_scalar_dense", "train.py:30 in step")]

It watches operators, not the device, so a program on a CPU shows what would wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep._torch_compat import TorchDispatchMode
from lockstep.collectives.communicator import call_site
from lockstep.replicas.context import get_replica_context

# torch's own tags: the host cannot know the result, or its shape, before the device has computed it.
_KNOWN_LATE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPYING = ("aten._to_copy", "aten.copy_")
_INDEXING = ("aten.index", "aten.index_put", "aten.index_put_")


class HostSyncs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what makes the host wait, or would on a GPU, in the block and in the replicas that it runs.

    ``syncs`` are the waits in the order of the calls in each thread: the operator, and the nearest line of the program.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.syncs: list[tuple[str, str]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode, and under no other one that does not say so."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if host_waits(func, args, kwargs):
            self.syncs.append((str(func.overloadpacket), call_site()))
        return func(*args, **kwargs)


def host_waits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host has to wait for the device before it has an operator's result, or knows its shape."""
    name = str(func.overloadpacket)
    if name in _COPYING:
        into, source = (args[0].device, args[1]) if name == "aten.copy_" else (kwargs.get("device"), args[0])
        late = kwargs.get("non_blocking", name == "aten.copy_" and len(args) > 2 and args[2])
        return into is not None and (into.type == "cpu") != (source.device.type == "cpu") and not late
    context = get_replica_context()
    on_gpu = context is not None and context.device.torch_device.type != "cpu"
    if on_gpu and args and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu":
        return False  # it is on the host anyway
    if name in _INDEXING:  # rows that a mask chooses are counted; a single number written through a mask is not
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masked and (name == "aten.index" or args[2].numel() != 1)
    return not _KNOWN_LATE.isdisjoint(func.tags) and kwargs.get("output_size") is None
