"""What a run sends to be compared: values only, on the CPU, picklable. One ``UpdateRecord`` for each update.

A tensor with rows is kept for each replica; placed one after another in replica order they are those of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

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
