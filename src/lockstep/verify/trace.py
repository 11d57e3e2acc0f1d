"""What one replica notes, update by update, and how the replicas' notes are put side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from lockstep.mirroring.update import Totals
from lockstep.replicas.rng.state import own_generator

Rows = tuple[int, ...]
"""A fingerprint of each row."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A tensor of the batch.

    Args:
        name: where it stands among the arguments.
        replicas: the fingerprints of its rows, per replica.
    """

    name: str
    replicas: tuple[Rows, ...]


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """What one ``strategy.run`` was given.

    Args:
        leaves: the tensors with rows among the arguments.
        inputs: the tensors with rows that mirrored modules were called with.
    """

    leaves: tuple[Leaf, ...] = ()
    inputs: tuple[Leaf, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OutputRecord:
    """An output of a mirrored module.

    Args:
        name: the module's, and which of its outputs.
        replicas: per replica [rows, values]; None where the replica did not call it. Of long rows some values only.
    """

    name: str
    replicas: tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """One update and what led to it.

    Args:
        step: 1 for the first.
        batches: what was run since the update before, in order.
        moved: parameters that changed before this update without an update.
        outputs: of mirrored modules, in the order of the calls.
        losses: what each replica back-propagated.
        totals: each replica's ``Totals.total``; all 0 for a loop of the user's own.
        counts: each replica's ``Totals.count``; they add up to 1 there.
        gradients: each replica's own, by parameter.
        parameters: after the update.
        settled: parameters that changed after the update without one.
        buffers: after the step, averaged over the replicas.
        draws: whether random numbers were drawn in a replica.
    """

    step: int
    batches: tuple[BatchRecord, ...]
    moved: Mapping[str, Tensor]
    outputs: tuple[OutputRecord, ...]
    losses: tuple[float, ...]
    totals: tuple[float, ...]
    counts: tuple[float, ...]
    gradients: tuple[Mapping[str, Tensor], ...]
    parameters: Mapping[str, Tensor]
    settled: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    draws: bool


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """What a run begins with.

    Args:
        devices: names of the replicas' devices.
        chosen: names of the devices that the program chose.
        parameters: before the first step.
        batch_norms: names of the modules that take statistics of a replica's shard.
        dropouts: names of the dropout modules that drop something.
    """

    devices: tuple[str, ...]
    chosen: tuple[str, ...]
    parameters: Mapping[str, Tensor]
    batch_norms: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """How a run ended.

    Args:
        strategies: how many strategies of several devices the program made.
        single: how many of one device.
        unit: the relative rounding error of the parameters' type.
        coarse: that of the coarsest type that was computed in, as under autocast.
        problem: why there is nothing to compare; empty if there is.
        error: in one line, what the program raised; empty if it raised nothing.
        place: where it was raised, such as ``train.py:12``.
        traceback: of that error.
    """

    strategies: int = 0
    single: int = 0
    unit: float = 2.0**-23
    coarse: float = 2.0**-23
    problem: str = ""
    error: str = ""
    place: str = ""
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True)
class ReadyRecord:
    """The process is there, and is about to start the program."""


Message = ReadyRecord | StartRecord | UpdateRecord | EndRecord


KEPT_VALUES = 256
"""Values of an output's row that are compared; of longer rows, as many at equal distances."""


def fingerprints(tensor: Tensor) -> Rows:
    """A 64-bit number for each row: equal rows have equal numbers, and others do not but by a chance of about 2^-64.

    Args:
        tensor: [rows, ...], any type.
    """
    rows = tensor.detach().cpu().contiguous().reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    if rows.numel() == 0:
        return (0,) * tensor.shape[0]
    words = _words(rows)
    # Integers wrap: a dot product with odd random numbers, modulo 2^64.
    return tuple((words * _factors(words.shape[1])).sum(1).tolist())


def some_values(tensor: Tensor) -> Tensor:
    """[rows, at most ``KEPT_VALUES``], a copy on the CPU: whole rows, or values at equal distances."""
    rows = tensor.detach().reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    stride = max(1, math.ceil(rows.shape[1] / KEPT_VALUES))
    return rows[:, ::stride].to("cpu", copy=True)


def tensors_with_rows(structure: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of at least one dimension in a structure, with the place of each."""
    for path, leaf in tree_flatten_with_path(structure)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim > 0 and not leaf.is_sparse:
            yield keystr(path), leaf


def _words(rows: Tensor) -> Tensor:
    if rows.dtype == torch.bool:
        return rows.to(torch.int64)
    size = rows.element_size()
    if rows.is_complex():
        return _words(torch.view_as_real(rows).reshape(rows.shape[0], -1))
    return rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).to(torch.int64)


@cache
def _factors(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-(2**62), 2**62, (number,), generator=generator) * 2 + 1


CallName = tuple[int, int, str]
"""The number of the run, of the call within it, and the name of the tensor."""


@dataclass
class UpdatePage:
    """One replica's notes on one update; the fields are those of ``UpdateRecord``."""

    leaves: dict[tuple[int, str], Rows] = field(default_factory=dict)
    inputs: dict[CallName, Rows] = field(default_factory=dict)
    outputs: dict[CallName, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    total: float = 0.0
    count: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    settled: dict[str, Tensor] = field(default_factory=dict)
    draws: bool = False


class Page:
    """One replica's notes. Written by its own thread during a run, and by the caller's between runs."""

    def __init__(self) -> None:
        self.current = UpdatePage()
        self.updates: list[UpdatePage] = []
        self.unit = 0.0
        self._run = 0
        self._calls = 0
        self._generator: Tensor | None = None

    def begin_run(self, number: int, leaves: Mapping[str, Rows]) -> None:
        """A run with this shard."""
        self._run, self._calls = number, 0
        self.current.leaves.update({(number, name): rows for name, rows in leaves.items()})

    def note_call(self, module: str, inputs: Any, outputs: Any) -> None:
        """A mirrored module returned."""
        self._calls += 1
        for name, tensor in tensors_with_rows(inputs):
            self.current.inputs[self._run, self._calls, f"{module} input {name}"] = fingerprints(tensor)
        for name, tensor in tensors_with_rows(outputs):
            self.current.outputs[self._run, self._calls, f"{module}{name}"] = some_values(tensor)
            self._note_type(tensor)

    def note_generator(self) -> None:
        """The replica's random numbers as they are now: has something been drawn since they were seen last?"""
        here = own_generator.get()
        generator = None if here is None else here()
        if generator is None:
            return
        state = generator.get_state()
        if self._generator is not None and not torch.equal(state, self._generator):
            self.current.draws = True
        self._generator = state

    def note_gradients(self, names: Sequence[str], parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        """This replica's gradients before they are summed."""
        self.note_generator()
        self.current.total, self.current.count = float(totals.total), float(totals.count)
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.grad is not None:
                dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                self.current.gradients[name] = dense.detach().to("cpu", copy=True)

    def close_update(self) -> None:
        """The update is done; what follows belongs to the next."""
        self.updates.append(self.current)
        self.current = UpdatePage()

    def take_update(self, number: int) -> UpdatePage:
        """The notes on an update that is done; they are forgotten here."""
        done, self.updates[number] = self.updates[number], UpdatePage()
        return done

    def _note_type(self, tensor: Tensor) -> None:
        kind = tensor.device.type
        computed = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
        units = [torch.finfo(dtype).eps for dtype in (*computed, tensor.dtype) if dtype.is_floating_point]
        self.unit = max([self.unit, *units])


def batch_record(pages: Sequence[UpdatePage]) -> tuple[BatchRecord, ...]:
    """The batches of an update, in the order of the runs that had any."""
    runs = sorted({run for page in pages for run, *_ in [*page.leaves, *page.inputs]})
    return tuple(
        BatchRecord(
            leaves=_side_by_side(pages, lambda page: page.leaves, run),
            inputs=_side_by_side(pages, lambda page: page.inputs, run),
        )
        for run in runs
    )


def output_records(pages: Sequence[UpdatePage]) -> tuple[OutputRecord, ...]:
    """The outputs of an update, in the order of the calls."""
    return tuple(
        OutputRecord(name=key[-1], replicas=tuple(page.outputs.get(key) for page in pages))
        for key in _keys(page.outputs for page in pages)
    )


def _side_by_side(
    pages: Sequence[UpdatePage], kept: Callable[[UpdatePage], Mapping[Any, Rows]], run: Any
) -> tuple[Leaf, ...]:
    keys = [key for key in _keys(kept(page) for page in pages) if key[0] == run]
    return tuple(Leaf(name=str(key[-1]), replicas=tuple(kept(page).get(key, ()) for page in pages)) for key in keys)


def _keys(kept: Iterable[Mapping[Any, Any]]) -> list[Any]:
    """The keys of all replicas, each once: a replica without rows may have left a call out."""
    return sorted({key: None for each in kept for key in each}, key=lambda key: key[:-1])
