"""Finds the largest global batch whose step fits all replicas, by trial steps.

    size -> make_batch -> shards -> step, twice, in every replica -> fits? peak? -> restore everything -> next size

``Bracket`` chooses the next size by pure functions on numbers. ``TrialState`` restores, bit for bit, what a trial step
has changed.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep._torch_compat import tree_map
from lockstep.config import LogicalDevice
from lockstep.data.dataset import DistributedDataset
from lockstep.data.layout import BatchLayout
from lockstep.data.sharding import batch_rows
from lockstep.errors import ConfigError, DataError, DeviceMemoryError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable
from lockstep.replicas.cpu.memory import ResidentPeak, available_mb, give_back_freed_memory, resident_mb
from lockstep.replicas.device.driver import gpu_driver

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy


_FURTHEST = 16
"""By how many times a size may be above the largest that has been tried, however much memory seems to be left."""
_FINE = 64
"""Where the projected peak ends the search, gains below 1/64 of the size are not worth another trial."""
_NOISE_MB = 1.0
"""Differences of the resident memory below this say nothing."""
_MARGIN = 0.05
"""Part of the memory above the smallest size's peak that a projection leaves free: after many steps the heap has gaps.
MobileNetV2 at 64x64 had 2 to 9% more resident after six steps than in a step that began with a tidy heap."""
_WELL_BELOW = 0.75
"""Part of a size up to which a smaller one tells how memory grows."""


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """Between the largest size that fits and the smallest that does not. Sizes are rows of a global batch.

    Args:
        start: the size to begin with.
        multiple_of: what the result is a multiple of.
        limit: the largest size of interest; None is without end.
        fits: the largest size that was tried and fits; 0 before one has.
        fails: the smallest size that was tried and does not fit; None before one has not.

    Raises:
        ConfigError: a number that is no positive whole number, or a limit below ``multiple_of``.
    """

    start: int
    multiple_of: int
    limit: int | None = None
    fits: int = 0
    fails: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "multiple_of", "limit"):
            value = getattr(self, name)
            if (value is not None or name != "limit") and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} is no number of examples; give a whole number of 1 or more")
        if self.limit is not None and self.limit < self.multiple_of:
            raise ConfigError(
                f"limit={self.limit} is below multiple_of={self.multiple_of}, so no size is left to try; "
                f"raise the limit, or give multiple_of={self.limit} or less"
            )

    @property
    def result(self) -> int:
        """The largest multiple known to fit; 0 is none."""
        return self._multiple(self.fits)

    def after(self, size: int, *, fitted: bool) -> Bracket:
        """The bracket when ``size`` has been tried."""
        return replace(self, fits=size) if fitted else replace(self, fails=size)

    def candidate(self, reach: int | None = None) -> int | None:
        """The size to try next; None when there is none left.

        Args:
            reach: the largest size that is projected to fit, above which nothing is tried; None where nothing is
                projected. It need not be a multiple: a size between two of them may be tried to see further.
        """
        wanted = self._wanted()
        if wanted <= self._multiple(self.fits):
            return None
        if reach is None:
            return wanted
        if not self.fits:  # nothing is known yet, so the least that can be asked for
            return self.multiple_of
        reach = min(reach, _FURTHEST * self.fits)
        return wanted if wanted <= reach else self._towards(reach)

    def _wanted(self) -> int:
        if self.fails is None:
            wanted = max(self.start, 2 * self.fits)
            return max(self._multiple(min(wanted, self.limit or wanted)), self.multiple_of)
        if self.fits:
            return self._multiple((self.fits + self.fails) // 2)
        smallest = self.multiple_of if self.multiple_of < self.fails else 0
        return max(self._multiple(self.fails // 2), smallest)

    def _towards(self, reach: int) -> int | None:
        next_multiple = self._multiple(self.fits) + self.multiple_of
        if reach >= next_multiple:
            reach = self._multiple(reach)
        elif self.fits >= 2 * self.multiple_of:
            return None
        return reach if reach - self.fits >= max(1, self.fits // _FINE) else None

    def _multiple(self, size: int) -> int:
        return size - size % self.multiple_of


@dataclass(frozen=True)
class PeakLine:
    """Peaks of tried sizes, on a line: what is resident anyway, and so much for each row.

    Args:
        points: (rows, MB resident at the peak) of the sizes that ran, by rows.
        resting_mb: resident after the smallest, with what a step leaves for the next, such as optimizer state.
    """

    points: tuple[tuple[int, float], ...] = ()
    resting_mb: float = 0.0

    def after(self, rows: int, *, peak_mb: float, resting_mb: float) -> PeakLine:
        """The line when ``rows`` have been run."""
        resting_mb = self.resting_mb if self.points else resting_mb
        return PeakLine(tuple(sorted([*self.points, (rows, peak_mb)])), resting_mb)

    def reach(self, budget_mb: float) -> int:
        """The largest number of rows whose peak is projected to stay inside the budget; 0 before any has been run.

        After one size its whole peak is taken to grow with the rows, so that the projection is too high rather than too
        low; after two, what they differ by.
        """
        if not self.points:
            return 0
        rows, peak_mb = self.points[-1]
        margin_mb = _MARGIN * max(0.0, budget_mb - self.points[0][1])
        return int(rows + (budget_mb - margin_mb - peak_mb) / self._mb_per_row())

    def _mb_per_row(self) -> float:
        *earlier, (rows, peak_mb) = self.points
        if not earlier:
            return max(_NOISE_MB, peak_mb - self.resting_mb) / rows
        # From the smallest, and from the last that is well below: where memory grows faster than the rows, the steeper
        # counts. Sizes close to each other differ by noise.
        below = [point for point in earlier if point[0] <= _WELL_BELOW * rows] or earlier
        return max(max(_NOISE_MB, peak_mb - other_mb) / (rows - other) for other, other_mb in (below[0], below[-1]))


_Undo = Callable[[], None]


class TrialState:
    """What trial steps may change: weights, buffers, gradients, training mode, optimizers, variables, random numbers.

    The replicas' own random numbers are the strategy's business.

    Args:
        modules: the strategy's mirrored modules.
        optimizers: its mirrored optimizers.
        variables: its variables.
    """

    def __init__(
        self,
        modules: Iterable[MirroredModule],
        optimizers: Iterable[MirroredOptimizer],
        variables: Iterable[MirroredVariable],
    ) -> None:
        self._undo: list[_Undo] = [_random_numbers()]
        for module in modules:
            self._undo += _module(module)
        for optimizer in optimizers:
            self._undo.append(_optimizer(optimizer))
        for variable in variables:
            self._undo += [_tensor(value) for value in variable.values]

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes everything what it was. May be called more than once."""
        for undo in self._undo:
            undo()


class _Kept:
    """A tensor and a copy of what it held. Not a tensor itself, so that it is a leaf of any structure."""

    def __init__(self, live: torch.Tensor) -> None:
        self.live = live
        self._held = live.detach().to("cpu", copy=True)

    def put_back(self) -> torch.Tensor:
        self.live.detach().copy_(self._held)
        return self.live


def _tensor(live: torch.Tensor) -> _Undo:
    kept = _Kept(live)

    def undo() -> None:
        kept.put_back()

    return undo


def _module(module: MirroredModule) -> list[_Undo]:
    # The replicas' copies may share the storage of their weights: each storage is kept once.
    every = [parameter for duplicate in module.copies for parameter in duplicate.parameters()]
    weights = {(weight.data_ptr(), weight.shape): weight for weight in every}
    parts = [part for duplicate in module.copies for part in duplicate.modules()]
    return [
        *map(_tensor, weights.values()),
        *map(_gradient, every),
        *(_buffer(part, name, buffer) for part in parts for name, buffer in part.named_buffers(recurse=False)),
        *(_mode(part) for part in [module, *parts]),
    ]


def _gradient(parameter: nn.Parameter) -> _Undo:
    kept = None if parameter.grad is None else _Kept(parameter.grad)

    def undo() -> None:
        parameter.grad = None if kept is None else kept.put_back()

    return undo


def _buffer(part: nn.Module, name: str, buffer: torch.Tensor) -> _Undo:
    kept = _Kept(buffer)

    def undo() -> None:
        setattr(part, name, kept.put_back())  # a module may give a buffer a new tensor

    return undo


def _mode(part: nn.Module) -> _Undo:
    training = part.training

    def undo() -> None:
        part.training = training

    return undo


def _optimizer(optimizer: MirroredOptimizer) -> _Undo:
    state = {parameter: _kept(of_parameter) for parameter, of_parameter in optimizer.state.items()}
    groups = [_kept({name: value for name, value in g.items() if name != "params"}) for g in optimizer.param_groups]

    def undo() -> None:
        optimizer.state.clear()
        optimizer.state.update({parameter: _put_back(kept) for parameter, kept in state.items()})
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **_put_back(kept)})
        optimizer.storages.reset()

    return undo


def _kept(structure: Any) -> Any:
    return tree_map(lambda leaf: _Kept(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), structure)


def _put_back(structure: Any) -> Any:
    return tree_map(lambda leaf: leaf.put_back() if isinstance(leaf, _Kept) else copy.deepcopy(leaf), structure)


def _random_numbers() -> _Undo:
    """What torch, Python, and NumPy where it is loaded, draw next."""
    numpy = sys.modules.get("numpy")
    of_cpu, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_gpus = torch.cuda.get_rng_state_all() if in_use else []

    def undo() -> None:
        torch.set_rng_state(of_cpu)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)

    return undo


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
            driver.release_cached(physical.torch_device)
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
