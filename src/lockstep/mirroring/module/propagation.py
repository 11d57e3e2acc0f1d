"""Brings what is set on the user's module between runs (attributes, submodules, weights, hooks) to all copies.

    user's module  --- after a run: snapshot ---.
                                                +-- before the next run: differences --> copies 1, 2, ...
    user's module  --- before the next run -----'

What a replica sets on its own copy during a run stays its own, since it is part of the next snapshot. Comparing a
module of 200 submodules takes 60 us, before and after a run; more is done only where something differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.mirroring.module.copies import Copying, home_of
from lockstep.mirroring.module.snapshot import (
    HOOKS,
    NO_ATTRIBUTES,
    OF_HOOKS,
    OWN,
    Distinct,
    ModuleSnapshot,
    Place,
    Slots,
    equal,
    is_atom,
    mark_of,
    write,
)

_ABSENT: Any = object()


class Propagation:
    """Has the copies of one mirrored module follow the user's.

    Args:
        copies: one per replica; the first is the user's module.
        devices: theirs.
        groups: the replicas by storage of the weights.
        peers: gives those of all modules mirrored by the strategy, for parts that are in several.
        alone: whether there is no other copy, here or on other workers, that would have to follow.
    """

    def __init__(
        self,
        copies: Sequence[nn.Module],
        devices: Sequence[torch.device],
        groups: Sequence[Sequence[int]],
        peers: Callable[[], Iterable[Propagation]],
        *,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._copies = copies
        self._devices = devices
        self._leader = {member: group[0] for group in groups for member in group}
        self._leaders = [group[0] for group in groups]
        self._peers = peers
        self._name = type(copies[0]).__name__
        self._open = False
        self._owners: dict[int, ModuleSnapshot] = {}
        self._known: set[int] = set()
        self._fresh: list[tuple[torch.Tensor, ...]] = []
        self._take()

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """The parameters of the user's module, as last seen."""
        return self._weights[0]

    def begin(self) -> bool:
        """Before a run: brings to all copies what was set on the user's module since the last one.

        Returns:
            Whether any copy has other weights or parts than before, or weights in other memory.

        Raises:
            UsageError: something was set that cannot be copied.
        """
        if self._alone:
            return False
        if self._open:  # announced, and not run yet
            for each in self._with_tensors:
                each.take_back()
            self._see_versions()
            self._open = False
        restructured = self.follow()
        moved = self._align()
        self._let_go()
        return restructured or moved

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the middle of a run: what the block sets on the user's module is set for all replicas."""
        self.end(failed=True)
        try:
            yield
        finally:
            if not self._alone:
                self.follow()
                self._let_go()

    def follow(self) -> bool:
        """The same for whoever reads or loads between runs: attributes, weights, buffers and parts, not their modes."""
        if self._open or self._alone:  # in a run what there is belongs to the replicas
            return False
        if self._is_as_kept():
            return False
        with Distinct():
            differing = [each for each in self._watched if each.differs()]
        if self._bring_plain(differing):
            return False
        restructured = any(each.restructured() for each in differing)
        copyings: dict[int, Copying] = {}
        for replica in range(1, len(self._copies)):
            self._bring(replica, differing, copyings)
        if restructured:
            self._take()
            self._spread_values()
        else:
            self._keep(differing)
        return restructured

    def end(self, *, failed: bool = False) -> None:
        """After a run: what its replicas have set on their copies is as it should be.

        Raises:
            UsageError: they have given their copies weights, or parts that the others have not.
        """
        if not self._open:
            return
        self._open = False
        if not self._with_tensors and self._is_as_kept():
            return
        with Distinct():
            differing = [each for each in self._watched if each.tensors or each.differs()]
        if any(each.restructured() for each in differing):
            if failed:
                return  # what is there only in the user's own module is followed at the next run
            self._refuse_new_weights()
            self._take()
        else:
            self._keep(differing)

    def fill(self, replica: int, known: dict[int, Any]) -> None:
        """Adds the id of all that was seen, as its counterpart in ``replica``'s copy."""
        for each in self._watched:
            for mine, theirs in each.pairs(replica):
                known.setdefault(id(mine), theirs)

    def take_fresh(self) -> list[tuple[torch.Tensor, ...]]:
        """The weights and buffers, each with its copies, that have come since this was asked last."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def _let_go(self) -> None:
        """The replicas' own time begins."""
        for each in self._with_tensors:
            each.release()
        self._plain.clear()
        self._open = True

    def _take(self) -> None:
        """Looks at all parts anew."""
        self._parts = [list(duplicate.modules()) for duplicate in self._copies]
        self._check_alike("submodules", self._parts)
        self._refuse_scripted()
        self._owners.clear()
        parts = [(mine, tuple(twins)) for mine, *twins in zip(*self._parts, strict=True)]
        # A part that is one object in all copies, a mirrored metric, sees to its replicas itself.
        self._watched = [ModuleSnapshot(mine, twins, self._owners) for mine, twins in parts if mine not in twins]
        self._weights = [list(duplicate.parameters()) for duplicate in self._copies]
        self._check_alike("parameters", self._weights)
        buffers = [list(duplicate.buffers()) for duplicate in self._copies]
        self._check_alike("buffers", buffers)
        self._floating = [
            [each for each, mine in zip(own, self._weights[0], strict=True) if mine.is_floating_point()]
            for own in self._weights
        ]
        self._addresses: dict[int, list[int]] = {}
        known, self._known = self._known, {id(each) for each in (*self._weights[0], *buffers[0])}
        if known:
            every = (*zip(*self._weights, strict=True), *zip(*buffers, strict=True))
            self._fresh += [copies for copies in every if id(copies[0]) not in known]
        self._collect()

    def _check_alike(self, kind: str, of_copies: Sequence[Sequence[object]]) -> None:
        if len({len(each) for each in of_copies}) > 1:
            raise UsageError(
                f"the replicas' copies of {self._name} have {', '.join(str(len(each)) for each in of_copies)} {kind}: "
                "the step registers some in one replica and not in others; register them in all alike, or on the "
                "user's module outside strategy.run"
            )

    def _refuse_scripted(self) -> None:
        for part in self._parts[0] if len(self._copies) > 1 else ():
            if isinstance(part, torch.jit.ScriptModule) and any(each.requires_grad for each in part.parameters()):
                raise UsageError(
                    f"{self._name} has a scripted module ({part.original_name}) with weights that are trained, and "
                    "TorchScript loses gradients of copies that run beside each other; mirror the module that it was "
                    "scripted from and script it after training, or freeze its parameters with requires_grad_(False)"
                )

    def _refuse_new_weights(self) -> None:
        for name, parameter in self._copies[0].named_parameters():
            if id(parameter) not in self._known:
                raise UsageError(
                    f"the step gives {self._name} a new parameter, {name!r}, of which each replica makes its own; set "
                    "it on the module outside strategy.run, where all copies follow"
                )

    def _keep(self, differing: Sequence[ModuleSnapshot]) -> None:
        """Takes all as it is, where parts and weights are those of before."""
        lost: set[int] = set()
        for each in differing:
            if not each.keep_simple():
                lost |= each.keep_again()
        if any(id(value) in lost for each in self._watched for _, _, value in each.held):  # another part has it too
            self._owners.clear()
            for each in self._watched:
                each.keep()
        self._collect()

    def _collect(self) -> None:
        """Puts side by side what is compared at every run."""
        self._live = [each.live for each in self._watched]
        self._kept = [each.kept for each in self._watched]
        self._held = [held for each in self._watched for held in each.held]
        self._kinds = list(map(type, self._parts[0]))
        self._with_tensors = [each for each in self._watched if each.tensors]
        self._see_versions()

    def _see_versions(self) -> None:
        """Plain tensors are changed in place too. (Buffers and weights are the business of ``buffer_sync``.)"""
        plain = [each for part in self._with_tensors for each in part.seen_tensors()]
        self._plain = [(each, mark_of(each)) for each in plain]

    def _is_as_kept(self) -> bool:
        with Distinct():
            if not equal(self._live, self._kept) or list(map(type, self._parts[0])) != self._kinds:
                return False
        if any(container[key] is not value for container, key, value in self._held):
            return False
        return all(mark_of(each) == seen for each, seen in self._plain)

    def _bring_plain(self, differing: Sequence[ModuleSnapshot]) -> bool:
        """Brings all that differs to all copies, if it is nothing but plain values, as of a schedule; else False."""
        changes = [each.plain_changes() for each in differing]
        if (
            list(map(type, self._parts[0])) != self._kinds
            or any(each is None for each in changes)
            or any(mark_of(each) != seen for each, seen in self._plain)
        ):
            return False
        for part, those in zip(differing, changes, strict=True):
            for own in (*(twin.__dict__ for twin in part.twins), part.kept[0]):
                own.update(those or {})
        return True

    def _bring(self, replica: int, differing: Sequence[ModuleSnapshot], copyings: dict[int, Copying]) -> None:
        """Brings to one copy what differs."""
        known: dict[int, Any] = {}
        for following in (self, *self._peers()):
            following.fill(replica, known)
        leader = self._leader[replica]
        copying = copyings[replica] = Copying(
            home_of(self._copies[0]),
            self._devices[replica],
            alias=leader != replica,
            leader=copyings.get(leader),
            known=known,
        )
        contents = [each.twin_contents(replica) for each in differing]  # before anything is changed
        for each, theirs in zip(differing, contents, strict=True):
            Change(each, each.twins[replica - 1], theirs, copying).bring()
        with torch.no_grad():
            for array, seen in self._plain:
                if mark_of(array) != seen and id(array) in known:
                    write(known[id(array)], array)

    def _spread_values(self) -> None:
        """Gives the other storages the user's weights: a change of parts may have changed values under new names."""
        for leader in self._leaders[1:]:
            for mine, other in zip(self._floating[0], self._floating[leader], strict=True):
                if other.shape == mine.shape and other.dtype == mine.dtype:
                    other.data.copy_(mine.data)
                else:
                    other.data = mine.data.to(other.device, copy=True)

    def _align(self) -> bool:
        """The training mode, the frozen parameters and the storage of the weights are the user's module's."""
        modes = [part.training for part in self._parts[0]]
        trained = [each.requires_grad for each in self._weights[0]]
        for parts, weights in zip(self._parts[1:], self._weights[1:], strict=True):
            if [part.training for part in parts] != modes:
                for part, mode in zip(parts, modes, strict=True):
                    part.training = mode
            if [each.requires_grad for each in weights] != trained:
                for each, mode in zip(weights, trained, strict=True):
                    each.requires_grad_(mode)
        return self._align_storage()

    def _align_storage(self) -> bool:
        """Shares the storage of weights once more where the user has given some another (``.data = ``)."""
        addresses = {leader: [each.data_ptr() for each in self._floating[leader]] for leader in self._leaders}
        if addresses == self._addresses:
            return False
        self._addresses = addresses
        moved = False
        for replica, leader in self._leader.items():
            for each, source in zip(self._floating[replica], self._floating[leader], strict=True):
                if each.data_ptr() != source.data_ptr() and leader != replica:
                    each.data = source.data
                    moved = True
        return moved


class Change:
    """What differs in one part of the user's module, and is brought to one replica's copy of it.

    Args:
        watched: the part.
        twin: the copy.
        theirs: the copy's containers, as ``ModuleSnapshot.twin_contents`` gives them.
        copying: makes this replica's copy of what is new.
    """

    def __init__(self, watched: ModuleSnapshot, twin: nn.Module, theirs: Sequence[Any], copying: Copying) -> None:
        self._watched = watched
        self._twin = twin
        self._theirs = theirs
        self._copying = copying

    def bring(self) -> None:
        """Brings it."""
        own, other = self._watched.live[0], self._theirs[0]
        self._twin.__class__ = type(self._watched.part)  # parametrizations make another of it
        for number, (live, kept, theirs) in enumerate(
            zip(self._watched.live, self._watched.kept, self._theirs, strict=True)
        ):
            if theirs is None:
                self._bring_whole(number)
            elif isinstance(live, (dict, Slots)):
                self._bring_items(live, kept, theirs, leaving=NO_ATTRIBUTES if number == 0 else frozenset())
            elif isinstance(live, (list, deque)):
                self._bring_list(live, kept, theirs)
            elif isinstance(live, set) and live != kept:
                theirs.clear()
                theirs.update(self._copy(each, each) for each in live)
        if any(other.get(name) for name in HOOKS):
            _bring_flags(own, other)

    def _bring_items(self, live: Any, kept: Any, theirs: Any, leaving: frozenset[str]) -> None:
        for key in [each for each in kept if each not in live]:
            theirs.pop(key, None)
        fresh = [(key, value) for key, value in live.items() if not _same(kept.get(key, _ABSENT), value)]
        for key, value in fresh:
            if key not in leaving:
                theirs[key] = self._copy(value, key)
        if fresh and not leaving and isinstance(theirs, dict):  # in the order of the user's
            for key in live:
                if key in theirs:
                    theirs[key] = theirs.pop(key)

    def _bring_list(self, live: Any, kept: Any, theirs: Any) -> None:
        if len(live) == len(kept) and all(map(_same, kept, live)):
            return
        old = [*zip(kept, theirs, strict=False), *[(_ABSENT, None)] * len(live)]
        brought = [
            mine if _same(seen, value) else self._copy(value, "an item")
            for value, (seen, mine) in zip(live, old, strict=False)
        ]
        theirs.clear()
        theirs.extend(brought)

    def _bring_whole(self, number: int) -> None:
        """Where the copy has something of its own in the place of a container: as a whole, if that was changed."""
        if equal(self._watched.live[number], self._watched.kept[number]):
            return
        place = self._place(number)
        while self._theirs[place.home] is None or isinstance(self._theirs[place.home], tuple):
            place = self._place(place.home)
        self._theirs[place.home][place.key] = self._copy(place.value, place.key)

    def _place(self, number: int) -> Place:
        return self._watched.places[number - 1 - len(OWN)]

    def _copy(self, value: Any, key: Any) -> Any:
        if is_atom(value) and not isinstance(value, nn.Module):
            return value
        return self._copying.of(value, f"{key!r}, set on {type(self._watched.part).__name__},")


def _bring_flags(own: Any, other: Any) -> None:
    """How hooks are called stands beside them."""
    keys = {key for name in HOOKS for key in other[name]}
    for name in OF_HOOKS:
        for key in [each for each in other[name] if each not in keys]:
            del other[name][key]
        other[name].update({key: value for key, value in own[name].items() if key in keys})


def _same(seen: Any, value: Any) -> bool:
    return seen is value or (type(seen) is type(value) and is_atom(value) and bool(seen == value))
