"""What a run records: values only, on the CPU, picklable. One ``UpdateRecord`` for each optimizer update.

Each replica writes a ``ReplicaTrace`` of its own, one ``StepTrace`` per update; an ``UpdateRecord`` joins those of all
replicas. Rows of a batch are recorded as fingerprints, outputs as some of their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._torch_compat import keystr, tree_flatten_with_path
from lockstep.introspection import is_kind
from lockstep.replicas.rng.default_generator import own_generator
from lockstep.replicas.watcher import Totals

Rows = tuple[int, ...]
"""One fingerprint per row."""


BatchTensors = Mapping[tuple[Any, ...], tuple[Rows, ...]]
"""The tensors with rows of a batch by their key, which ends in a name, each with its rows per replica."""


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """The batch of one ``strategy.run``."""

    arguments: BatchTensors = field(default_factory=dict)  # those among the arguments of ``run``
    inputs: BatchTensors = field(default_factory=dict)  # those that mirrored modules were called with


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """The state before the first step."""

    devices: tuple[str, ...]  # names of the replicas' devices
    parameters: Mapping[str, Tensor]  # the parameters
    batch_norms: tuple[str, ...] = ()  # names of the modules that take statistics over a replica's shard
    dropouts: tuple[str, ...] = ()  # names of the active dropout modules


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """How a run ended."""

    strategies: int = 0  # number of strategies with several devices that the program made
    single: int = 0  # number of strategies with one device
    unit: float = 2.0**-23  # machine epsilon of the parameters' dtype
    coarse: float = 2.0**-23  # machine epsilon of the coarsest dtype in use, as under autocast
    error: str = ""  # the exception that the program raised, in one line; empty if none
    location: str = ""  # where it was raised, such as ``train.py:12``
    traceback: str = field(default="", repr=False)  # its traceback


@dataclass(frozen=True)
class ReadyRecord:
    """The process has started and is about to run the program."""


CallKey = tuple[int, int, str]
"""Number of the run, number of the call in it, name of the tensor."""


@dataclass
class StepTrace:
    """What one replica records for one update."""

    # fingerprints of the tensors among the arguments of each ``strategy.run``, by run and name
    arguments: dict[tuple[int, str], Rows] = field(default_factory=dict)
    # fingerprints of the tensors that mirrored modules were called with
    inputs: dict[CallKey, Rows] = field(default_factory=dict)
    outputs: dict[CallKey, Tensor] = field(default_factory=dict)  # outputs of mirrored modules, [rows, values]
    # parameters that changed outside the optimizer before and after this update; the same on all replicas
    changed_before: dict[str, Tensor] = field(default_factory=dict)
    changed_after: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0  # the sum of what was back-propagated
    total: float = 0.0  # ``Totals.total``; 0 in a custom loop
    count: float = 0.0  # ``Totals.count``; the counts of all replicas add up to 1 in a custom loop
    gradients: dict[str, Tensor] = field(default_factory=dict)  # the replica's own gradients, by parameter
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the update; the same on all replicas
    draws: bool = False  # whether the replica drew random numbers


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """One update."""

    step: int  # its number, from 1
    replicas: tuple[StepTrace, ...]  # the replicas' traces
    buffers: Mapping[str, Tensor]  # the buffers after the step, averaged over the replicas

    @property
    def batches(self) -> tuple[BatchRecord, ...]:
        """The batches since the previous update, in order."""
        runs = sorted({run for trace in self.replicas for run, *_ in [*trace.arguments, *trace.inputs]})
        arguments, inputs = ([getattr(trace, name) for trace in self.replicas] for name in ("arguments", "inputs"))
        return tuple(BatchRecord(arguments=_join(arguments, run), inputs=_join(inputs, run)) for run in runs)

    @property
    def outputs(self) -> list[tuple[str, Tensor | None]]:
        """The outputs in call order, with their names. Rows of all replicas are concatenated; None if they differ."""
        outputs = []
        for key in _keys(trace.outputs for trace in self.replicas):
            parts = [trace.outputs[key] for trace in self.replicas if key in trace.outputs and len(trace.outputs[key])]
            joined = torch.cat(parts) if len({part.shape[1] for part in parts}) == 1 else None
            outputs.append((key[-1], joined))
        return outputs


def _join(replicas: Sequence[Mapping[Any, Rows]], run: int | str) -> BatchTensors:
    keys = [key for key in _keys(replicas) if key[0] == run]
    return {key: tuple(rows.get(key, ()) for rows in replicas) for key in keys}


def _keys(mappings: Iterable[Mapping[Any, Any]]) -> list[Any]:
    """The keys of all replicas, each once: a replica with an empty shard may have skipped a call."""
    # Sorted without the name: the sort is stable, so several tensors of a call stay in the order in which it had them.
    return sorted({key: None for mapping in mappings for key in mapping}, key=lambda key: key[:-1])


Message = ReadyRecord | StartRecord | UpdateRecord | EndRecord

KEPT_VALUES = 256
"""At most so many values of an output's row are compared, at equal distances."""


def fingerprints(tensor: Tensor) -> Rows:
    """A 64-bit hash of each row of ``tensor`` ([rows, ...], any dtype). Different rows collide with chance 2^-64."""
    rows = tensor.detach().cpu().contiguous().reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    if rows.numel() == 0:
        return (0,) * tensor.shape[0]
    integers = _as_integers(rows)
    # A dot product with odd random numbers, modulo 2^64: int64 wraps around.
    return tuple((integers * _odd_factors(integers.shape[1])).sum(1).tolist())


def some_values(tensor: Tensor) -> Tensor:
    """A CPU copy of shape [rows, at most ``KEPT_VALUES``]: whole rows, or values at equal distances."""
    rows = tensor.detach().reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    stride = max(1, math.ceil(rows.shape[1] / KEPT_VALUES))
    return rows[:, ::stride].to("cpu", copy=True)


def tensors_with_rows(structure: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of at least one dimension in a nested structure, each with its path."""
    for path, leaf in tree_flatten_with_path(structure)[0]:
        if is_kind(leaf, Mapping):
            yield from ((f"{keystr(path)}{name}", tensor) for name, tensor in tensors_with_rows(dict(leaf)))
        elif is_kind(leaf, Tensor) and leaf.ndim > 0 and not leaf.is_sparse:
            yield keystr(path), leaf


def _as_integers(rows: Tensor) -> Tensor:
    if rows.dtype == torch.bool:
        return rows.to(torch.int64)
    if rows.is_complex():
        return _as_integers(torch.view_as_real(rows).reshape(rows.shape[0], -1))
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    # By the bits: equal floats may differ in their bits (0.0 and -0.0), and NaN equals nothing.
    return rows.view(integer).to(torch.int64)


@cache
def _odd_factors(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    # Odd numbers have an inverse modulo 2^64, so a row that differs in one value never has the same fingerprint.
    return torch.randint(-(2**62), 2**62, (number,), generator=generator) * 2 + 1


class ReplicaTrace:
    """The trace of one replica. Its own thread writes it during a run, the caller's thread between runs."""

    def __init__(self) -> None:
        self.current = StepTrace()
        self.updates: list[StepTrace] = []
        self.unit = 0.0
        self._run = 0
        self._calls = 0
        self._generator_state: Tensor | None = None

    def begin_run(self, number: int, arguments: Mapping[str, Tensor]) -> None:
        self._run, self._calls = number, 0
        self.current.arguments.update({(number, name): fingerprints(leaf) for name, leaf in arguments.items()})

    def record_call(self, module: str, inputs: Any, outputs: Any) -> None:
        self._calls += 1
        for name, tensor in tensors_with_rows(inputs):
            self.current.inputs[self._run, self._calls, f"{module} input {name}"] = fingerprints(tensor)
        for name, tensor in tensors_with_rows(outputs):
            self.current.outputs[self._run, self._calls, f"{module}{name}"] = some_values(tensor)
            self._record_dtype(tensor)

    def record_draws(self) -> None:
        """Records whether the replica's generator was used since the last call of this method."""
        reference = own_generator.get()
        generator = None if reference is None else reference()
        if generator is None:
            return
        # Comparing states finds every draw, whichever function of torch makes it; there is no hook on a generator.
        state = generator.get_state()
        if self._generator_state is not None and not torch.equal(state, self._generator_state):
            self.current.draws = True
        self._generator_state = state

    def record_gradients(self, names: Sequence[str], parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        self.record_draws()
        self.current.total, self.current.count = float(totals.total), float(totals.count)
        self.record_sums(names, parameters)

    def record_sums(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Records gradients without what they are divided by."""
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.grad is not None:
                dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                self.current.gradients[name] = dense.detach().to("cpu", copy=True)

    def close_update(self) -> None:
        """Ends the current update; what follows belongs to the next."""
        self.updates.append(self.current)
        self.current = StepTrace()

    def take_update(self, number: int) -> StepTrace:
        """Returns a closed update and frees its tensors here."""
        update, self.updates[number] = self.updates[number], StepTrace()
        return update

    def _record_dtype(self, tensor: Tensor) -> None:
        kind = tensor.device.type
        autocast = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
        units = [torch.finfo(dtype).eps for dtype in (*autocast, tensor.dtype) if dtype.is_floating_point]
        self.unit = max([self.unit, *units])
