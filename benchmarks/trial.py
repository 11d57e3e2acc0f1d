"""What is measured, as plain data: a workload, a contender that does it, and one trial of the two.

Everything here is pickled for a contender's fresh process, so functions are named by their modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from benchmarks.step_timer import StepRecord
from lockstep.checks import check_least
from lockstep.errors import ConfigError
from lockstep_tools.scaling.machine import Machine

TRIAL_LIMIT_S = 300.0
"""A trial that takes longer is ended, if its contender has no limit of its own."""
END_LIMIT_S = 30.0
"""Processes that have not ended so long after their last step are killed."""

Layout = Literal["auto", "channels_last", "contiguous", "framework"]
"""Memory format of weights and images; "auto" leaves it to the strategy, "framework" to the other framework."""

Role = Literal["ours", "baseline", "peer", "reference"]
"""What a contender's numbers are for.

ours: this package. baseline: a loop written by hand on torch alone. peer: another framework. reference: a part of the
work, for the parallel efficiency.
"""

Batch = tuple[Any, Tensor]
"""A global batch (x, y); x is a tensor or a dict of the module's keyword arguments."""


def _is_the_contenders_own(*_: Any) -> Any:
    raise NotImplementedError("the contenders of this workload have a model and data of their own")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step that all contenders do, on the same numbers."""

    name: str  # as on the command line
    title: str  # for the table: model, shapes, optimizer
    make_module: Callable[[], nn.Module] = _is_the_contenders_own  # random weights from torch's default generator
    make_batches: Callable[[int], list[Batch]] = _is_the_contenders_own  # so many, global, the same in every process
    # Of (outputs, y): the sum over what is counted, and the count.
    loss: Callable[[Any, Tensor], tuple[Tensor, Any]] = _is_the_contenders_own
    count: int = 0  # how many are counted in each global batch
    learning_rate: float = 0.0  # Adam's


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work."""

    name: str  # a short one, such as "ddp-2"
    settings: str  # for the table: what was chosen, and how
    launcher: Launcher
    replicas: int  # ours, or processes of DDP: how many divide the global batch
    processes: int = 1  # processes that train, and report
    layout: Layout = "contiguous"
    role: Role = "baseline"
    peer: str = ""  # name of the other framework, such as "fabric"; empty in this package's own environment
    limit_s: float = TRIAL_LIMIT_S  # a trial that takes longer is ended


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a suite measures unless the command line says otherwise."""

    warm_up: int  # steps before the timed ones
    steps: int  # timed steps of a trial
    rounds: int  # trials of each contender


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a run was made."""

    date: str  # YYYY-MM-DD
    machine: Machine
    command: str
    warm_up: int
    steps: int
    rounds: int
    facts: tuple[tuple[str, str], ...] = ()  # further names and texts for the head of the report


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One contender doing one workload, once, in fresh processes."""

    workload: Workload
    contender: Contender
    warm_up: int  # steps before the timed ones, at least 1
    steps: int  # timed steps, at least 1
    cores: int  # CPU cores to use in all
    lap: int = 1  # steps between two readings of the clock

    def __post_init__(self) -> None:
        check_least(self, 1, "warm_up", "steps", "cores")

    @property
    def name(self) -> str:
        return f"contender {self.contender.name!r} on workload {self.workload.name!r}"

    @property
    def threads_per_process(self) -> int:
        """Intra-op threads of each process: an equal part of the cores, at least one."""
        return max(1, self.cores // self.contender.processes)

    @property
    def too_slow(self) -> str:
        """The message for a trial that took longer than its limit."""
        limit_s = self.contender.limit_s
        return f"{self.name} was not done after {limit_s:.0f} s; give it fewer --steps or a faster machine"


class RunningTrial(ABC):
    """The running processes of one trial. Whoever launched it calls ``end``, on errors too."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The processes that train."""

    @abstractmethod
    def records(self) -> list[StepRecord]:
        """One record of each process that trains; they stay in their last step until ``end``.

        Raises:
            ReplicaError: a process ended before its last step, or they took longer than the trial's limit.
        """

    @abstractmethod
    def end(self) -> None:
        """Lets the processes go on to their end, and ends those that do not."""


class Launcher(ABC):
    """A way to start the processes of a trial."""

    @abstractmethod
    def launch(self, trial: Trial, folder: Path) -> RunningTrial:
        """Starts them. ``folder`` is empty, for whatever they need; it outlives them."""


def select_contenders(contenders: Sequence[Contender], only: Sequence[str] | None) -> list[Contender]:
    """The contenders that ``--only`` names, in their own order; all of them for None.

    Raises:
        ConfigError: a name is unknown; the message lists the known ones.
    """
    known = list(dict.fromkeys(contender.name for contender in contenders))
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)} is unknown; choose from {', '.join(map(repr, known))}")
    return [contender for contender in contenders if not only or contender.name in only]
