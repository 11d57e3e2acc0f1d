"""The training loops on a GPU: written by hand on torch, with DDP, and ours through ``Model.fit``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

import lockstep as ls
from benchmarks.gpu.workloads import GpuPrecision
from benchmarks.loops import DDP_OPTIONS, adam, call, laid_out, make_module, split_cpu, trained_parameters
from benchmarks.processes import ProcessInfo
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Batch, Trial
from lockstep.data.sharding import split_batch
from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback
from lockstep.train.model import Model

DeviceType = Literal["cuda", "cpu"]
COMPILE_MODE = "reduce-overhead"
MEMORY_SHARE = 0.8
"""The part of the GPU's memory that is divided among the logical devices."""
_MB = 2**20
LossOf = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many steps a trial has.

    warm_up steps | lap_steps | lap_steps | ...     the time is taken, and the device is waited for, at each |
    """

    warm_up: int  # not timed: compilation, graph capture, the choice of kernels
    lap_steps: int  # of a timed lap
    laps: int  # timed

    def __post_init__(self) -> None:
        for name in ("warm_up", "lap_steps", "laps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected at least 1; raise it")

    @property
    def steps(self) -> int:
        return self.warm_up + self.laps * self.lap_steps

    def ends_lap(self, step: int) -> bool:
        """Whether the time is taken after so many steps."""
        return step >= self.warm_up and (step - self.warm_up) % self.lap_steps == 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a contender's process gets beside its trial."""

    device: DeviceType  # "cuda" is GPU 0; "cpu" tries the programs where there is none
    precision: GpuPrecision  # of forward pass and loss; weights and optimizer are float32 in both
    pace: Pace

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward pass and loss."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)


def begin_process(setting: Setting) -> torch.device:
    """Seeds torch, allows TF32 and lets cuDNN look for its fastest algorithms: for every contender alike."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return setting.torch_device


def pinned(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """The batches in memory that a GPU reads by itself; a batch that comes again stays one. Unchanged for a CPU."""
    if device.type != "cuda":
        return list(batches)
    different = {id(batch): tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), batch) for batch in batches}
    return [different[id(batch)] for batch in batches]


def ready_batches(trial: Trial, setting: Setting) -> list[Batch]:
    """The global batches in the contender's memory format, in pinned memory."""
    batches = trial.workload.make_batches(setting.pace.steps)
    return pinned(laid_out(batches, trial.contender.layout), setting.torch_device)


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device, each issued while the step before runs; they are ``pinned`` if it is a GPU."""
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    coming = _copied(batches[0], device, side)
    for following in (*batches[1:], None):
        using = torch.cuda.current_stream(device)
        using.wait_stream(side)
        batch = coming
        for tensor in tree_leaves(batch):
            tensor.record_stream(using)
        if following is not None:
            coming = _copied(following, device, side)
        yield batch


def _copied(batch: Batch, device: torch.device, side: torch.cuda.Stream) -> Batch:
    with torch.cuda.stream(side):
        moved: Batch = tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
    return moved


class LapTimer:
    """Counts steps, and records a lap in the trial's timer when enough have been issued and done.

    The steps of ``timer`` are the laps of ``pace``, the first one being the warm-up. The device is waited for, with all
    its streams.
    """

    def __init__(self, timer: StepTimer, pace: Pace, device: torch.device) -> None:
        self._timer, self._pace, self._device = timer, pace, device
        self._steps = 0

    def step(self, loss: Callable[[], float]) -> None:
        """A step has been issued. ``loss`` reads the mean loss of all steps; it is called once, after the last."""
        self._steps += 1
        if not self._pace.ends_lap(self._steps):
            return
        wait_for(self._device)
        last = self._steps == self._pace.steps
        if last:
            self._timer.device_reserved_mb, self._timer.device_used_mb = device_memory(self._device)
        self._timer.record_step(loss() if last else float("nan"))


def wait_for(device: torch.device) -> None:
    """Returns when everything issued to the device, on any stream, is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory(device: torch.device) -> tuple[float, float]:
    """MB: what this process's allocator has taken of the device, and what all processes have of it now.

    The allocator keeps what it has once taken, and so the first is a peak; torch's own peak does not serve, since
    replicas on shares of a GPU reset it at every turn. The second is the driver's number: contexts and libraries are
    part of it. Zeros for a CPU.
    """
    if device.type != "cuda":
        return 0.0, 0.0
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_reserved(device) / _MB, (total - free) / _MB


def train_plain(trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting, compiled: bool) -> None:
    """One process, the whole batch. ``compiled``: forward pass and loss go through torch.compile with CUDA graphs."""
    device = begin_process(setting)
    module = make_module(trial, device)
    loss_of = loss_function(trial, setting, module, divisor=trial.workload.count)
    if compiled:
        loss_of = _compiled(loss_of)
    train(trial, timer, setting, loss_of, ready_batches(trial, setting), module)


def train_ddp(trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting) -> None:
    """One of ``trial.contender.processes`` processes on one device. All of them must call it; gloo, by a file.

    DDP averages the processes' gradients, so each divides its sum by its part of the count.
    """
    device = begin_process(setting)
    torch.set_num_threads(trial.threads_per_process)
    world, rank = trial.contender.processes, process.rank
    dist.init_process_group("gloo", init_method=f"file://{process.store}", rank=rank, world_size=world)
    wrapped = DistributedDataParallel(make_module(trial, device), **DDP_OPTIONS)
    loss_of = loss_function(trial, setting, wrapped, divisor=trial.workload.count / world)
    batches = trial.workload.make_batches(setting.pace.steps)
    different = {id(batch): split_batch(batch, world)[rank] for batch in batches}  # one shard of a repeated batch
    shards = laid_out([different[id(batch)] for batch in batches], trial.contender.layout)
    train(trial, timer, setting, loss_of, pinned(shards, device), wrapped)
    dist.destroy_process_group()


def loss_function(trial: Trial, setting: Setting, module: nn.Module, *, divisor: float) -> LossOf:
    """``loss_of(x, y)``: forward pass and loss, the sum over what is counted divided by ``divisor``."""

    def loss_of(x: Any, y: Tensor) -> Tensor:
        with setting.autocast():
            total, _ = trial.workload.loss(call(module, x), y)
            return total / divisor

    return loss_of


def train(
    trial: Trial, timer: StepTimer, setting: Setting, loss_of: LossOf, batches: Sequence[Batch], module: nn.Module
) -> None:
    """The usual loop over this process's part of each batch; the losses are added up on the device."""
    device = setting.torch_device
    optimizer = adam(trial.workload, module)
    timer.trained = trained_parameters(module)
    laps = LapTimer(timer, setting.pace, device)
    losses = torch.zeros((), device=device)
    for x, y in on_device(batches, device):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.add_(loss.detach())
        laps.step(lambda: losses.item() / setting.pace.steps)


def _compiled(loss_of: LossOf) -> LossOf:
    inner: LossOf = torch.compile(loss_of, mode=COMPILE_MODE)

    def begin_and_call(x: Any, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return inner(x, y)

    return begin_and_call


class _LapEveryBatch(Callback):
    """Counts the batches that have been issued; it does not read the logs, for which the loop would wait."""

    def __init__(self, laps: LapTimer) -> None:
        super().__init__()
        self._laps = laps

    def wants_batch_logs(self) -> bool:
        return False

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        self._laps.step(lambda: float(logs["loss"]))


class _Notes(logging.Handler):
    """What the package logs: where it chose a CUDA graph, or why it did not."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[" ".join(record.getMessage().split())] = None


def train_ours(
    trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting, compiled: bool = False
) -> None:
    """Trains with ``Model.fit`` on ``trial.contender.shares`` replicas."""
    device = begin_process(setting)
    notes, log = _Notes(), logging.getLogger("lockstep")
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    workload = trial.workload
    strategy = ls.MirroredStrategy(logical_devices(device, trial.contender.shares))
    with strategy.scope():
        module = workload.make_module()
        model = Model(module)
        model.compile(
            optimizer=adam(workload, module), loss=workload.loss, precision=setting.precision, compile_module=compiled
        )
    timer.trained = trained_parameters(module)
    timer.notes = notes.lines.keys()
    batches = pinned(workload.make_batches(setting.pace.steps), device)
    model.fit(batches, callbacks=[_LapEveryBatch(LapTimer(timer, setting.pace, device))], verbose=0)
    strategy.close()


def logical_devices(device: torch.device, shares: int) -> list[str]:
    """The names of the device, or of so many logical devices that it is divided into."""
    if device.type == "cpu":
        return split_cpu(shares)
    if shares == 1:
        return ["gpu:0"]
    gpu = ls.config.list_physical_devices("GPU")[0]
    share = ls.config.LogicalDeviceConfiguration(memory_limit=share_mb(gpu.memory or 0, shares))
    ls.config.set_logical_device_configuration(gpu, [share] * shares)
    return [f"gpu:{number}" for number in range(shares)]


def share_mb(memory_mb: int, shares: int) -> int:
    """The memory limit of each of so many logical devices."""
    return int(memory_mb * MEMORY_SHARE) // shares
