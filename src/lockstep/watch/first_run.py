"""Compares what a step's first run leaves behind with what was there before, and warns of what one device would not do.

    before     notes what the function and the modules' hooks reach, and buffers
    during     notes what the mirrored modules are called with
    after      compares, and warns once for each step function

Each of these can be intended, so they are warnings. Refused are hooks that keep tensors of all replicas in one place,
and calls of the plain module. Later runs are not looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._torch_compat import NormBase, tree_leaves
from lockstep.errors import LockstepError, UsageError
from lockstep.introspection import attribute_of, attributes_of, is_kind
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.watcher import Run, Watcher
from lockstep.watch.captures import (
    CONTAINERS,
    captured_by,
    is_generator,
    is_mutable,
    is_of_the_user,
    matches_in,
    state_of,
)
from lockstep.watch.python_draws import DRAW_ADVICE
from lockstep.watch.step_guard import refusing_plain_calls
from lockstep.watch.step_names import warn_of_step

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Captures = dict[tuple[int, str, str], tuple[Any, Any]]
"""By the id and the name of a hook, or 0 and "" for the step, and a name in it: the value, and its state before."""


_FAILURES_OF_HOOKS = (RuntimeError, LookupError, AttributeError)


class FirstRun(Watcher):
    """Looks at the first run of one step function."""

    def __init__(self, run: Run, modules: Sequence[MirroredModule]) -> None:
        self._fn, self._modules, self._rows, self._distributed = run.fn, modules, run.rows, run.distributed
        self._replicas = run.strategy.num_replicas_in_sync
        self._inputs: list[list[list[Tensor]]] = [[] for _ in run.rows]  # of each call of a mirrored module
        self._hooks = ExitStack()

    def run_begins(self, run: Run) -> None:
        self._begin_scalers()
        self._captures: Captures = {key: (value, state_of(value)) for key, value in self._captured()}
        copies = [[_counting_buffers(copy) for copy in module.copies] for module in self._modules]
        self._buffers = [
            [{name: buffer.clone() for name, buffer in buffers.items()} for buffers in of_copies]
            for of_copies in copies
        ]
        self._hooks.enter_context(refusing_plain_calls(self._modules))
        for module in self._modules:
            self._hooks.enter_context(self._seeing_calls_of(module))

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        self._hooks.close()
        shares = len(self._rows) > 1
        if error is not None:
            # Replicas that overwrite each other's tensors in a hook fail in many ways; the hook is what to tell of.
            if shares and isinstance(error, _FAILURES_OF_HOOKS) and not isinstance(error, LockstepError):
                self._refuse_hooks(self._captures)
            return
        if shares:
            self._refuse_hooks(self._captures)
            self._warn_of_captured(self._captures)
        self._warn_of_buffers(self._buffers)
        self._warn_of_inputs()

    @contextmanager
    def _seeing_calls_of(self, module: MirroredModule) -> Iterator[None]:
        module.on_call.append(self._called)
        module.is_in_first_run = True
        try:
            yield
        finally:
            module.on_call.remove(self._called)
            module.is_in_first_run = False

    def _called(self, module: MirroredModule, args: Any, kwargs: Any) -> None:
        """A mirrored module is called in a replica."""
        context = get_replica_context()
        if context is not None and module.training and torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
            self._inputs[context.local_replica].append(tensors)

    def _begin_scalers(self) -> None:
        """Has each GradScaler that the step reaches make its scale, which it otherwise does at its first use.

        Two replicas that use it at once may both begin to, and one of them ends in torch's AssertionError
        "_growth_tracker initialized before _scale".
        """
        weights = [weight for module in self._modules for weight in module.module.parameters()]
        for _, scaler in captured_by(self._fn, _is_scaler) if weights else ():
            scaler.scale(torch.ones((), device=weights[0].device))

    def _captured(self) -> Iterator[tuple[tuple[int, str, str], Any]]:
        """Yields the values outside the modules that the step and the hooks can reach, by the keys of ``Captures``."""
        parts = [part for module in self._modules for part in module.module.modules()]
        values = [value for part in (*self._modules, *parts) for value in (part, *vars(part).values())]
        value_ids = {id(value) for value in values if is_kind(value, CONTAINERS) or attributes_of(value) is not None}
        for hook in (hook for part in parts for kind in _HOOKS for hook in vars(part).get(kind, {}).values()):
            name = attribute_of(hook, "__qualname__", type(hook).__name__)
            captures = [] if id(attribute_of(hook, "__self__", hook)) in value_ids else captured_by(hook)
            yield from (((id(hook), name, inner), value) for inner, value in captures if id(value) not in value_ids)
        yield from (((0, "", name), value) for name, value in captured_by(self._fn))
        owner = attribute_of(self._fn, "__self__")
        if is_kind(owner, nn.Module) and is_of_the_user(owner) and id(owner) not in value_ids:
            mutable = matches_in(f"{type(owner).__name__}.", vars(owner).items(), is_mutable)
            yield from (((0, "", name), value) for name, value in mutable)

    def _changed(self, before: Captures) -> Iterator[tuple[str, str, Any]]:
        """Yields the values that have changed since ``before``, except dicts with a key for each replica."""
        for key, value in self._captured():
            by_replica = is_kind(value, dict) and set(range(len(self._rows))) <= set(dict.keys(value))
            if key in before and before[key][1] != state_of(value) and not by_replica:
                yield (*key[1:], value)

    def _refuse_hooks(self, before: Captures) -> None:
        for hook, name, value in self._changed(before):
            leaves = tree_leaves(list(value) if is_kind(value, (set, deque)) else value)
            if hook and any(is_kind(leaf, Tensor) for leaf in leaves):
                raise UsageError(
                    f"the hook {hook} keeps tensors of the step in {name!r}, outside of the module, where the replicas "
                    "overwrite each other's; keep them on the part that the hook is called with (part.kept = output), "
                    "and read them in the step from the mirrored module (mirrored.get_submodule(name).kept)"
                )

    def _warn_of_captured(self, before: Captures) -> None:
        generators: dict[str, None] = {}
        changes: dict[str, None] = {}
        for _, name, value in self._changed(before):
            (generators if is_generator(value) else changes)[repr(name)] = None
        if generators:
            warn_of_step(
                self._fn, f"draws from {', '.join(generators)}, which all replicas have in common, so {DRAW_ADVICE}"
            )
        if changes:
            warn_of_step(
                self._fn,
                f"changes {', '.join(changes)} from outside it, which every one of {len(self._rows)} replicas does; "
                "return the value from the step, and change it after strategy.run",
            )

    def _warn_of_buffers(self, before: Sequence[Sequence[dict[str, Tensor]]]) -> None:
        for module, olds in zip(self._modules, before, strict=True):
            copies = [_counting_buffers(copy) for copy in module.copies]
            for name in [name for name in copies[0] if all(name in buffers for buffers in (*copies, *olds))]:
                now, old = [buffers[name] for buffers in copies], [buffers[name] for buffers in olds]
                if not _as_on_one_device(now, old, self._rows[0] or 0):
                    how = "averaged" if now[0].is_floating_point() else "replica 0's"
                    warn_of_step(
                        self._fn,
                        f"changes the buffer {name!r} of {type(module.module).__name__}, in each replica by its own "
                        f"shard, and read outside it is {how}; where it counts rows or adds up values, sum those with "
                        'ls.get_replica_context().all_reduce("sum", value) before they are added',
                    )

    def _warn_of_inputs(self) -> None:
        first, *rest = self._inputs
        if not rest and self._distributed:
            return
        for number, tensors in enumerate(first):
            same = all(len(calls) > number and list(map(id, calls[number])) == list(map(id, tensors)) for calls in rest)
            if same and any(len(tensor) > 1 for tensor in tensors):
                warn_of_step(
                    self._fn,
                    f"calls a mirrored module on one batch of shape {tuple(tensors[0].shape)} in all "
                    f"{self._replicas} replicas, and its gradients count once for each; divide it with "
                    "strategy.distribute_dataset(batches), and hand what that yields to strategy.run",
                )
                return


def _is_scaler(value: Any) -> bool:
    return is_kind(value, torch.amp.GradScaler)


def _counting_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module by name, without those of norm layers, which are averaged on purpose."""
    norm_buffers = {id(buffer) for part in module.modules() if isinstance(part, NormBase) for buffer in part.buffers()}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in norm_buffers}


def _as_on_one_device(now: Sequence[Tensor], old: Sequence[Tensor], rows: int) -> bool:
    """Whether the copies of a buffer are what one device would have."""
    if all(torch.equal(buffer, before) for buffer, before in zip(now, old, strict=True)):
        return True
    if any(not torch.equal(now[0].cpu(), copy.cpu()) for copy in now[1:]):
        return False
    if now[0].shape != old[0].shape:
        return True
    increase = (now[0] - old[0]) if now[0].dtype is not torch.bool else now[0].int() - old[0].int()
    # A counter of calls, as batch norm's num_batches_tracked, grows by 0 or 1 on one device too.
    counts_rows = rows > 1 and bool((increase == rows).any())
    return not counts_rows and (now[0].is_floating_point() or bool(((increase == 0) | (increase == 1)).all()))
