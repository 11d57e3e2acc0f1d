"""What hooks on modules keep outside of the module, looked at in the first run of a step.

A hook that keeps a tensor in a dict or an object of the program has it overwritten by the next replica: the step then
reads another replica's features, or a part of the rows. What it keeps on the module is each copy's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lockstep.errors import UsageError
from lockstep.mirroring.module import MirroredModule

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, set, deque)


class HookStores:
    """The containers and objects outside of modules that their hooks reach, and the tensors in them when a run begins.

    Args:
        modules: the mirrored modules.
        captured_by: gives names and values of what a function has captured.
    """

    def __init__(
        self, modules: Sequence[MirroredModule], captured_by: Callable[[Any], Iterator[tuple[str, Any]]]
    ) -> None:
        self._modules = modules
        self._captured_by = captured_by
        self._before = {id(store): _tensors(store) for _, _, store in self._stores()}

    def check(self, replicas: int) -> None:
        """After the run, or where it has failed.

        Raises:
            UsageError: a hook has kept a tensor there.
        """
        for hook, name, store in self._stores():
            seen = {id(each) for each in self._before.get(id(store), ())}
            fresh = [each for each in _tensors(store) if id(each) not in seen]
            if fresh and not _by_replica(store, replicas):
                raise UsageError(
                    f"the hook {hook} keeps tensors of the step in {name}, outside of the module, where the replicas "
                    "overwrite each other's; keep them on the part that the hook is called with (part.kept = output), "
                    "and read them in the step from the mirrored module (mirrored.get_submodule(name).kept)"
                )

    def _stores(self) -> Iterator[tuple[str, str, Any]]:
        for module in self._modules:
            for copy in module.copies:
                parts = list(copy.modules())
                hooks = [hook for part in parts for kind in _HOOKS for hook in vars(part).get(kind, {}).values()]
                own = {id(value) for part in parts for value in vars(part).values()} if hooks else set()
                for hook in hooks:
                    for name, store in self._reached(hook):
                        if id(store) not in own:
                            yield getattr(hook, "__qualname__", type(hook).__name__), name, store

    def _reached(self, hook: Any) -> Iterator[tuple[str, Any]]:
        while isinstance(hook, partial):
            for value in hook.args:
                if isinstance(value, _CONTAINERS):
                    yield "an argument of a partial", value
            hook = hook.func
        if isinstance(hook, FunctionType):
            for name, value in self._captured_by(hook):
                if isinstance(value, _CONTAINERS) or _is_object(value):
                    yield repr(name), value
        holder = hook.__self__ if isinstance(hook, MethodType) else hook
        if _is_object(holder):
            yield f"a {type(holder).__name__}", holder


def _is_object(value: Any) -> bool:
    others = (nn.Module, torch.Tensor, FunctionType, type)
    return hasattr(value, "__dict__") and not isinstance(value, others) and type(value).__module__ != "builtins"


def _tensors(store: Any) -> list[torch.Tensor]:
    content = store if isinstance(store, _CONTAINERS) else dict(vars(store))
    content = list(content) if isinstance(content, (set, deque)) else content
    return [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]


def _by_replica(store: Any, replicas: int) -> bool:
    """Whether the program keeps one for each replica, by its number."""
    return isinstance(store, dict) and set(range(replicas)) <= {key for key in store if type(key) is int}
