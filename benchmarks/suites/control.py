"""Suite ``control``: how a job of many workers starts, beats and notices a loss, with real members of one real store.

process 0      the chief, which serves the store
process 1 ...  an equal part of the other members each, every one with connections and threads of its own
one more       the last member, in a process of its own, which is killed in the end

The members join, do nothing but beat for some seconds, and learn of the loss. Nothing is trained.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.harness import Absence, Sample, run_rounds, trials_of
from benchmarks.loops import chief_address
from benchmarks.processes import ProcessInfo, SpawnedBody
from benchmarks.report import Column, Report, Section, report_of
from benchmarks.results import Comparison, Figures, figures_of
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Conditions, Contender, Pace, Trial, Workload, select_contenders
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.membership import Membership, join

PACE = Pace(warm_up=3, steps=10, rounds=3)
SIZES = (4, 64, 256, 1024)
"""How many members the jobs have."""
THROUGH_LIMIT_S, CORE_LIMIT, NAMED_LIMIT_S = 15.0, 0.25, 15.0
"""What the project wants of every job."""
_PROCESSES = 4  # of the members beside the chief, at most
_LIMIT_S = 300.0
# torch looks up the name of each address that it connects to, for its log. Without these, a name server that drops some
# of a thousand questions from one machine would be measured instead of the store.
_VARIABLES = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_TITLE = "The members of a job, without a training"


def contenders() -> list[Contender]:
    """A job of each size."""
    return [
        Contender(
            name=f"members-{size}",
            settings=f"{size} members in {min(_PROCESSES, size - 2) + 1} processes and one that is killed, settings as "
            "by default (lost_after_s=15)",
            launcher=SpawnedBody(body=partial(be_members, size=size)),
            replicas=size,
            processes=min(_PROCESSES, size - 2) + 1,
            role="ours",
            limit_s=_LIMIT_S,
        )
        for size in SIZES
    ]


def be_members(trial: Trial, process: ProcessInfo, timer: StepTimer, *, size: int) -> None:
    """This process's members of a job of so many. A step is a second of heartbeats, and the last one the loss."""
    gc.disable()  # it would look through the objects of hundreds of members, where a job's process has those of one
    parts = trial.contender.processes - 1
    ranks = range(process.rank, size - 1, parts) if process.rank else range(1)
    workers = (chief_address(trial, process), *[""] * (size - 1))
    specs = [ClusterSpec(workers=workers, index=rank) for rank in ranks]
    lost = _fork_member(ClusterSpec(workers=workers, index=size - 1)) if process.rank == parts else None
    named: queue.SimpleQueue[float] = queue.SimpleQueue()
    with ThreadPoolExecutor(len(ranks)) as pool:
        arrived_s = time.monotonic()
        members = list(pool.map(_enter, specs))
        through_s = time.monotonic()
        for member in members:
            member.subscribe(lambda _: named.put(time.monotonic()))
        cores = _beat(trial, timer)
        killed_s = _kill(lost) if lost is not None else 0.0
        named_s = max(named.get(timeout=_LIMIT_S) for _ in members)
        if unexpected := {str(each.failure) for each in members if f"worker {size - 1} " not in str(each.failure)}:
            raise ClusterError(f"worker {size - 1} was killed, but members were told: {unexpected.pop()}")
        found = {"arrived_s": arrived_s, "through_s": through_s, "killed_s": killed_s, "named_s": named_s}
        found |= {"chief_cores": 0.0, "member_cores": 0.0, "member_cores" if process.rank else "chief_cores": cores}
        timer.extra = lambda: found
        timer.record_step(0.0)
        list(pool.map(Membership.close, members))


def _enter(spec: ClusterSpec) -> Membership:
    return join(spec, timeout_s=_LIMIT_S)


def _fork_member(spec: ClusterSpec) -> int:
    """Starts a member that does nothing until it is killed; its process id."""
    if pid := os.fork():
        return pid
    try:
        member = _enter(spec)
        while member.failure is None:
            threading.Event().wait(1.0)
    finally:
        os._exit(1)


def _beat(trial: Trial, timer: StepTimer) -> float:
    """Lets seconds pass; how many cores this process used in the timed ones."""
    used_s, began_s = 0.0, 0.0
    for second in range(timer.total - 1):
        if second == trial.warm_up:
            used_s, began_s = time.process_time(), time.monotonic()
        threading.Event().wait(1.0)
        timer.record_step(0.0)
    return (time.process_time() - used_s) / (time.monotonic() - began_s)


def _kill(pid: int) -> float:
    """Kills a process; when."""
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    os.waitpid(pid, 0)
    return killed_s


def seconds_to(event: str, since: str, sample: Sample) -> float:
    """From the last process's ``since`` to the last one's ``event``."""
    return max(process[event] for process in sample.extra) - max(process[since] for process in sample.extra)


_THROUGH = partial(seconds_to, "through_s", "arrived_s")
_NAMED = partial(seconds_to, "named_s", "killed_s")


def _cores(name: str, sample: Sample) -> float:
    return sum(process[name] for process in sample.extra)


_COLUMNS: dict[str, Column] = {
    "all through s": lambda row: f"{row.over_rounds(_THROUGH):.2f}",
    "chief cores": lambda row: f"{row.over_rounds(partial(_cores, 'chief_cores')):.3f}",
    "member cores": lambda row: f"{row.over_rounds(partial(_cores, 'member_cores')):.3f}",
    "lost one named s": lambda row: f"{row.over_rounds(_NAMED):.1f}",
}
_MEANINGS = {
    "all through s": "from the last member's call of `join` to the return of the last call.",
    "chief cores": "how many cores the process of the chief uses, with the job's store, while the members only beat.",
    "member cores": "the same of all processes of the other members together.",
    "lost one named s": "from SIGKILL of one member to the moment when the last of the others knows its name.",
}


def comparisons_of(figures: Sequence[Figures]) -> list[Comparison]:
    """Every job beside what the project wants."""
    return [
        Comparison(text=f"{row.contender.name}: {text}", values=tuple(map(value, row.samples)), limit=limit, unit=unit)
        for row in figures
        for text, value, limit, unit in (
            ("last arrival to all through", _THROUGH, THROUGH_LIMIT_S, " s"),
            ("cores of the chief and its store", partial(_cores, "chief_cores"), CORE_LIMIT, ""),
            ("kill to all others know", _NAMED, NAMED_LIMIT_S, " s"),
        )
    ]


def section_of(figures: Sequence[Figures], absences: Sequence[Absence] = ()) -> Section:
    """The table."""
    return Section(
        workload="members",
        title=_TITLE,
        columns=_COLUMNS,
        figures=figures,
        comparisons=comparisons_of(figures),
        absences=absences,
    )


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures jobs of every size in turn."""
    chosen = select_contenders(contenders(), asked.only)
    os.environ.update(_VARIABLES)
    workload = Workload(name="members", title=_TITLE)
    rounds = run_rounds(trials_of(workload, chosen, conditions), rounds=conditions.rounds)
    section = section_of(figures_of(chosen, rounds.samples, workload.name), rounds.absences)
    name = f"control-cpu-{conditions.machine.cores}"
    return report_of(name, conditions, "The control plane", [section], rounds.samples, meanings=_MEANINGS)
