"""Copies what the user changes on the module between runs (attributes, weights, buffers, hooks, ...) to all replicas.

    user's module  --- after a run: snapshot ---.
                                                +-- before the next run or read: differences --> copies 1, 2, ...
    user's module  --- before the next run -----'

``snapshot`` finds what was set or removed, and ``watched_tensors`` what was written into tensors. If the content of an
attribute differs, the whole attribute is copied. The next snapshot has what a replica sets on its copy during a run, so
this stays the replica's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.mirroring.module.copies import Copying, Copyings
from lockstep.mirroring.module.snapshot import (
    ATOMS,
    HOOK_FLAGS,
    HOOKS,
    Difference,
    Node,
    Snapshot,
    is_shared,
    registry_of,
)
from lockstep.mirroring.module.watched_tensors import Watched, WatchedTensors


@dataclass(frozen=True, kw_only=True, eq=False)
class _Structure:
    """The submodules and weights of each copy, in one order.

    Attributes:
        floating: the weights of each copy that are floating-point in the user's module.
        tensors: the copies of each weight and buffer, the user's first.
    """

    parts: list[list[nn.Module]]
    weights: list[list[nn.Parameter]]
    floating: list[list[nn.Parameter]]
    tensors: list[tuple[torch.Tensor, ...]]

    @classmethod
    def of(cls, copies: Sequence[nn.Module]) -> _Structure:
        """Raises a UsageError if the copies have different numbers of members."""
        parts = [list(duplicate.modules()) for duplicate in copies]
        weights = [list(duplicate.parameters()) for duplicate in copies]
        buffers = [list(duplicate.buffers()) for duplicate in copies]
        for kind, members in (("submodules", parts), ("parameters", weights), ("buffers", buffers)):
            counts = list(map(len, members))
            if len(set(counts)) > 1:
                raise UsageError(
                    f"the replicas' copies of {type(copies[0]).__name__} have {', '.join(map(str, counts))} {kind}: "
                    "the step registers some in one replica and not in others; register them in all alike, or on the "
                    "user's module outside strategy.run"
                )
        is_floating = [parameter.is_floating_point() for parameter in weights[0]]
        return cls(
            parts=parts,
            weights=weights,
            floating=[
                [parameter for parameter, floats in zip(of_copy, is_floating, strict=True) if floats]
                for of_copy in weights
            ],
            tensors=[*zip(*weights, strict=True), *zip(*buffers, strict=True)],
        )


class CopyFollower:
    """Has the copies of one mirrored module, the first of which is the user's, follow it.

    ``peers`` returns the propagations of all modules of the strategy, which may have submodules in common.

    Attributes:
        is_alone: whether there is no other copy, here or on other workers, that would have to follow.
    """

    def __init__(
        self,
        copies: Sequence[nn.Module],
        devices: Sequence[torch.device],
        groups: Sequence[Sequence[int]],
        peers: Callable[[], Iterable[CopyFollower]],
        *,
        alone: bool = False,
    ) -> None:
        self.is_alone = alone
        self._copies = copies
        self._devices = devices
        self._groups = groups
        self._leaders = [group[0] for group in groups]
        self._peers = peers
        self._name = type(copies[0]).__name__
        self._in_run = False
        self._fresh: list[tuple[torch.Tensor, ...]] = []
        self._read_structure(frozenset())

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """The parameters of the user's module, as of the last snapshot."""
        return self._structure.weights[0]

    def before_run(self) -> bool:
        """Copies the user's changes to the module since the last run to all replicas.

        Returns whether any copy has other weights, buffers or submodules than before, or weights in other memory.
        Raises UsageError if something was set that cannot be copied.
        """
        if self.is_alone:
            return False
        if self._in_run:  # begun before, and not run
            self._end_run()
            self.remember()
        changed = self.bring_changes()
        changed |= self._align_modes()
        self._begin_run()
        return changed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in the middle of a run. What it sets on the user's module is set on all copies."""
        self.after_run(failed=True)
        try:
            yield
        finally:
            if not self.is_alone:
                self.bring_changes()
                self._begin_run()

    def bring_changes(self) -> bool:
        """Does so for reads and loads between runs too, but leaves training modes and frozen parameters."""
        if self._in_run or self.is_alone:
            return False
        moved = self._copy_values()
        if self._snapshot.is_current():
            return moved
        differences = self._snapshot.differences()
        restructured = any(difference.restructures for difference in differences)
        self._apply(differences)
        if restructured:
            self._read_structure(self._snapshot.tensor_ids)
            # A parameter may have another name now: the copy that has this name has the former parameter's values.
            self._watched.write_parameters()
            self.remember()
        else:
            self._take_snapshot()
        return moved or restructured or any(difference.node.name == "_buffers" for difference in differences)

    def after_run(self, *, failed: bool = False) -> None:
        """Ends a run: keeps what each replica has set on its copy.

        Raises UsageError if a replica has added weights, or submodules that other copies do not have.
        """
        if self._in_run:
            self._end_run()
            if not self._snapshot.is_current():
                if not any(difference.restructures for difference in self._snapshot.differences()):
                    self._take_snapshot()
                elif not failed:  # else the next run brings what only the user's module has
                    self._refuse_new_weights()
                    self._read_structure(self._snapshot.tensor_ids)
        self.remember()

    def remember(self) -> None:
        """Notes the present tensors of all copies: one that changes from now on was changed in the user's module."""
        self._watched.remember()

    def remember_replay(self) -> None:
        """Notes that a CUDA graph has written to all copies. It counts no version, so bytes may differ."""
        self._watched.replayed = True

    def remember_read(self, value: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
        """Notes that the program gets a mean over ``copies``, and may write into it as into a plain buffer."""
        self._watched.remember_read(value, copies)

    def add_counterparts(self, replica: int, counterparts: dict[int, Any], changed: Set[int]) -> None:
        """Adds, by the id of each object in the last snapshot, its counterpart in a copy, unless it has ``changed``."""
        for part, duplicate in zip(self._structure.parts[0], self._structure.parts[replica], strict=True):
            counterparts.setdefault(id(part), duplicate)
        snapshot = self._snapshot
        tensors = [
            (at, name)
            for at, node in enumerate(snapshot.nodes)
            if node.name in ("_parameters", "_buffers")
            for name in snapshot.former[at]
        ]
        for at, name in (*tensors, *snapshot.attributes):
            value = snapshot.former[at].get(name)
            duplicate_value = None if value is None else self._counterpart(snapshot.nodes[at], replica).get(name)
            if duplicate_value is not None and type(duplicate_value) is type(value) and id(value) not in changed:
                counterparts.setdefault(id(value), duplicate_value)

    def take_fresh(self) -> list[tuple[torch.Tensor, ...]]:
        """The weights and buffers, each with its copies, that were added since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    # The structure and the snapshot, each replaced whole.

    def _read_structure(self, former_ids: Set[int]) -> None:
        """Finds the submodules, weights and buffers of all copies, and makes a snapshot.

        ``former_ids`` are the ids of the user's weights and buffers before; those of a structure that is the first are
        not fresh.
        """
        self._structure = _Structure.of(self._copies)
        self._refuse_scripted()
        self._addresses: list[list[int]] = []
        if former_ids:
            self._fresh += [copies for copies in self._structure.tensors if id(copies[0]) not in former_ids]
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        """Makes a snapshot of the user's module, and notes its present tensors."""
        tensor_ids = frozenset(id(copies[0]) for copies in self._structure.tensors)
        self._snapshot = Snapshot.of(self._structure.parts, tensor_ids)
        followers, leaders = range(1, len(self._copies)), self._leaders[1:]
        watched: list[Watched] = [
            (node.live, name, [(self._counterpart(node, replica), name) for replica in replicas])
            for registry, replicas in (("_buffers", followers), ("_parameters", leaders))
            for node in (self._snapshot.nodes if replicas else ())
            if node.name == registry
            for name in node.live
        ]
        self._watched = WatchedTensors(watched)

    def _begin_run(self) -> None:
        if self._snapshot.objects:
            self._snapshot = self._snapshot.with_objects(present=False)
        self._watched.forget_windows()
        self._in_run = True

    def _end_run(self) -> None:
        if self._snapshot.objects:
            self._snapshot = self._snapshot.with_objects(present=True)
        self._in_run = False

    # Bringing differences to the copies.

    def _apply(self, differences: Sequence[Difference]) -> None:
        values = [value for difference in differences for value in difference.values.values()]
        plain = all(type(value) in ATOMS for value in values)
        changed = set[int]().union(*(difference.in_place for difference in differences))
        # One copying for all differences, and for all modules of the strategy: deepcopy's memo keeps ties between them.
        copyings = Copyings(self._copies[0], self._devices, self._groups, (self, *self._peers()), changed)
        parts_of_copies = self._structure.parts
        kinds = list(enumerate(zip(map(type, parts_of_copies[0]), self._snapshot.kinds, strict=True)))
        for replica, parts in enumerate(parts_of_copies[1:], start=1):
            copying = None if plain else copyings[replica]  # before anything changes
            for at, (kind, former) in kinds:
                # A parametrization gives a module another class; without this the copies go on with the plain weights
                # (test_given_after_mirroring).
                if kind is not former:
                    parts[at].__class__ = kind
            for difference in differences:
                self._apply_one(difference, replica, copying)

    def _apply_one(self, difference: Difference, replica: int, copying: Copying | None) -> None:
        node = difference.node
        original, part = self._structure.parts[0][node.number], self._structure.parts[replica][node.number]
        duplicate, where = self._counterpart(node, replica), f"set on {type(original).__name__},"
        copied = {key: _copy(value, copying, f"{key!r}, {where}") for key, value in difference.values.items()}
        for key in difference.removed:
            duplicate.pop(key, None)
        duplicate.update(copied)
        for key in node.live if copied and node.name else ():  # in the user's order
            if key in duplicate:
                duplicate[key] = duplicate.pop(key)
        for name in HOOK_FLAGS if node.name in HOOKS else ():
            part.__dict__[name].update(original.__dict__[name])

    def _counterpart(self, node: Node, replica: int) -> dict[str, Any]:
        return registry_of(self._structure.parts[replica][node.number], node.name)

    def _copy_values(self) -> bool:
        """Writes to all copies what was written into the user's tensors; returns whether any was in other memory."""
        moved = self._watched.write_changes()
        if moved is None:
            return False
        if moved:
            self._share_weights()
        self.remember()
        return moved

    # Training modes, frozen parameters and shared storages.

    def _align_modes(self) -> bool:
        """The training mode, the frozen parameters and the storage of the weights are the user's module's."""
        # Compared as lists first: part.training = mode goes through Module.__setattr__, and mostly nothing has changed.
        modes = [part.training for part in self._structure.parts[0]]
        trained = [weight.requires_grad for weight in self._structure.weights[0]]
        for parts, weights in zip(self._structure.parts[1:], self._structure.weights[1:], strict=True):
            if [part.training for part in parts] != modes:
                for part, mode in zip(parts, modes, strict=True):
                    part.training = mode
            if [weight.requires_grad for weight in weights] != trained:
                for weight, requires_grad in zip(weights, trained, strict=True):
                    weight.requires_grad_(requires_grad)
        return self._share_weights()

    def _share_weights(self) -> bool:
        """Has each group share its leader's storage again, if the weights were given another (``.data = ``)."""
        floating = self._structure.floating
        addresses = [[weight.data_ptr() for weight in floating[leader]] for leader in self._leaders]
        if addresses == self._addresses:
            return False
        self._addresses = addresses
        moved = False
        for leader, *members in self._groups:
            for member in members:
                for weight, source in zip(
                    self._structure.floating[member], self._structure.floating[leader], strict=True
                ):
                    if weight.data_ptr() != source.data_ptr():
                        weight.data = source.data
                        moved = True
        return moved

    def _refuse_scripted(self) -> None:
        # TorchScript gave other gradients where copies ran in several threads (test_one_that_is_trained_is_refused).
        for part in self._structure.parts[0] if len(self._copies) > 1 else ():
            if isinstance(part, torch.jit.ScriptModule) and any(
                parameter.requires_grad for parameter in part.parameters()
            ):
                raise UsageError(
                    f"{self._name} has a scripted module ({part.original_name}) with weights that are trained, and "
                    "TorchScript loses gradients of copies that run beside each other; mirror the module that it was "
                    "scripted from and script it after training, or freeze its parameters with requires_grad_(False)"
                )

    def _refuse_new_weights(self) -> None:
        for name, parameter in self._copies[0].named_parameters():
            if id(parameter) not in self._snapshot.tensor_ids:
                raise UsageError(
                    f"the step gives {self._name} a new parameter, {name!r}, of which each replica makes its own; set "
                    "it on the module outside strategy.run, where all copies follow"
                )


def _copy(value: Any, copying: Copying | None, label: str) -> Any:
    return value if copying is None or is_shared(value) else copying.of(value, label)
