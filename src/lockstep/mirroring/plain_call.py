"""A plain module's call inside a replica is refused where the module is mirrored.

It would go unnoticed: the user's module is replica 0's copy, so every replica's gradients would pile up there, cleared
and summed as replica 0's own. The check is torch's hook on every module's call, so only a step's first run pays for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep.errors import UsageError
from lockstep.mirroring.metric import MirroredMetric
from lockstep.mirroring.module import MirroredModule
from lockstep.replicas.context import get_replica_context


@contextmanager
def refusing_plain_calls(mirrored: Iterable[MirroredModule]) -> Iterator[None]:
    """Within, a replica other than 0 that calls a user's module, or a part of it, gets a UsageError."""
    owners = {id(part): module for module in mirrored for part in _own_parts(module.module)}

    def check(part: nn.Module, _: Any) -> None:
        context = get_replica_context()
        if context is not None and context.local_replica > 0 and id(part) in owners:
            name = type(owners[id(part)].module).__name__
            raise UsageError(
                f"the step calls the plain {name}, which is replica 0's copy, in "
                f"replica {context.replica_id_in_sync_group}; call what strategy.mirror(module) returned"
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _own_parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its parts, but for mirrored metrics: they are one object in all copies, and serve each replica."""
    if not isinstance(module, MirroredMetric):
        yield module
        for child in module.children():
            yield from _own_parts(child)
