"""Finds the largest global batch whose step fits all replicas, by trial steps.

    size -> make_batch -> shards -> step, twice, in every replica -> fits? peak? -> restore everything -> next size

``Bracket`` and ``PeakLine`` choose the next size by pure functions on numbers. ``TrialState`` restores, bit for bit,
what a trial step has changed. ``BatchSizeSearch`` runs the trials.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep._torch_compat import tree_map
from lockstep.config import LogicalDevice
from lockstep.data.dataset import DistributedDataset
from lockstep.data.layout import BatchLayout
from lockstep.data.sharding import batch_rows
from lockstep.errors import ConfigError, DataError, DeviceMemoryError
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.registry import MirroredObjects
from lockstep.replicas.cpu.memory import ResidentPeak, available_mb, give_back_freed_memory, resident_mb
from lockstep.replicas.device.driver import gpu_driver

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy


SHARE_OF_AVAILABLE = 0.8
"""Without ``memory_mb``, the part of the memory still available on the host that the replicas of a CPU may take."""
_RUNS_A_TRIAL = 2  # the first step makes the optimizer's state, so that only the second takes what all others will
_FURTHEST = 16  # how many times the largest size that was tried may be exceeded, however much memory seems to be left
_FINE = 64  # where the projected peak ends the search, gains below 1/64 of the size are not worth another trial
_NOISE_MB = 1.0  # differences of the resident memory below this say nothing
# Part of the memory above the smallest size's peak that a projection leaves free: after many steps the heap has gaps.
# MobileNetV2 at 64x64 had 2 to 9% more resident after six steps than in a step that began with a tidy heap.
_MARGIN = 0.05
_WELL_BELOW = 0.75  # part of a size up to which a smaller one shows how memory grows
_CPU_ALLOCATOR = "can't allocate memory"  # what torch's allocator for the CPU says in a plain RuntimeError


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """Between the largest size that fits and the smallest that does not. Sizes are rows of a global batch.

    Raises:
        ConfigError: a number that is no positive whole number, or a limit below ``multiple_of``.
    """

    start: int  # the size to begin with
    multiple_of: int  # the result is a multiple of it
    limit: int | None = None  # the largest size of interest
    fits: int = 0  # the largest size that was tried and fits
    fails: int | None = None  # the smallest size that was tried and does not fit

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
    """Peaks of tried sizes, on a line: what is resident anyway, and so much for each row."""

    points: tuple[tuple[int, float], ...] = ()  # (rows, MB resident at the peak) of the sizes that ran, by rows
    resting_mb: float = 0.0  # resident after the smallest, with what a step leaves for the next: optimizer state

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


class TrialState:
    """What trial steps may change: weights, buffers, gradients, training mode, optimizers, variables, random numbers.

    The replicas' own random numbers are the strategy's business.
    """

    def __init__(self, mirrored: MirroredObjects) -> None:
        copies = [copy for module in mirrored.modules for copy in module.copies]
        parameters = [parameter for copy in copies for parameter in copy.parameters()]
        parts = [part for copy in copies for part in copy.modules()]
        # The replicas' copies may share the storage of their weights: each storage is kept once.
        weights = {(weight.data_ptr(), weight.shape): weight for weight in parameters}.values()
        variables = [value for variable in mirrored.variables for value in variable.values]
        self._tensors = [_Kept(tensor) for tensor in (*weights, *variables)]
        self._gradients = [(each, None if each.grad is None else _Kept(each.grad)) for each in parameters]
        self._buffers = [
            (part, name, _Kept(buffer)) for part in parts for name, buffer in part.named_buffers(recurse=False)
        ]
        self._modes = [(part, part.training) for part in (*mirrored.modules, *parts)]
        self._optimizers = [(each, *_kept_optimizer(each)) for each in mirrored.optimizers]
        self._random_numbers = _random_numbers()

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes everything what it was. May be called more than once."""
        _set_random_numbers(*self._random_numbers)
        for kept in self._tensors:
            kept.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.put_back()
        for part, name, buffer in self._buffers:
            setattr(part, name, buffer.put_back())  # a module may give a buffer a new tensor
        for part, training in self._modes:
            part.training = training
        for optimizer, state, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update({parameter: _put_back(kept) for parameter, kept in state.items()})
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                parameters = group["params"]
                group.clear()
                group.update({"params": parameters, **_put_back(settings)})
            optimizer.storages.reset()


class _Kept:
    """A tensor and a copy of what it held. Not a tensor itself, so that it is a leaf of any structure."""

    def __init__(self, live: torch.Tensor) -> None:
        self._live = live
        self._held = live.detach().to("cpu", copy=True)

    def put_back(self) -> torch.Tensor:
        self._live.detach().copy_(self._held)
        return self._live


def _kept_optimizer(optimizer: MirroredOptimizer) -> tuple[dict[Any, Any], list[Any]]:
    settings = ({name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups)
    return {parameter: _keep(state) for parameter, state in optimizer.state.items()}, list(map(_keep, settings))


def _keep(structure: Any) -> Any:
    return tree_map(lambda leaf: _Kept(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), structure)


def _put_back(structure: Any) -> Any:
    return tree_map(lambda leaf: leaf.put_back() if isinstance(leaf, _Kept) else copy.deepcopy(leaf), structure)


def _random_numbers() -> tuple[torch.Tensor, Any, Any, list[torch.Tensor]]:
    """What torch, Python, and NumPy where it is loaded, draw next."""
    numpy = sys.modules.get("numpy")
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state(), of_gpus


def _set_random_numbers(of_cpu: torch.Tensor, of_python: Any, of_numpy: Any, of_gpus: list[torch.Tensor]) -> None:
    torch.set_rng_state(of_cpu)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
    if of_gpus:
        torch.cuda.set_rng_state_all(of_gpus)


class BatchSizeSearch:
    """The search of ``Strategy.find_batch_size``, which describes the arguments and errors. Outside replicas."""

    def __init__(
        self,
        strategy: Strategy,
        step: Callable[[Any], Any],
        make_batch: Callable[[int], Any],
        mirrored: MirroredObjects,
        memory_mb: float | None,
    ) -> None:
        self._strategy, self._step, self._make_batch = strategy, step, make_batch
        self._budget_mb = _budget(strategy.devices, memory_mb)
        self._before = TrialState(mirrored)
        self._line = PeakLine()
        # What was in the way of the smallest size that does not fit.
        self._reason = "" if self._budget_mb is None else f"the budget of {self._budget_mb:,.0f} MB for this process"

    def run(self, bracket: Bracket) -> int:
        """The largest size that fits; everything is then as it was before."""
        try:
            while (size := bracket.candidate(self._reach())) is not None:
                bracket = bracket.after(size, fitted=self._fits(size))
        finally:
            del self._before
            gc.collect()
            _give_back(self._strategy.devices)
        if not bracket.result:
            raise DeviceMemoryError(
                f"a global batch of {bracket.multiple_of}, the smallest to try, does not fit {self._strategy!r}: "
                f"{self._reason}; use shorter or smaller examples, a smaller model, or more memory"
            )
        return bracket.result

    def _reach(self) -> int | None:
        """The largest size that is projected to stay inside the budget; None where there is none to keep."""
        return None if self._budget_mb is None else self._line.reach(self._budget_mb)

    def _fits(self, size: int) -> bool:
        """Whether a global batch of ``size`` goes through; afterwards everything is as it was before."""
        with self._undone():
            with ResidentPeak() as peak:
                failure = self._failure(size)
            # A replica's thread may still hold what it was given last; it lets go before it takes the next.
            self._strategy.run(_of_its_own(lambda _: None), (None,))
            gc.collect(1)  # what is young: a graph and an error's frames may hold each other
            _give_back(self._strategy.devices)
            resting_mb = resident_mb()
        if failure is None and self._budget_mb is not None:
            self._line = self._line.after(size, peak_mb=peak.peak_mb, resting_mb=resting_mb)
            if peak.peak_mb > self._budget_mb:
                taken, budget = f"{peak.peak_mb:,.0f} MB", f"{self._budget_mb:,.0f} MB"
                failure = f"a batch of {size} took this process to {taken} of a budget of {budget}"
        self._reason = failure or self._reason
        return failure is None

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Whatever runs inside the block, and however it ends, nothing of it stays."""
        with self._strategy.trial():
            try:
                yield
            finally:
                self._before.put_back()

    def _failure(self, size: int) -> str | None:
        """What ran out of memory, if anything did. What happens inside is out of reach once this has returned."""
        try:
            self._try(size)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            plain = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
            if plain and _CPU_ALLOCATOR not in str(error):
                raise
            _forget_frames(error)
            notes = getattr(error, "__notes__", [])
            return " ".join([f"a batch of {size} ended in", str(error) or type(error).__name__, *notes])
        return None

    def _try(self, size: int) -> None:
        batch = self._make_batch(size)
        rows = batch_rows(BatchLayout(sizes=[size]).marked(batch))
        if rows != size:
            raise DataError(
                f"make_batch({size}) gave {rows} rows, expected {size}; give as many as asked for, "
                f"or limit=... if there are no more"
            )
        step, devices = _of_its_own(self._step), self._strategy.devices
        for shards in DistributedDataset([batch], devices, prefetch=0):
            for _ in range(_RUNS_A_TRIAL):
                self._strategy.run(step, (shards,))
                _give_back(devices)  # or gaps in the heap would decide what the next step seems to take


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
    """MB that the process may have resident without ``memory_mb``; None where every replica is on a GPU."""
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


def _forget_frames(error: BaseException) -> None:
    """Drops what the frames of a failed step hold: its activations, its batch."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__context__
