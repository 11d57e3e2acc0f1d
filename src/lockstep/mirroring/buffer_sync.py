"""What a program changes outside replicas in the user's module, which is replica 0's copy: given to the other copies.

    a run ends        --> note: the tensors of all copies, and how often each was written
    net.mean.fill_(1)     (the program writes into the user's module, outside replicas)
    a run begins, or  --> spread: what was changed since in the user's module alone is copied to all copies
    a read outside

Without it a buffer that is set outside would be averaged with the other replicas' old values. What writes into all
copies itself, such as a checkpoint that is restored, is left as it is. Nothing of this waits for a device. It costs
0.8 us a run and buffer; so it works on flat lists.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

_Tensors = dict[str, Any]
"""``nn.Module._buffers``, or ``_parameters``: a tensor or None by name."""
_LOOKED_AT_BYTES = 4096
"""Of a buffer on a CPU: a write through ``.data`` counts no version, so the first of its bytes are compared too."""


_Place = tuple[_Tensors, str]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor's place in one part of the module: in the user's module, and in the other copies."""

    mine: _Place
    others: tuple[_Place, ...]
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class _State:
    """What there was in the user's module, slot by slot.

    Args:
        tensors: kept, so that no new tensor gets the number of one of them.
        marks: of each its number, where it stands in memory, and how often it was written.
        contents: of each buffer on a CPU its first bytes.
    """

    tensors: list[Any]
    marks: list[tuple[tuple[int, int], int]]
    contents: list[bytes]


class OutsideChanges:
    """Keeps the copies of a module equal to what is changed outside replicas in the first.

    Args:
        copies: one per local replica; the first is the user's module.
        groups: the replicas by storage of the weights. Those of the first group see changed weights by themselves.
    """

    def __init__(self, copies: Sequence[nn.Module], groups: Sequence[Sequence[int]]) -> None:
        self._copies = copies
        self._leaders = [group[0] for group in groups[1:]]
        self._followers = [(group[0], member) for group in groups[1:] for member in group[1:]]
        self._running = False
        self._replayed = False
        self._read: list[tuple[torch.Tensor, int, list[torch.Tensor]]] = []
        self._windows: tuple[list[tuple[int, int]], list[Any]] = ([], [])
        self._look_up()
        self.note()

    def note(self) -> None:
        """A run ends, or all copies have been written: what is changed from here on was changed outside."""
        self._running = self._replayed = False
        if len(self._copies) == 1:
            return
        if not self._is_current():
            self._look_up()
        self._read.clear()
        self._before = self._look()
        self._written = _versions([place for slot in self._slots for place in slot.others])

    def note_replay(self) -> None:
        """A recorded step has written into all copies, which counts no version: other contents say nothing now."""
        self._replayed = True

    def note_read(self, value: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
        """A mean over ``copies`` is given to the program, which may write into it as into the plain module's buffer."""
        if len(copies) > 1 and _address(value) != _address(copies[0]):
            self._read.append((value, _version(value), list(copies)))

    def run_begins(self) -> bool:
        """Spreads; what is changed from here on is changed by the replicas, until ``note``.

        Returns:
            Whether there was anything to spread.
        """
        found = self.spread()
        self._running = True
        return found

    def look_again(self) -> None:
        """All copies have got other parts, weights or buffers; between runs."""
        self.spread()
        if len(self._copies) > 1:
            self._look_up()
            self.note()

    @torch.no_grad()
    def spread(self) -> bool:
        """Copies what was changed outside to all copies.

        Returns:
            Whether there was anything.
        """
        if len(self._copies) == 1 or self._running:
            return False
        changed = self._changed()
        for slot in changed:
            _spread(slot)
        written = [(value, copies) for value, version, copies in self._read if _version(value) != version]
        for value, copies in written:
            for each in copies:
                each.copy_(value)
        if changed:
            self._follow()
        if changed or written or not self._is_current():
            self.note()
        return bool(changed or written)

    def _changed(self) -> list[_Slot]:
        """Where the user's module has another value than it had, and the other copies have theirs."""
        before, now = self._before, self._look()
        if self._replayed:
            now = replace(now, contents=before.contents)
        if now.marks == before.marks and now.contents == before.contents:
            return []
        written = iter(self._written)
        found = []
        for index, slot in enumerate(self._slots):
            theirs = [next(written) for _ in slot.others]
            same = now.marks[index] == before.marks[index] and now.contents[index] == before.contents[index]
            if not same and slot.mine[1] in slot.mine[0] and _versions(slot.others) == theirs:
                found.append(slot)
        return found

    def _look(self) -> _State:
        tensors = [tensors.get(name) for tensors, name in self._slots_mine]
        places = list(zip(map(id, tensors), _addresses(tensors), strict=True))
        if self._windows[0] != places:
            self._windows = (places, [_window(*each) for each in zip(tensors, self._slots, strict=True)])
        marks = list(zip(places, _versions(self._slots_mine), strict=True))
        return _State(tensors, marks, [window.raw for window in self._windows[1]])

    def _look_up(self) -> None:
        """Finds the places in all copies."""
        parts = list(zip(*(each.modules() for each in self._copies), strict=False))
        self._slots = [
            _Slot((mine[0], name), tuple((other[0], name) for other in others), True)
            for mine, *others in ([_held(each) for each in every] for every in parts)
            for name in mine[0]
        ]
        if self._leaders:
            self._slots += [
                _Slot((every[0][1], name), tuple((every[i][1], name) for i in self._leaders), False)
                for every in ([_held(each) for each in copies] for copies in parts)
                for name in every[0][1]
            ]
        self._slots_mine = [slot.mine for slot in self._slots]
        self._children = [(mine._modules, tuple(mine._modules.values())) for mine, *_ in parts if mine._modules]
        self._names = [(mine._buffers, len(mine._buffers)) for mine, *_ in parts]

    def _is_current(self) -> bool:
        return all(tuple(children.values()) == known for children, known in self._children) and all(
            len(buffers) == known for buffers, known in self._names
        )

    def _follow(self) -> None:
        """Replicas that share another leader's memory of the weights see what that one has been given."""
        for leader, member in self._followers:
            for mine, other in zip(self._copies[leader].parameters(), self._copies[member].parameters(), strict=True):
                if _address(other) != _address(mine):
                    other.data = mine.data


def _held(part: nn.Module) -> tuple[_Tensors, _Tensors]:
    """The buffers and parameters of one part. A scripted module keeps its own in C++."""
    if isinstance(part, torch.jit.ScriptModule):
        return dict(part.named_buffers(recurse=False)), dict(part.named_parameters(recurse=False))
    return part._buffers, part._parameters


def _spread(slot: _Slot) -> None:
    tensors, name = slot.mine
    mine = tensors[name]
    for others, _ in slot.others:
        theirs = others.get(name)
        if mine is None or theirs is None:
            if slot.is_buffer:
                others[name] = None if mine is None else mine.detach().clone()
        elif theirs.shape == mine.shape and theirs.dtype == mine.dtype and not theirs.is_inference():
            theirs.copy_(mine)
        elif slot.is_buffer:
            others[name] = mine.detach().to(theirs.device, copy=True)
        else:
            theirs.data = mine.data.to(theirs.device, copy=True)


def _versions(places: Sequence[_Place]) -> list[int]:
    try:
        return [tensors[name]._version for tensors, name in places]
    except (AttributeError, KeyError, RuntimeError):  # some are None, or not there, or count none
        return [_version(tensors.get(name)) for tensors, name in places]


def _version(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return -1
    return 0 if tensor.is_inference() else tensor._version


def _addresses(tensors: Sequence[Any]) -> list[int]:
    try:
        return [tensor.data_ptr() for tensor in tensors]
    except (AttributeError, RuntimeError):
        return [_address(tensor) for tensor in tensors]


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a sparse tensor has no storage of its own
        return 0


def _window(tensor: torch.Tensor | None, slot: _Slot) -> Any:
    """A view of a buffer's first bytes on a CPU; an empty one of others."""
    seen = slot.is_buffer and type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_cpu
    if tensor is None or not seen or not tensor.is_contiguous() or not tensor.data_ptr():
        return (ctypes.c_char * 0)()
    return (ctypes.c_char * min(_LOOKED_AT_BYTES, tensor.nbytes)).from_address(tensor.data_ptr())
