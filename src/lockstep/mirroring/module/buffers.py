"""The values of buffers outside replicas: changes reach all copies, and reads give averages.

``OutsideChanges`` copies to all copies what a program writes into the user's module between runs. ``BufferAverages``
gives floating-point buffers as their mean over the replicas of all workers:

    replicas train, each changes its own -> exchange, where every worker makes the same call -> read, on any worker

A read never waits for other workers. It gives what the last exchange brought and is refused where that may be out of
date. Exchanges happen in ``sync_buffers``, in the first run in evaluation mode after training, in checkpoints and at
the end of an epoch.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lockstep.collectives.communicator import Communicator
from lockstep.collectives.reduce import sum_tensors
from lockstep.errors import UsageError
from lockstep.mirroring.module.batch_norm import SyncBatchNorm

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


_Copies = Sequence[torch.Tensor]
"""One buffer's copies, one per local replica."""
_LOG = logging.getLogger("lockstep")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class BufferAverages:
    """What a mirrored module's buffers are outside replicas: of floating ones the mean, of others replica 0's.

    Args:
        copies: of the module, one per local replica. All workers have the same buffers to begin with.
        workers: over whose replicas they are averaged.

    Attributes:
        trained: whether replicas may have changed buffers since the last exchange; the same on all workers.
        passed: whether a local replica has called the module since the last exchange.
        mode_in_replicas: whether replicas set the training mode themselves, each its copy's.
    """

    def __init__(self, copies: Sequence[nn.Module], workers: Communicator) -> None:
        self._copies, self._workers = copies, workers
        self.mode_in_replicas = False
        self._warned = False
        self._lock = threading.Lock()
        self.note_equal()

    def note_equal(self) -> None:
        """Notes that all replicas of all workers have the same buffers now."""
        self._note([])

    def exchange(self) -> list[torch.Tensor]:
        """The averages, in the order of the buffers, for this and for later reads. Every worker must call it."""
        buffers = self._buffers()
        floating = [copies for copies in buffers if copies[0].is_floating_point()]
        if self._workers.is_single or not floating:
            return [_mean(copies) for copies in buffers]
        if len(set(self._workers.all_gather_numbers("buffers", [_checksum(floating)]))) == 1:
            self._note([])
            return [copies[0].detach() for copies in buffers]
        sums = self._workers.all_reduce("averages of buffers", [sum_tensors(_at_home(copies)) for copies in floating])
        others = [copies[0].detach().clone() for copies in buffers if not copies[0].is_floating_point()]
        self._workers.broadcast("the chief's other buffers", others)
        means, firsts = iter([total / self._workers.num_replicas for total in sums]), iter(others)
        found = [next(means) if copies[0].is_floating_point() else next(firsts) for copies in buffers]
        pairs = zip(buffers, found, strict=True)
        self._note([(copies[0], mean) for copies, mean in pairs if mean.is_floating_point()])
        return found

    def read(self) -> list[torch.Tensor]:
        """The averages, in the order of the buffers, without other workers.

        Raises:
            UsageError: other workers' buffers may have changed since the last exchange, or these have.
        """
        buffers = self._buffers()
        if self._workers.is_single:
            return [_mean(copies) for copies in buffers]
        own = self._own(buffers)
        if any(copies[0].is_floating_point() for copies in own):
            self._check_up_to_date(own)
        ids = {id(copies[0]) for copies in own}
        means = {id(buffer): mean for buffer, mean in self._means if id(buffer) in ids}
        return [
            means[id(first)].clone() if id(first) in means else first.detach()
            for first in (each[0] for each in buffers)
        ]

    def begin_run(self) -> bool:
        """Before each run: notes whether it may change buffers.

        Returns:
            Whether buffers have to be averaged first: it evaluates, and a run before may have changed them.
        """
        if self._workers.num_replicas == 1:
            return False
        kind = _mode_of_buffers(self._copies[0])
        self.trained |= kind is True
        return self.trained and kind is False and not self.mode_in_replicas

    def set_mode_in_replica(self, module: nn.Module, mode: bool) -> None:
        """Notes that a replica has set the mode of its copy; once it evaluates with buffers of its own, says so."""
        self.mode_in_replicas = True
        self.trained |= mode
        if mode or self._warned or not self.passed or self._workers.num_replicas == 1:
            return
        with self._lock:
            warns = not self._warned and _mode_of_buffers(module) is False
            self._warned |= warns
        if warns:
            _LOG.warning(
                "eval() was called inside a replica, which evaluates with its own buffers of %s and not with the "
                "averages of all replicas; call eval() of the mirrored module outside strategy.run",
                type(module).__name__,
            )

    def _note(self, means: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._means = means  # of the first copies' buffers, where the averages are others than these
        self.trained = self.passed = False
        self._digest = 0 if self._workers.is_single else _digest(self._own(self._buffers()))

    def _check_up_to_date(self, buffers: Sequence[_Copies]) -> None:
        if (not self.trained or self.passed) and _digest(buffers) == self._digest:
            return
        first = self._copies[0]
        names = [name for name, buffer in first.named_buffers() if buffer.is_floating_point()]
        raise UsageError(
            f"the buffers of {type(first).__name__} ({', '.join(names[:3])}{', ...' if names[3:] else ''}) may differ "
            "between the workers since they were averaged last, and a read outside replicas does not wait for other "
            "workers; call mirrored.sync_buffers() on every worker first, then read them on any"
        )

    def _own(self, buffers: Sequence[_Copies]) -> list[_Copies]:
        """Those of which each replica has its own: in training a synchronised batch norm's are the same in all."""
        parts = [part for part in self._copies[0].modules() if isinstance(part, SyncBatchNorm)]
        alike = {id(each) for part in parts for each in part.buffers(recurse=False)}
        return [copies for copies in buffers if id(copies[0]) not in alike or not _are_equal(copies)]

    def _buffers(self) -> list[_Copies]:
        return list(zip(*(duplicate.buffers() for duplicate in self._copies), strict=True))


def weights_digest(module: torch.nn.Module) -> int:
    """A number that tells different weights apart, and costs one pass over them, on their device."""
    digest = 0
    with torch.no_grad():
        for parameter in module.parameters():
            digest = (digest * 31 + tensor_digest(parameter)) % 2**64
    return digest


def tensor_digest(tensor: torch.Tensor) -> int:
    """A number that tells different values apart, and costs one pass over a tensor, on its device."""
    words = _WORDS[tensor.element_size()]
    return int(tensor.detach().contiguous().reshape(-1).view(words).sum(dtype=torch.int64))


def _mode_of_buffers(module: nn.Module) -> bool | None:
    """Whether a part with floating buffers of its own is in training mode; None where no part has any.

    A step of MobileNetV2's 214 parts takes 2 microseconds for it in training, 30 in evaluation.
    """
    found: bool | None = None
    # A part of a divided model does not hold the model as a child.
    parts = [module] if module._modules else list(module.modules())
    while parts:
        part = parts.pop()
        if part._buffers and not isinstance(part, SyncBatchNorm):
            floating = any(each is not None and each.is_floating_point() for each in part._buffers.values())
            if floating and part.training:
                return True
            found = False if floating else found
        parts.extend(each for each in part._modules.values() if each is not None)
    return found


def _mean(copies: _Copies) -> torch.Tensor:
    if not copies[0].is_floating_point() or _are_equal(copies):
        return copies[0].detach()
    return sum_tensors(_at_home(copies)) / len(copies)


def _are_equal(copies: _Copies) -> bool:
    first, *others = _at_home(copies)
    return all(torch.equal(first, other) for other in others)


def _at_home(copies: _Copies) -> list[torch.Tensor]:
    return [copy.to(copies[0].device) for copy in copies]


def _checksum(buffers: Sequence[_Copies]) -> float:
    """Of the values, if they are the same in all local replicas; NaN, which equals nothing, if not."""
    checksum = 0
    for copies in buffers:
        if not _are_equal(copies):
            return float("nan")
        checksum = _crc(copies[0], checksum)
    return float(checksum)


def _digest(buffers: Sequence[_Copies]) -> int:
    """Of the values of all floating buffers in all local replicas."""
    digest = 0
    for copies in buffers:
        for each in copies if copies[0].is_floating_point() else ():
            digest = _crc(each, digest)
    return digest


def _crc(tensor: torch.Tensor, before: int) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().tobytes(), before)
