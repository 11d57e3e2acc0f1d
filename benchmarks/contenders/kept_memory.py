"""The plain loops with the allocator settings that our strategies make, to tell what those alone bring.

Nobody's usual set-up, so beside one process's replicas these rows are shown and take no part in the targets.
"""

from __future__ import annotations

from benchmarks.contenders.ddp import train_ddp
from benchmarks.contenders.plain import train_alone
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Trial
from lockstep.replicas.cpu.memory import keep_freed_memory


def train_alone_keeping(trial: Trial, seat: Seat, laps: Laps) -> None:
    """The single process, keeping freed memory."""
    keep_freed_memory()
    train_alone(trial, seat, laps)


def train_ddp_keeping(trial: Trial, seat: Seat, laps: Laps, *, halved: bool = False) -> None:
    """One of the DDP processes, keeping freed memory; see ``train_ddp``. All of them must call it."""
    keep_freed_memory()
    train_ddp(trial, seat, laps, halved=halved)
