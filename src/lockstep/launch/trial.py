"""A trial of a training step in a fresh process: does it fit the memory, how much of it does it take, and how long.

    the pickled build -> fresh process: step = build(); step(rows), three to ten times -> Trial

What a trial changes, allocates or is killed by ends with its process.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lockstep.config import list_logical_devices
from lockstep.errors import ReplicaError
from lockstep.launch.serialization import deserialize, serialize
from lockstep.launch.side_effects import hide_main
from lockstep.parent_death import die_with_parent
from lockstep.replicas.device.driver import driver_of
from lockstep.replicas.device.memory import MB, is_out_of_memory

Step = Callable[[int], object]
"""Runs one training step with a batch of so many rows."""

_PRELOADED = ["torch", "torch._dynamo", "lockstep", "lockstep.launch.trial", "lockstep.train.model"]
_SLOW_IMPORTS = ("torchmetrics", "transformers")
# The first step makes the optimizer's state, and rows are followed through the modules in the first two: with
# MobileNetV2 steps of 3.1, 0.78, 0.20, 0.20 s. The fastest of the others is what a step takes.
_FEWEST_STEPS, _MOST_STEPS = 3, 10
_ENOUGH_S = 3.0  # of timed steps, beyond the fewest
_KILLED = -9  # exit code after SIGKILL, which is what the kernel sends where memory ends


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The peak memory of a trial on one device, and the limit, both in MB; a CPU's is that of the whole process."""

    device: str
    peak_mb: float
    limit_mb: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one size: whether it fits, the seconds of a step, the peak memory by device, and why not."""

    rows: int
    fits: bool
    seconds: float = math.inf
    memory: tuple[MemoryUse, ...] = ()
    reason: str = ""

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


@dataclass(frozen=True, kw_only=True)
class TrialProcess:
    """What every trial of this worker is given.

    Args:
        call: the pickled function that makes the step.
        share: this worker's part of a global batch.
        host_mb: MB that the process may take on the host.
        margin: the part of each limit that is left free.
        timeout_s: seconds that a trial may take.
        alone: whether its environment declares a job of one worker in place of this one's job.
    """

    call: bytes
    share: float
    host_mb: float
    margin: float
    timeout_s: float
    alone: bool

    def run(self, rows: int) -> Trial:
        """Tries a size in a fresh process, which has ended when this returns."""
        context = multiprocessing.get_context("forkserver")
        # What this process has imported, a trial would import for seconds.
        context.set_forkserver_preload([*_PRELOADED, *(name for name in _SLOW_IMPORTS if name in sys.modules)])
        connection, far = context.Pipe(duplex=False)
        environment = dict(os.environ)
        if self.alone:
            environment = {**environment, "RANK": "0", "WORLD_SIZE": "1", "TF_CONFIG": ""}
        arguments = (self, math.ceil(rows * self.share), environment, torch.get_num_threads(), far)
        process = context.Process(target=_trial_main, args=arguments)
        with hide_main():
            process.start()
        far.close()
        try:
            if not connection.poll(self.timeout_s):
                raise ReplicaError(f"a trial of {rows} rows took over {self.timeout_s:g} s; give a larger timeout_s")
            result: Trial | BaseException = deserialize(connection.recv_bytes())
        except EOFError:
            process.join(self.timeout_s)
            if process.exitcode != _KILLED:
                raise ReplicaError(f"the process of a trial of {rows} rows ended with {process.exitcode}") from None
            result = Trial(rows=rows, fits=False, reason="its process was killed, as where memory ends")
        finally:
            connection.close()
            process.kill()
            process.join()
        if isinstance(result, BaseException):
            raise result
        return replace(result, rows=rows)


def _trial_main(
    process: TrialProcess, rows: int, environment: dict[str, str], threads: int, connection: Connection
) -> None:
    """Tries a size, and sends a Trial, or the error that is no lack of memory."""
    die_with_parent()
    # A DataLoader in the step starts its processes as in any program; left at forkserver they would import torch anew,
    # 6 s in place of 0.3.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    result: Trial | BaseException
    try:
        result = _measured(process, rows)
    except BaseException as error:  # noqa: BLE001  whatever a step raises; the parent raises it again
        result = (
            Trial(rows=rows, fits=False, reason=(str(error) or type(error).__name__).splitlines()[0])
            if is_out_of_memory(error)
            else error
        )
        if isinstance(result, BaseException):
            error.add_note("".join(["In a fresh process:\n", *traceback.format_exception(error)]))
    try:
        payload = serialize(result)
    except Exception:  # noqa: BLE001  whatever the user's class does; the text is enough
        payload = serialize(ReplicaError(f"{type(result).__name__}: {result}"))
    connection.send_bytes(payload)


def _measured(process: TrialProcess, rows: int) -> Trial:
    gpus = [(gpu, driver) for gpu in list_logical_devices("GPU") if (driver := driver_of(gpu)) is not None]
    free_mb = {gpu.torch_device: driver.free_and_total(gpu.torch_device)[0] / MB for gpu, driver in gpus}
    # RLIMIT_DATA counts private writable mappings, and not only what is resident.
    if not gpus:  # CUDA reserves addresses that would count
        _limit_memory(process.host_mb)
    build, _, _ = deserialize(process.call)
    step: Step = build()
    seconds: list[float] = []
    while len(seconds) < _FEWEST_STEPS or (len(seconds) < _MOST_STEPS and sum(seconds[2:]) < _ENOUGH_S):
        began = time.perf_counter()
        step(rows)
        seconds.append(time.perf_counter() - began)
    # The kernel's own peak: tensors that were freed within the step count, which looks from outside would miss.
    host_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    memory = [MemoryUse(device="cpu", peak_mb=host_mb, limit_mb=process.host_mb)]
    for gpu in list_logical_devices("GPU"):  # as build has divided them
        if (driver := driver_of(gpu)) is not None:
            # A share's memory is that of its stream; of a whole GPU the allocator knows the peak of all tensors.
            peak = driver.peak(gpu.torch_device) if gpu.memory_limit is None else driver.pool(gpu).reserved
            memory.append(
                MemoryUse(device=gpu.name, peak_mb=peak / MB, limit_mb=gpu.memory_limit or free_mb[gpu.torch_device])
            )
    above = [use.device for use in memory if use.peak_mb > (1 - process.margin) * use.limit_mb]
    reason = f"{above[0]} needs more than {1 - process.margin:.0%} of its limit" if above else ""
    return Trial(rows=rows, fits=not above, seconds=min(seconds[2:]), memory=tuple(memory), reason=reason)


def _limit_memory(more_mb: float) -> None:
    """Lets allocations fail that take much more, before the machine swaps or its kernel kills another process.

    Where memory ends all the same, the kernel first kills processes with a high score.
    """
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = data_pages * resource.getpagesize() + int(more_mb * MB)
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
