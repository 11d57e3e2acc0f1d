"""``ls.find_batch_size``: which global batch fits the memory, or is as fast as any that does, by trial steps.

    rows -> on every worker a fresh process: step = build(); step(rows) -> Trial: memory, seconds
         -> all workers agree -> the next size: twice as many while they fit, then halfway between;
            for speed the fastest once more

``next_size`` and ``best_trial`` are pure functions of the trials. A trial runs as ``ls.launch`` runs a function, in one
worker: what it changes, allocates or is killed by ends with its process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from pickle import PicklingError
from typing import Any, Literal

import torch

from lockstep import config, console
from lockstep.atomic_files import atomic_write
from lockstep.checks import ABOVE_ZERO, check_choice, check_number
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.data.structure import map_leaves, named_leaves
from lockstep.errors import ClusterError, ConfigError, DeviceMemoryError, ReplicaError
from lockstep.launch.agent import Limits
from lockstep.launch.jobs import FunctionJob, WorkerTraceback
from lockstep.launch.serialization import deserialize, serialize_call
from lockstep.replicas.cpu.memory import available_mb
from lockstep.replicas.device.driver import driver_of
from lockstep.replicas.device.memory import MB, is_out_of_memory
from lockstep.strategies.base import Strategy, get_strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.arrays import Arrays, floats_of
from lockstep.train.model import Model

Step = Callable[[int], object]
"""Runs one training step with a batch of so many rows."""
Aim = Literal["memory", "speed"]

SHARE_OF_AVAILABLE = 0.8
"""Without ``memory_limit_mb``: the part of the host's available memory that its workers may take together."""
_FINE = 16  # the search ends where the largest size that fits is known to 1/16, less than the margin
_NEAR = 0.9  # of the best rate: sizes that are tried twice
_SAMPLE = 64  # rows that a fresh process gets, and repeats to fill a batch
_SLOW_IMPORTS = ("torchmetrics", "transformers")  # what this process has of them, a trial would import for seconds
# The first step makes the optimizer's state, and rows are followed through the modules in the first two: with
# MobileNetV2 steps of 3.1, 0.78, 0.20, 0.20 s. The fastest of the others is what a step takes.
_KILLED = "was killed by SIGKILL"  # as ``failures`` says, and the kernel does where memory ends
_UNTIMED, _MOST_STEPS, _ENOUGH_S = 2, 10, 3.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one size.

    Args:
        rows: the rows of the global batch.
        fits: whether it fits.
        seconds: the seconds of a step.
        memory: device -> [the peak memory, the limit], in MB; a CPU's is that of the whole process.
        reason: why it does not fit.
    """

    rows: int
    fits: bool
    seconds: float = math.inf
    memory: Mapping[str, list[float]] = field(default_factory=dict)
    reason: str = ""

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The sizes of interest: from ``start`` up to ``largest`` rows, multiples of ``multiple_of``."""

    start: int
    largest: int | None = None
    multiple_of: int = 1
    aim: Aim = "memory"
    tolerance: float = 0.02

    def at_most(self, rows: int) -> int:
        """The largest multiple that is not above ``rows`` and the bounds; ``rows`` itself if there is none."""
        rows = min(rows, self.largest or rows)
        return rows - rows % self.multiple_of or rows


def next_size(trials: Sequence[Trial], bounds: Bounds) -> int | None:
    """The size to try next; None at the end of the search."""
    fitting = sorted((trial.rows, trial.rows_per_s) for trial in trials if trial.fits)
    rates = dict(fitting)  # of two trials of a size the faster one
    fits, by_size = max(rates, default=0), list(rates.values())
    fails = min((trial.rows for trial in trials if not trial.fits), default=None)
    # For speed: whether the two largest sizes brought no more rows per second than smaller ones.
    is_level = len(by_size) > 2 and max(by_size[-2:]) <= (1 + bounds.tolerance) * max(by_size[:-2])
    if is_level and bounds.aim == "speed":
        size = fits
    elif fails is None:
        size = bounds.at_most(2 * fits or bounds.start)
    else:
        is_close = fails - fits <= max(bounds.multiple_of, fits // _FINE)
        size = fits if is_close else bounds.at_most((fits + fails) // 2)
    if fits < size != fails:
        return size
    # The times of a trial vary by 4% on an idle machine, so the fastest sizes are tried once more.
    times = Counter(rows for rows, _ in fitting)
    fast = (rows for rows, rate in rates.items() if rate >= _NEAR * max(by_size) and times[rows] == 1)
    return next(fast, None) if bounds.aim == "speed" else None


def best_trial(trials: Sequence[Trial], bounds: Bounds) -> Trial | None:
    """The largest size that fits; for speed the smallest whose rows per second are near the best. None if none fits."""
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.rows)
    if bounds.aim == "memory":
        return fitting[-1] if fitting else None
    least = max((trial.rows_per_s for trial in fitting), default=0) / (1 + bounds.tolerance)
    return next((trial for trial in fitting if trial.rows_per_s >= least), None)


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
                ", ".join(f"{name} {peak:,.0f} of {limit:,.0f}" for name, (peak, limit) in trial.memory.items()) or "-",
                f"no: {trial.reason}" if trial.reason else "yes",
            ]
            for trial in sorted(self.trials, key=lambda trial: trial.rows)
        ]
        table = console.text_table(["rows", "rows/s", "peak MB", "fits"], rows)
        why = {"memory": "the largest that fits", "speed": "the smallest as fast as any, the fastest tried twice"}
        source = ", from the cache" if self.cached else ""
        size = f"batch size {self.batch_size:,} ({self.per_replica:,} per replica)"
        return f"{table}\n{size}: {why[self.aim]}{source}; the learning rate is left as it is"


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
        margin: the part of each memory limit that a size must leave free.
        strategy: with a function, the strategy whose replicas share a batch, and whose workers agree; None is the one
            in scope, or one device.
        cache: a folder for the trials; a search with the same model, devices and settings uses them, as long as their
            memory is free. None keeps none.
        key: with a function and ``cache``, a name that changes when what it builds does.
        timeout_s: the seconds that a trial may take.

    Raises:
        DeviceMemoryError: not even the smallest size fits.
        ConfigError: a value is not valid; a model that workers divide, or that cannot be pickled.
        UsageError: the model is not compiled.
        ReplicaError: a trial's process ended by itself, or took longer than ``timeout_s``.
        Exception: whatever else a trial raises is raised as it is; on other workers it is a ClusterError.
    """
    strategy = model.strategy if isinstance(model, Model) else strategy or get_strategy()
    workers, replicas = strategy.workers, strategy.num_replicas_in_sync
    check_number("start", start, least=1, whole=True)
    check_number("largest", largest, least=1, whole=True)
    check_number("tolerance", tolerance, least=0, most=1, optional=False)
    check_number("memory_limit_mb", memory_limit_mb, least=1)
    check_number("margin", margin, least=0, most=0.9, optional=False)
    check_number("timeout_s", timeout_s, least=ABOVE_ZERO, optional=False)
    aim = aim or ("memory" if strategy.devices[0].kind == "GPU" else "speed")
    check_choice("aim", aim, ("memory", "speed"))
    if isinstance(model, Model):
        model, rows, key = _made_anew(model, x, y)
        largest = largest or rows
    start = start or 8 * replicas
    bounds = Bounds(start=start, largest=largest, multiple_of=replicas, aim=aim, tolerance=tolerance)
    call = _pickled(model)
    hosts = all_gather_object(workers, "hosts of a batch size", socket.gethostname())
    host_mb = memory_limit_mb or SHARE_OF_AVAILABLE * available_mb() / hosts.count(hosts[workers.index])
    search = (key, bounds, workers.replicas, memory_limit_mb, margin, config.list_logical_devices(), torch.__version__)
    name = f"batch-size-{hashlib.sha256(repr(search).encode()).hexdigest()[:16]}.json"
    file = None if cache is None or key is None else Path(cache).expanduser() / name
    share = workers.replicas[workers.index] / replicas
    process = TrialProcess(call=call, share=share, host_mb=host_mb, margin=margin, timeout_s=timeout_s)
    trials = _stored(workers, file, (1 - margin) * host_mb)
    is_cached = bool(trials)
    # Every worker follows the same search, because each trial's result is that of all workers (``_agreed``).
    while not is_cached and (size := next_size(trials, bounds)) is not None:
        trials.append(_agreed(workers, process, size))
    if (best := best_trial(trials, bounds)) is None:
        raise DeviceMemoryError(
            f"not even a global batch of {trials[-1].rows} fits: {trials[-1].reason}; use shorter examples, a smaller"
            " model, or more memory"
        )
    if file is not None and workers.leads:
        atomic_write(file, json.dumps([asdict(trial) for trial in trials]))
    per_replica = math.ceil(best.rows / replicas)
    return BatchSize(batch_size=best.rows, per_replica=per_replica, aim=aim, trials=tuple(trials), cached=is_cached)


def _agreed(workers: Communicator, process: TrialProcess, rows: int) -> Trial:
    """The trial of all workers at the same time, since those of one host share its memory. All must call it."""
    trial, error = Trial(rows=rows, fits=False), None
    try:
        trial = process.run(rows)
    # The collective below must be reached by all workers: an error that left before it would have the others wait.
    except Exception as raised:  # noqa: BLE001  raised below, once the others know of it
        error = raised
    failure = error and f"{type(error).__name__}: {error}"
    reports = all_gather_object(workers, "trial of a batch size", [failure, asdict(trial)])
    if error is not None:
        raise error
    for name, (failure, _) in zip(workers.names, reports, strict=True):
        if failure is not None:
            raise ClusterError(f"{name}: the trial of {rows} rows failed with {failure}")
    if workers.is_single:
        return trial
    trials = [Trial(**values) for _, values in reports]
    memory = {f"{index}/{name}": use for index, trial in enumerate(trials) for name, use in trial.memory.items()}
    reason = next((trial.reason for trial in trials if not trial.fits), "")
    seconds = max(trial.seconds for trial in trials)
    return Trial(rows=rows, fits=not reason, seconds=seconds, memory=memory, reason=reason)


@dataclass(frozen=True, kw_only=True)
class TrialProcess:
    """How this worker tries sizes: each in a fresh process.

    Args:
        call: the pickled function that makes the step.
        share: this worker's part of a global batch.
        host_mb: MB that the process may take on the host.
        margin: the part of each limit that is left free.
        timeout_s: the seconds that a trial may take.
    """

    call: bytes
    share: float
    host_mb: float
    margin: float
    timeout_s: float

    def run(self, rows: int) -> Trial:
        """Tries a size in a fresh process, which has ended on return."""
        preloaded = (__name__, *(name for name in _SLOW_IMPORTS if name in sys.modules))
        job = FunctionJob(workers=1, limits=Limits(timeout_s=self.timeout_s), preloaded=preloaded)
        try:
            trial: Trial = job.run(self.measure, (math.ceil(rows * self.share), torch.get_num_threads()), {})
            return replace(trial, rows=rows)
        except ClusterError as error:
            cause = error.__cause__
            if cause is not None and is_out_of_memory(cause):
                return Trial(rows=rows, fits=False, reason=(str(cause) or type(cause).__name__).splitlines()[0])
            if isinstance(cause, Exception) and not isinstance(cause, WorkerTraceback):
                raise cause  # noqa: B904  its own cause is the traceback in the fresh process
            if cause is None and str(error).endswith(_KILLED):
                return Trial(rows=rows, fits=False, reason="its process was killed, as where memory ends")
            raise ReplicaError(f"the trial of {rows} rows ended without a result: {error}") from cause

    def measure(self, rows: int, threads: int) -> Trial:
        """In the fresh process: the memory and the seconds of a step with the rows of this worker."""
        os.environ.pop("TF_CONFIG", None)  # of this worker's job; the trial is of one worker
        torch.set_num_threads(threads)
        gpus = [(gpu, driver) for gpu in config.list_logical_devices("GPU") if (driver := driver_of(gpu)) is not None]
        free = {gpu.torch_device: driver.free_and_total(gpu.torch_device)[0] / MB for gpu, driver in gpus}
        if not gpus:  # CUDA reserves addresses that would count
            _limit_memory(self.host_mb)
        build, _, _ = deserialize(self.call)
        step: Step = build()
        seconds: list[float] = []
        while len(seconds) <= _UNTIMED or (len(seconds) < _MOST_STEPS and sum(seconds[_UNTIMED:]) < _ENOUGH_S):
            began = time.perf_counter()
            step(rows)
            seconds.append(time.perf_counter() - began)
        # The kernel's own peak: tensors that were freed within the step count, which looks from outside would miss.
        memory = {"cpu": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, self.host_mb]}
        for gpu in config.list_logical_devices("GPU"):  # as build has divided them
            if (driver := driver_of(gpu)) is not None:
                # A share's memory is that of its stream; of a whole GPU the allocator knows the peak of all tensors.
                peak = driver.peak(gpu.torch_device) if gpu.memory_limit is None else driver.pool(gpu).reserved
                memory[gpu.name] = [peak / MB, gpu.memory_limit or free[gpu.torch_device]]
        above = [name for name, (peak, limit) in memory.items() if peak > (1 - self.margin) * limit]
        reason = f"{above[0]} needs more than {1 - self.margin:.0%} of its limit" if above else ""
        return Trial(rows=rows, fits=not above, seconds=min(seconds[_UNTIMED:]), memory=memory, reason=reason)


def _limit_memory(more_mb: float) -> None:
    """Lets allocations fail that take much more, before the machine swaps or its kernel kills another process.

    Where memory ends all the same, the kernel first kills processes with a high score.
    """
    # RLIMIT_DATA counts private writable mappings, and not only what is resident.
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = data_pages * resource.getpagesize() + int(more_mb * MB)
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _stored(workers: Communicator, file: Path | None, most_mb: float) -> list[Trial]:
    """An earlier search's trials, as the chief reads them, if every host has their memory. All workers must call it."""
    stored: list[dict[str, Any]] = []
    if file is not None and workers.leads:
        with suppress(OSError, ValueError):
            stored = json.loads(file.read_text())
    trials = [Trial(**values) for values in all_gather_object(workers, "cached batch size", stored)[0]]
    peaks = [use[0] for trial in trials if trial.fits for name, use in trial.memory.items() if name.endswith("cpu")]
    fits = max(peaks, default=0) <= most_mb
    return trials if all(all_gather_object(workers, "memory of the cached batch size", fits)) else []


def _pickled(build: Callable[[], Step]) -> bytes:
    try:
        return serialize_call(build, (), {})
    except (TypeError, AttributeError, PicklingError, RuntimeError) as error:
        raise ConfigError(
            f"find_batch_size sends the model or the function to a fresh process, and it cannot be pickled ({error});"
            " give a function that makes everything itself and returns step(rows)"
        ) from error


def _made_anew(model: Model, x: Any, y: Any) -> tuple[Callable[[], Step], int, str]:
    """For trial steps: what makes a compiled Model anew and returns its step, the rows of ``x``, and a key of both.

    The new model is that of one worker: its strategy has this worker's devices and talks to no other. A batch repeats
    the first rows of ``x`` and ``y``.

    Raises:
        ConfigError: there are no rows, or workers divide the model.
        UsageError: the model is not compiled with an optimizer.
    """
    setup, strategy, module = model._trainable("find_batch_size"), model.strategy, model.module
    if strategy.layout is not None:
        raise ConfigError(
            f"find_batch_size got a model that workers divide ({strategy.layout}), of which no worker can run a step"
            " alone; try batch sizes with fit"
        )
    if x is None or y is None:
        raise ConfigError("find_batch_size got a Model without x and y; give some rows, the longest ones")
    arrays, kind, optimizer = Arrays.of(x, y, floats=floats_of(module)), type(model), setup.optimizer
    sample, plain = min(_SAMPLE, arrays.rows), optimizer and optimizer.plain
    columns = map_leaves(lambda _, leaf: leaf[:_SAMPLE].clone(), arrays.columns)
    settings = {setting.name: getattr(setup.config, setting.name) for setting in fields(setup.config)}
    # A subclass of Model may hold what its own step needs. What every Model has belongs to this process: its strategy,
    # optimizer and graphs.
    base = vars(Model(torch.nn.Identity())).keys()
    attributes = {name: value for name, value in vars(model).items() if name not in base}
    shares = {device: config.get_logical_device_configuration(device) for device in config.list_physical_devices()}
    devices, threads = list(dict.fromkeys(strategy.devices)), strategy.threads_per_replica[0]
    replicas = len(strategy.devices) if len(devices) < len(strategy.devices) else None
    sync_batchnorm = model._module.has_sync_batchnorm

    def build() -> Step:
        for device, limits in shares.items():
            if limits:
                config.set_logical_device_configuration(device, limits)
        with MirroredStrategy(devices, replicas=replicas, threads_per_replica=threads).scope():
            # A subclass may ask for other arguments in ``__init__``, so that of Model is called in its place.
            remade = kind.__new__(kind)
            Model.__init__(remade, module, sync_batchnorm=sync_batchnorm)
        vars(remade).update(attributes)
        remade.compile(plain, **settings)

        def step(rows: int) -> None:
            index = torch.arange(rows) % sample
            remade.train_on_batch(*map_leaves(lambda _, leaf: leaf[index.to(leaf.device)], columns))

        return step

    weights = [(name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in module.named_parameters()]
    shapes = [(name, leaf.shape[1:], leaf.dtype) for name, leaf in named_leaves(columns)]
    key = repr((module, weights, type(plain), setup.config.precision, sync_batchnorm, shapes, devices, replicas))
    return build, arrays.rows, key
