"""Finds what was written into a user's tensors in place, by their version, address and, on a CPU, first bytes.

Watched are buffers, and weights that other replicas have in other memory. What is written into the user's is written
into the copies before the next run or read.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_COMPARED_BYTES = 4096
"""Of a tensor on a CPU or a NumPy array: a write through ``.data`` or NumPy counts no version."""
Entry = tuple[dict[str, Any], str]
"""A dict of a submodule and a key in it."""
Watched = tuple[dict[str, Any], str, list[Entry]]
"""The entry of one of the user's tensors, and those of its copies that follow it."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """What the user's tensors are like: the id, address and version of each, and its first bytes, if on a CPU."""

    tensors: list[tuple[int, int, int]]
    contents: list[bytes]


class WatchedTensors:
    """The tensors of one structure of a module; another structure gets another object.

    Attributes:
        replayed: whether a CUDA graph has written to all copies. It counts no version, so bytes may differ.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self._copies = [entry for *_, entries in watched for entry in entries]
        self._windows: tuple[list[Any], list[Any]] = ([], [])
        self._returned_means: list[tuple[torch.Tensor, int, Sequence[torch.Tensor]]] = []
        self.replayed = False
        self.remember()

    def remember(self) -> None:
        """Notes the present tensors: one that changes from now on was changed in the user's module."""
        self._returned_means.clear()
        self.replayed = False
        if self._watched:
            self._marks, self._versions = self._present_marks(), _versions(self._copies)

    def forget_windows(self) -> None:
        """Drops the views into memory, which a step may free."""
        self._windows = ([], [])

    def remember_read(self, value: torch.Tensor, copies: Sequence[torch.Tensor]) -> None:
        """Notes that the program gets a mean over ``copies``, and may write into it as into a plain buffer."""
        if len(copies) > 1 and address_of(value) != address_of(copies[0]):
            self._returned_means.append((value, version_of(value), copies))

    def write_parameters(self) -> None:
        """Gives the copies of watched parameters their values."""
        for tensors, name, entries in self._watched:
            if isinstance(value := tensors.get(name), nn.Parameter):
                write(value, entries)

    @torch.no_grad()
    def write_changes(self) -> bool | None:
        """Writes to all copies what was written into the user's tensors. Then ``remember`` is due.

        Returns whether any was in other memory; None if nothing was written.
        """
        if not self._watched:
            return None
        # A buffer that was read outside is a mean in a tensor of its own; what was written into it goes to all copies
        # (test_what_is_written_into_buffers_read_outside_is_written).
        read = [(value, copies) for value, version, copies in self._returned_means if version_of(value) != version]
        for value, copies in read:
            for buffer in copies:
                buffer.copy_(value)
        now, former = self._present_marks(), self._marks
        # Bytes beside versions: a write through .data or NumPy counts no version.
        if now.tensors == former.tensors and (self.replayed or now.contents == former.contents):
            return False if read else None
        versions, at, moved = _versions(self._copies), 0, False
        for index, (tensors, name, entries) in enumerate(self._watched):
            # What a replica or load_state_dict has written to the copies itself stays
            # (test_what_is_written_into_all_copies_stays_as_it_was_written).
            unwritten = versions[at : at + len(entries)] == self._versions[at : at + len(entries)]
            at += len(entries)
            is_same_content = self.replayed or now.contents[index] == former.contents[index]
            same = now.tensors[index] == former.tensors[index] and is_same_content
            # Another object is a difference in a dict.
            if same or now.tensors[index][0] != former.tensors[index][0] or not unwritten:
                continue
            moved |= now.tensors[index][1] != former.tensors[index][1]
            write(tensors.get(name), entries)
        return moved

    def _present_marks(self) -> _Marks:
        tensors = [tensors.get(name) for tensors, name, _ in self._watched]
        # Attributes are read without a check, as in _versions: this runs at every step for every buffer. A tensor that
        # has none of them is rare and takes the slow way.
        try:
            marks = [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):  # None, or a sparse or an inference tensor
            marks = [(id(tensor), address_of(tensor), version_of(tensor)) for tensor in tensors]
        addresses = [mark[:2] for mark in marks]
        if self._windows[0] != addresses:
            self._windows = (addresses, list(map(first_bytes, tensors)))
        return _Marks(marks, [window.raw for window in self._windows[1]])


@torch.no_grad()
def write(value: Any, entries: Iterable[Entry]) -> None:
    """Gives the copies' tensors the values of the user's."""
    for tensors, name in entries:
        duplicate = tensors.get(name)
        if not isinstance(duplicate, torch.Tensor):
            continue
        if duplicate.shape == value.shape and duplicate.dtype == value.dtype and not duplicate.is_inference():
            duplicate.copy_(value)
        elif isinstance(duplicate, nn.Parameter):
            duplicate.data = value.detach().to(duplicate.device, copy=True)
        else:
            tensors[name] = value.detach().to(duplicate.device, copy=True)


def is_array(value: Any) -> bool:
    """Whether its values are changed in place, as those of a tensor or a NumPy array are."""
    kind = type(value)
    return issubclass(kind, torch.Tensor) or ("numpy" in sys.modules and kind is sys.modules["numpy"].ndarray)


def _versions(entries: Sequence[Entry]) -> list[int]:
    try:
        return [tensors[name]._version for tensors, name in entries]
    except (AttributeError, KeyError, RuntimeError):
        return [version_of(tensors.get(name)) for tensors, name in entries]


def version_of(array: Any) -> int:
    """The number of writes that torch has counted; -1 for an array, which counts none."""
    if not isinstance(array, torch.Tensor):
        return -1
    return 0 if array.is_inference() else array._version


def address_of(array: Any) -> int:
    """Where the values are in memory; 0 if there is no such place."""
    if not isinstance(array, torch.Tensor):
        return array.ctypes.data if is_array(array) else 0
    try:
        return array.data_ptr()
    except RuntimeError:  # a sparse tensor has no storage of its own
        return 0


def first_bytes(array: Any) -> Any:
    """A view of the first bytes of a plain tensor on a CPU or of a NumPy array; an empty one of others."""
    if isinstance(array, torch.Tensor):
        is_readable = (
            type(array) is torch.Tensor and array.layout is torch.strided and array.is_cpu and array.is_contiguous()
        )
    else:
        is_readable = is_array(array) and array.dtype != object and array.flags.c_contiguous
    # A view into the memory, made once for each address: reading its bytes takes no call of torch or NumPy.
    address = address_of(array) if is_readable else 0
    if not address:
        return (ctypes.c_char * 0)()
    return (ctypes.c_char * min(_COMPARED_BYTES, array.nbytes)).from_address(address)
