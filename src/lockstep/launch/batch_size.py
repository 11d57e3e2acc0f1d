"""``ls.find_batch_size``: which global batch fits the memory, or is as fast as any that does, by trial steps.

    rows -> on every worker a fresh process: step = build(); step(rows) -> memory, seconds
         -> all workers agree -> the next size: twice as many while they fit, then halfway between

``next_size`` and ``best_trial`` are pure functions of the trials. ``trial`` runs one of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import PicklingError
from typing import Any, Literal

import torch

from lockstep import console
from lockstep.atomic_files import atomic_write
from lockstep.checks import ABOVE_ZERO, check_choice, check_number
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.config import list_logical_devices
from lockstep.errors import ClusterError, ConfigError, DeviceMemoryError
from lockstep.launch.model_steps import made_anew
from lockstep.launch.serialization import serialize_call
from lockstep.launch.trial import MemoryUse, Step, Trial, TrialProcess
from lockstep.replicas.cpu.memory import available_mb
from lockstep.strategies.base import Strategy, get_strategy
from lockstep.train.model import Model

Aim = Literal["memory", "speed"]

SHARE_OF_AVAILABLE = 0.8
"""Without ``memory_limit_mb``: the part of the host's available memory that its workers may take together."""
_FINE = 16  # the search ends where the largest size that fits is known to 1/16, less than the margin


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The sizes of interest: from ``start`` up to ``largest`` rows, multiples of ``multiple_of``."""

    start: int
    largest: int | None = None
    multiple_of: int = 1
    aim: Aim = "memory"
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        for name in ("start", "largest", "multiple_of"):
            check_number(name, getattr(self, name), least=1, whole=True, optional=name == "largest")
        check_choice("aim", self.aim, ("memory", "speed"))
        check_number("tolerance", self.tolerance, least=0, most=1, optional=False)

    def at_most(self, rows: int) -> int:
        """The largest multiple that is not above ``rows`` and the bounds; ``rows`` itself if there is none."""
        rows = min(rows, self.largest or rows)
        return rows - rows % self.multiple_of or rows


def next_size(trials: Sequence[Trial], bounds: Bounds) -> int | None:
    """The size to try next; None at the end of the search."""
    fits = max((trial.rows for trial in trials if trial.fits), default=0)
    fails = min((trial.rows for trial in trials if not trial.fits), default=None)
    if fails is None:
        if bounds.aim == "speed" and _is_level(trials, bounds.tolerance):
            return None
        size = bounds.at_most(max(2 * fits, 0 if fits else bounds.start))
    elif not fits:
        size = bounds.at_most(fails // 2) if fails // 2 else 0
    elif fails - fits <= max(bounds.multiple_of, fits // _FINE):
        return None
    else:
        size = bounds.at_most((fits + fails) // 2)
    return size if size > fits and size != fails else None


def _is_level(trials: Sequence[Trial], tolerance: float) -> bool:
    """Whether the last two sizes brought no more rows per second than smaller ones."""
    rates = [trial.rows_per_s for trial in trials]
    return len(rates) > 2 and max(rates[-2:]) <= (1 + tolerance) * max(rates[:-2])


def best_trial(trials: Sequence[Trial], bounds: Bounds) -> Trial | None:
    """The largest size that fits; for speed the smallest whose rows per second are near the best. None if none fits."""
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.rows)
    if bounds.aim == "memory" or not fitting:
        return fitting[-1] if fitting else None
    best = max(trial.rows_per_s for trial in fitting)
    return next(trial for trial in fitting if trial.rows_per_s >= best / (1 + bounds.tolerance))


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """The result of ``ls.find_batch_size``.

    Args:
        batch_size: rows of a global batch.
        per_replica: rows of the largest shard of it.
        aim: "memory" or "speed", as asked for.
        trials: what was tried, in that order; memory by device, of all workers.
        cached: whether an earlier search's trials were used.
    """

    batch_size: int
    per_replica: int
    aim: Aim
    trials: tuple[Trial, ...]
    cached: bool = False

    def __str__(self) -> str:
        rows = [
            [
                f"{trial.rows:,}",
                f"{trial.rows_per_s:,.0f}" if trial.seconds < math.inf else "-",
                ", ".join(f"{use.device} {use.peak_mb:,.0f} of {use.limit_mb:,.0f}" for use in trial.memory) or "-",
                "yes" if trial.fits else f"no: {trial.reason}",
            ]
            for trial in sorted(self.trials, key=lambda trial: trial.rows)
        ]
        table = console.text_table(["rows", "rows/s", "peak MB", "fits"], rows)
        why = "the largest that fits" if self.aim == "memory" else "the smallest that is as fast as any that fits"
        source = ", from the cache" if self.cached else ""
        return (
            f"{table}\nbatch size {self.batch_size:,} ({self.per_replica:,} per replica): {why}{source}; the learning"
            " rate is left as it is"
        )


def find_batch_size(
    model: Model | Callable[[], Step],
    x: Any = None,
    y: Any = None,
    *,
    start: int | None = None,
    largest: int | None = None,
    aim: Aim | None = None,
    tolerance: float = 0.02,
    memory_limit_mb: float | None = None,
    margin: float = 0.1,
    strategy: Strategy | None = None,
    cache: str | os.PathLike[str] | None = None,
    key: str | None = None,
    timeout_s: float = 600.0,
) -> BatchSize:
    """Finds the global batch that fills the devices and does not run out of memory. Every worker must call it.

    Each size is tried in a fresh process on every worker, so nothing of the model, the optimizer, the random numbers or
    the devices changes here, and running out of memory ends a trial and not this process. The learning rate is left
    alone: whether and how to scale it with the batch is a decision about the training.

    Args:
        model: a compiled ``ls.Model``, whose steps are those of ``fit``. Or, for a loop of your own, a function that is
            called in the fresh process, makes everything, and returns ``step(rows)``, which runs one training step with
            a batch of so many rows. Of several workers, each tries its share of the global batch on its own devices.
        x: with a Model, the inputs of some rows, as for ``fit``; give the longest ones.
        y: with a Model, the targets of these rows.
        start: the first size; 8 rows per replica if None.
        largest: the largest size of interest, such as the rows of the training data; None for the rows of ``x`` with
            a Model, and no bound with a function.
        aim: "memory" for the largest size that fits, to 1/16; "speed" for the smallest whose rows per second are within
            ``tolerance`` of the best of those that fit. None is "memory" on GPUs and "speed" on CPUs, where a larger
            batch takes longer in proportion from some size on, and a smaller one makes more updates.
        tolerance: a fraction of the rows per second.
        memory_limit_mb: MB of this worker's whole process on the host; None for 0.8 of what is available there, divided
            among the host's workers. On a GPU the limit is what is free on it, or the ``memory_limit`` of its share.
        margin: the part of a limit that a size must leave free.
        strategy: with a function, the strategy whose replicas share a batch, and whose workers agree; None is the one
            in scope, or one device.
        cache: a folder for the trials; a search with the same model, devices and settings uses them, as long as their
            memory is free. None keeps none.
        key: with a function and ``cache``, a name that changes when what it builds does.
        timeout_s: seconds that a trial may take.

    Raises:
        DeviceMemoryError: not even the smallest size fits.
        ConfigError: a value is not valid; a model that workers divide, or that cannot be pickled.
        UsageError: the model is not compiled.
        ReplicaError: a trial's process ended by itself, or took longer than ``timeout_s``.
        Exception: whatever else a trial raises is raised as it is; on other workers it is a ClusterError.
    """
    strategy = model.strategy if isinstance(model, Model) else strategy or get_strategy()
    workers, replicas = strategy.workers, strategy.num_replicas_in_sync
    check_number("margin", margin, least=0, most=0.9, optional=False)
    check_number("timeout_s", timeout_s, least=ABOVE_ZERO, optional=False)
    check_number("memory_limit_mb", memory_limit_mb, least=1)
    if isinstance(model, Model):
        model, rows, key = made_anew(model, x, y)
        largest = largest or rows
    bounds = Bounds(
        start=start or 8 * replicas,
        largest=largest,
        multiple_of=replicas,
        aim=aim or ("memory" if strategy.devices[0].kind == "GPU" else "speed"),
        tolerance=tolerance,
    )
    process = TrialProcess(
        call=_pickled(model),
        share=workers.replicas[workers.index] / replicas,
        host_mb=memory_limit_mb or _available_mb(workers),
        margin=margin,
        timeout_s=timeout_s,
        alone=not workers.is_single,
    )
    search_key = (key, bounds, workers.replicas, margin, memory_limit_mb, list_logical_devices(), torch.__version__)
    stored = None if cache is None or key is None else Cache(Path(cache).expanduser(), repr(search_key), workers)
    trials = [] if stored is None else stored.read(process.host_mb * (1 - margin))
    is_cached = bool(trials)
    # Every worker follows the same search, because each trial's result is that of all workers (``_agreed``); no other
    # agreement is needed.
    while not is_cached and (size := next_size(trials, bounds)) is not None:
        trials.append(_agreed(workers, process, size))
    best = best_trial(trials, bounds)
    if best is None:
        raise DeviceMemoryError(
            f"not even a global batch of {trials[-1].rows} fits: {trials[-1].reason}; use shorter examples, a smaller"
            " model, or more memory"
        )
    if stored is not None and not is_cached:
        stored.write(trials)
    per_replica = math.ceil(best.rows / replicas)
    return BatchSize(
        batch_size=best.rows, per_replica=per_replica, aim=bounds.aim, trials=tuple(trials), cached=is_cached
    )


def _agreed(workers: Communicator, process: TrialProcess, rows: int) -> Trial:
    """The trial of all workers at the same time, since those of one host share its memory. All must call it."""
    error, local = None, Trial(rows=rows, fits=False)
    try:
        local = process.run(rows)
    # The collective below must be reached by all workers: an error that left before it would have the others wait.
    except Exception as raised:  # noqa: BLE001  raised below, once the others know of it
        error = raised
    failure = "" if error is None else f"{type(error).__name__}: {error}"
    reports = all_gather_object(workers, "trial of a batch size", [failure, asdict(local)])
    if error is not None:
        raise error
    for index, (text, _) in enumerate(reports):
        if text:
            raise ClusterError(f"{workers.names[index]}: the trial of {rows} rows failed with {text}")
    trials = [_trial(values) for _, values in reports]
    if workers.is_single:
        return local
    return Trial(
        rows=rows,
        fits=all(trial.fits for trial in trials),
        seconds=max(trial.seconds for trial in trials),
        memory=tuple(
            replace(use, device=f"{index}/{use.device}") for index, trial in enumerate(trials) for use in trial.memory
        ),
        reason=next((trial.reason for trial in trials if not trial.fits), ""),
    )


def _trial(values: dict[str, Any]) -> Trial:
    return Trial(**{**values, "memory": tuple(MemoryUse(**use) for use in values["memory"])})


def _available_mb(workers: Communicator) -> float:
    """MB of the host for this worker's process. Every worker must call it."""
    hosts = all_gather_object(workers, "hosts of a batch size", socket.gethostname())
    return SHARE_OF_AVAILABLE * available_mb() / hosts.count(hosts[workers.index])


class Cache:
    """The file of a search's trials, which the chief reads and writes. Every worker must make the same calls."""

    def __init__(self, folder: Path, key: str, workers: Communicator) -> None:
        self._file = folder / f"batch-size-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        self._workers = workers

    def read(self, host_mb: float) -> list[Trial]:
        """The trials, as long as every worker's host has the memory of those that fit; else none."""
        stored: list[dict[str, Any]] = []
        if self._workers.leads:
            with suppress(OSError, ValueError):
                stored = json.loads(self._file.read_text())
        trials = [_trial(values) for values in all_gather_object(self._workers, "cached batch size", stored)[0]]
        uses = [use for trial in trials if trial.fits for use in trial.memory]
        fits = all(use.peak_mb <= host_mb for use in uses if use.device.endswith("cpu"))
        return trials if all(all_gather_object(self._workers, "memory of the cached batch size", fits)) else []

    def write(self, trials: Sequence[Trial]) -> None:
        if self._workers.leads:
            atomic_write(self._file, json.dumps([asdict(trial) for trial in trials]))


def _pickled(build: Callable[[], Step]) -> bytes:
    try:
        return serialize_call(build, (), {})
    except (TypeError, AttributeError, PicklingError, RuntimeError) as error:
        raise ConfigError(
            f"find_batch_size sends the model or the function to a fresh process, and it cannot be pickled ({error});"
            " give a function that makes everything itself and returns step(rows)"
        ) from error
