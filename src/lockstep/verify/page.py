"""What one replica notes, update by update, and how the replicas' notes are put side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.mirroring.update import Totals
from lockstep.replicas.rng.state import own_generator
from lockstep.verify.record import BatchRecord, Leaf, OutputRecord, Rows
from lockstep.verify.rows import fingerprints, some_values, tensors_with_rows

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
