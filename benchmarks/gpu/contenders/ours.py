"""Ours through ``Model.fit``, on the undivided GPU or on its logical devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

import lockstep as ls
from benchmarks.contenders.lockstep_run import split_cpu
from benchmarks.contenders.plain import trained_parameters
from benchmarks.gpu.ahead import pinned
from benchmarks.gpu.device_laps import DeviceLaps
from benchmarks.gpu.setting import Setting, begin_process
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Trial
from lockstep.train.callbacks.base import Callback
from lockstep.train.model import Model

MEMORY_SHARE = 0.8
"""The part of the GPU's memory that is divided among the logical devices."""


class LapEveryBatch(Callback):
    """Tells the stopwatch that a batch has been issued; the logs, for which the loop would wait, it leaves unread.

    Args:
        clock: the stopwatch.
    """

    def __init__(self, clock: DeviceLaps) -> None:
        super().__init__()
        self._clock = clock

    def wants_batch_logs(self) -> bool:
        """No metrics."""
        return False

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """Counts a step; the loss of the epoch so far is read after the last one."""
        self._clock.step(lambda: float(logs["loss"]))


class _Notes(logging.Handler):
    """What the package logs: where it chose a CUDA graph, or why it did not."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[" ".join(record.getMessage().split())] = None


def train_ours(trial: Trial, seat: Seat, laps: Laps, *, setting: Setting, compiled: bool = False) -> None:
    """Trains with ``Model.fit`` on ``trial.contender.shares`` replicas.

    Args:
        trial: the work.
        seat: of the only process.
        laps: the stopwatch.
        setting: device, precision and pace.
        compiled: whether the module goes through torch.compile.
    """
    device = begin_process(setting)
    notes = _Notes()
    log = logging.getLogger("lockstep")
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    workload = trial.workload
    strategy = ls.MirroredStrategy(logical_devices(device, trial.contender.shares))
    with strategy.scope():
        module = workload.make_module()
        model = Model(module)
        model.compile(
            optimizer=torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True),
            loss=workload.loss,
            precision=setting.precision,
            compile_module=compiled,
        )
    laps.trained = trained_parameters(module)
    laps.notes = notes.lines.keys()
    batches = pinned(workload.make_batches(setting.pace.steps), device)
    clock = LapEveryBatch(DeviceLaps(laps, setting.pace, device))
    model.fit(batches, callbacks=[clock], verbose=0)
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
