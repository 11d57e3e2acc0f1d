"""Finding the largest global batch whose step fits all replicas: trial steps, and what they took.

    size -> make_batch -> shards -> step, twice, in every replica -> fitted? peak? -> everything put back -> next size

Which size comes next is ``batch_bracket``'s business. Here it is run, and everything it did is undone.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config import LogicalDevice
from lockstep.data.distributed import DistributedDataset
from lockstep.data.layout import BatchLayout
from lockstep.data.shards import batch_rows
from lockstep.errors import ConfigError, DataError, DeviceMemoryError
from lockstep.mirroring.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable
from lockstep.replicas.cpu.memory import ResidentPeak, available_mb, give_back_freed_memory, resident_mb
from lockstep.replicas.device.driver import gpu_driver
from lockstep.strategies.batch_bracket import Bracket, PeakLine
from lockstep.strategies.trial_state import TrialState

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy

SHARE_OF_AVAILABLE = 0.8
"""Without ``memory_mb``, the part of the memory still available on the host that the replicas of a CPU may take."""
RUNS_A_TRIAL = 2
"""The first step makes the optimizer's state, so that only the second takes what all others will."""
# What torch's allocator for the CPU says in a plain RuntimeError.
_CPU_ALLOCATOR = "can't allocate memory"


@dataclass(frozen=True)
class Trials:
    """What a search runs, and what it puts back.

    Args:
        strategy: whose replicas are to hold the batch.
        step: called with its shard in every replica.
        make_batch: gives a global batch of so many rows.
        optimizers: the strategy's mirrored optimizers.
        variables: the strategy's variables.
    """

    strategy: Strategy
    step: Callable[[Any], Any]
    make_batch: Callable[[int], Any]
    optimizers: Iterable[MirroredOptimizer] = ()
    variables: Iterable[MirroredVariable] = ()


def search_batch_size(trials: Trials, bracket: Bracket, *, memory_mb: float | None = None) -> int:
    """The largest size that fits, found by trying; everything is then as it was before. Outside replicas.

    Args:
        trials: what is tried.
        bracket: where to look.
        memory_mb: see ``Strategy.find_batch_size``.

    Raises:
        DeviceMemoryError: not even the smallest size fits.
        ConfigError: a budget that cannot be kept.
        DataError: ``make_batch`` gives another number of rows than asked for.
    """
    try:
        bracket, reason = _searched(_Search(trials, _budget(trials.strategy.devices, memory_mb)), bracket)
    finally:
        gc.collect()
        _give_back(trials.strategy.devices)
    if not bracket.result:
        raise DeviceMemoryError(
            f"a global batch of {bracket.multiple_of}, the smallest to try, does not fit {trials.strategy!r}: "
            f"{reason}; use shorter or smaller examples, a smaller model, or more memory"
        )
    return bracket.result


def _searched(search: _Search, bracket: Bracket) -> tuple[Bracket, str]:
    """The bracket when nothing is left to try, and what was in the way of more."""
    while (size := bracket.candidate(search.reach())) is not None:
        bracket = bracket.after(size, fitted=search.fits(size))
    return bracket, search.reason


class _Search:
    """Runs the trials and keeps what they took."""

    def __init__(self, trials: Trials, budget_mb: float | None) -> None:
        self._trials = trials
        self._before = TrialState(trials.strategy.mirrored_modules, trials.optimizers, trials.variables)
        self._budget_mb = budget_mb
        self._line = PeakLine()
        self.reason = "" if budget_mb is None else f"the budget of {budget_mb:,.0f} MB for this process"
        """What was in the way of the smallest size that does not fit."""

    def reach(self) -> int | None:
        """The largest size that is projected to stay inside the budget; None where there is none to keep."""
        return None if self._budget_mb is None else self._line.reach(self._budget_mb)

    def fits(self, size: int) -> bool:
        """Whether a global batch of ``size`` goes through; afterwards everything is as it was before."""
        with self._undone():
            with ResidentPeak() as peak:
                failure = self._failure(size)
            # A replica's thread may still hold what it was given last; it lets go before it takes the next.
            self._trials.strategy.run(_of_its_own(lambda _: None), (None,))
            gc.collect(1)  # what is young: a graph and an error's frames may hold each other
            _give_back(self._trials.strategy.devices)
            resting_mb = resident_mb()
        if failure is not None:
            self.reason = failure
            return False
        if self._budget_mb is None:
            return True
        self._line = self._line.after(size, peak_mb=peak.peak_mb, resting_mb=resting_mb)
        if peak.peak_mb > self._budget_mb:
            taken, budget = f"{peak.peak_mb:,.0f} MB", f"{self._budget_mb:,.0f} MB"
            self.reason = f"a batch of {size} took this process to {taken} of a budget of {budget}"
            return False
        return True

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Whatever runs inside the block, and however it ends, nothing of it stays."""
        with self._trials.strategy.trial():
            try:
                yield
            finally:
                self._before.put_back()

    def _failure(self, size: int) -> str | None:
        """What ran out of memory, if anything did. What happens inside is out of reach once this has returned."""
        try:
            _run(self._trials, size)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
                raise
            _forget_frames(error)
            notes = getattr(error, "__notes__", [])
            return " ".join([f"a batch of {size} ended in", str(error) or type(error).__name__, *notes])
        return None


def _run(trials: Trials, size: int) -> None:
    strategy = trials.strategy
    batch = trials.make_batch(size)
    rows = batch_rows(BatchLayout(sizes=[size]).marked(batch))
    if rows != size:
        raise DataError(
            f"make_batch({size}) gave {rows} rows, expected {size}; give as many as asked for, "
            f"or limit=... if there are no more"
        )
    step = _of_its_own(trials.step)
    for shards in DistributedDataset([batch], strategy.devices, prefetch=0):
        for _ in range(RUNS_A_TRIAL):
            strategy.run(step, (shards,))
            _give_back(strategy.devices)  # or gaps in the heap would decide what the next step seems to take


class _Step:
    """The user's step, whose results are dropped in the replica."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._step = step

    def __call__(self, shard: Any) -> None:
        self._step(shard)


def _of_its_own(step: Callable[[Any], Any]) -> Callable[[Any], None]:
    """The step under a type of its own.

    By it, or by its code, the issue policy knows a step, and it must not learn from trials of other sizes.
    """
    own: _Step = type("_Trial", (_Step,), {})(step)
    return own


def _give_back(devices: Sequence[LogicalDevice]) -> None:
    """Returns to the system, and to GPUs, what has been freed and is kept for the next step."""
    for physical in {device.physical for device in devices}:
        driver = gpu_driver(physical)
        if driver is not None:
            driver.give_back(physical.torch_device)
    give_back_freed_memory()


def default_budget_mb(devices: Sequence[LogicalDevice]) -> float | None:
    """MB that the process may have resident without ``memory_mb``; None where every replica is on a GPU.

    What it has now and a share of what the host has available. A GPU knows its own limits.
    """
    if not any(device.kind == "CPU" for device in devices):
        return None
    return resident_mb() + SHARE_OF_AVAILABLE * available_mb()


def _budget(devices: Sequence[LogicalDevice], memory_mb: float | None) -> float | None:
    default_mb = default_budget_mb(devices)
    if default_mb is None:
        if memory_mb is not None:
            raise ConfigError(
                f"memory_mb={memory_mb} is a budget of host memory for replicas on a CPU, and all of these are on "
                "GPUs; leave it out: a GPU's limit is its own, or the memory_limit of its share"
            )
        return None
    if memory_mb is None:
        return default_mb
    now_mb = resident_mb()
    if not memory_mb > now_mb:
        raise ConfigError(
            f"memory_mb={memory_mb} leaves nothing for a step: the process has {now_mb:.0f} MB resident already; "
            "give the most that it may have, weights and program included"
        )
    return memory_mb


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)


def _forget_frames(error: BaseException) -> None:
    """Drops what the frames of a failed step hold: its activations, its batch."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__context__
