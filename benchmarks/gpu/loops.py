"""The training loops on a GPU: written by hand on torch, with DDP, and ours through ``Model.fit``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from lockstep.train.callbacks.base import Callback
from lockstep.train.model import Model

DeviceType = Literal["cuda", "cpu"]
COMPILE_MODE = "reduce-overhead"
MEMORY_SHARE = 0.8
"""The part of the GPU's memory that is divided among the logical devices."""
_MB = 2**20
LossOf = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a contender's process gets beside its trial."""

    device: DeviceType  # "cuda" is GPU 0; "cpu" tries the programs where there is none
    precision: GpuPrecision  # of forward pass and loss; weights and optimizer are float32 in both

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward pass and loss."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)


def begin_process(setting: Setting, timer: StepTimer | None = None) -> torch.device:
    """Seeds torch, allows TF32 and lets cuDNN look for its fastest algorithms: for every contender alike.

    ``timer`` will wait for the device at the ends of laps, and read its memory in the last step.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = setting.torch_device
    if timer is not None:
        timer.synchronize, timer.extra = partial(wait_for, device), partial(device_memory, device)
    return device


def pinned(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """The batches in memory that a GPU reads by itself; a batch that comes again stays one. Unchanged for a CPU."""
    if device.type != "cuda":
        return list(batches)
    different = {id(batch): tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), batch) for batch in batches}
    return [different[id(batch)] for batch in batches]


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


def wait_for(device: torch.device) -> None:
    """Returns when everything issued to the device, on any stream, is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory(device: torch.device) -> dict[str, float]:
    """MB: what this process's allocator has taken of the device, and what all processes have of it now.

    The allocator keeps what it has once taken, so the first is a peak; torch's own peak does not serve, since replicas
    on shares of a GPU reset it. The second is the driver's number, with contexts and libraries. Zeros for a CPU.
    """
    if device.type != "cuda":
        return {"reserved_mb": 0.0, "used_mb": 0.0}
    free, total = torch.cuda.mem_get_info(device)
    return {"reserved_mb": torch.cuda.memory_reserved(device) / _MB, "used_mb": (total - free) / _MB}


def train_plain(trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting, compiled: bool) -> None:
    """One process, the whole batch. ``compiled``: forward pass and loss go through torch.compile with CUDA graphs."""
    device = begin_process(setting, timer)
    module = make_module(trial, device)
    loss_of = loss_function(trial, setting, module, divisor=trial.workload.count)
    if compiled:
        loss_of = _compiled(loss_of)
    batches = laid_out(trial.workload.make_batches(timer.total), trial.contender.layout)
    train(trial, timer, setting, loss_of, pinned(batches, device), module)


def train_ddp(trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting) -> None:
    """One of ``trial.contender.processes`` processes on one device. All of them must call it; gloo, by a file.

    DDP averages the processes' gradients, so each divides its sum by its part of the count.
    """
    device = begin_process(setting, timer)
    torch.set_num_threads(trial.threads_per_process)
    world, rank = trial.contender.processes, process.rank
    dist.init_process_group("gloo", init_method=f"file://{process.store}", rank=rank, world_size=world)
    wrapped = DistributedDataParallel(make_module(trial, device), **DDP_OPTIONS)
    loss_of = loss_function(trial, setting, wrapped, divisor=trial.workload.count / world)
    batches = trial.workload.make_batches(timer.total)
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
    losses = torch.zeros((), device=device)
    for x, y in on_device(batches, device):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.add_(loss.detach())
        timer.record_step(lambda: losses.item() / timer.total)


def _compiled(loss_of: LossOf) -> LossOf:
    inner: LossOf = torch.compile(loss_of, mode=COMPILE_MODE)

    def begin_and_call(x: Any, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return inner(x, y)

    return begin_and_call


class _RecordEveryBatch(Callback):
    """Records the batches that have been issued; it does not read the logs, for which the loop would wait."""

    def __init__(self, timer: StepTimer) -> None:
        super().__init__()
        self._timer = timer

    def wants_batch_logs(self) -> bool:
        return False

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        self._timer.record_step(lambda: float(logs["loss"]))


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
    """Trains with ``Model.fit`` on ``trial.contender.replicas`` replicas."""
    device = begin_process(setting, timer)
    notes, log = _Notes(), logging.getLogger("lockstep")
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    workload = trial.workload
    strategy = ls.MirroredStrategy(logical_devices(device, trial.contender.replicas))
    with strategy.scope():
        module = workload.make_module()
        model = Model(module)
        model.compile(
            optimizer=adam(workload, module), loss=workload.loss, precision=setting.precision, compile_module=compiled
        )
    timer.trained = trained_parameters(module)
    timer.notes = notes.lines.keys()
    timer.extra = lambda: device_memory(device) | {"of_limit": fullest_share(strategy)}
    batches = pinned(workload.make_batches(timer.total), device)
    model.fit(batches, callbacks=[_RecordEveryBatch(timer)], verbose=0)
    strategy.close()


def logical_devices(device: torch.device, replicas: int) -> list[str]:
    """The names of the device, or of so many logical devices that it is divided into."""
    if device.type == "cpu":
        return split_cpu(replicas)
    if replicas == 1:
        return ["gpu:0"]
    gpu = ls.config.list_physical_devices("GPU")[0]
    share = ls.config.LogicalDeviceConfiguration(memory_limit=share_mb(gpu.memory or 0, replicas))
    ls.config.set_logical_device_configuration(gpu, [share] * replicas)
    return [f"gpu:{number}" for number in range(replicas)]


def fullest_share(strategy: ls.Strategy) -> float:
    """The most that a logical device has taken until now, over its memory limit; 0 without limits."""
    memories = strategy.device_memory()
    return max((memory.peak / memory.limit for memory in memories if memory.limit is not None), default=0.0)


def share_mb(memory_mb: int, replicas: int) -> int:
    """The memory limit of each of so many logical devices."""
    return int(memory_mb * MEMORY_SHARE) // replicas
