"""What the hosts of an elastic job do in its next round: a pure function of what their launchers tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostState:
    """What a launcher tells the others at the beginning of a round."""

    index: int  # the host's place in the list
    name: str  # the host in messages
    capacity: int  # workers that it can run
    survivors: int  # how many of them were not lost
    losses: tuple[str, ...] = ()  # who was lost since the last round, and how
    back: int = 0  # how many workers are started again that were lost earlier
    failure: str = ""  # how the program failed here
    finished: bool = False  # its workers have ended, and none with an error
    restarts: int = 0  # how often all workers were restarted after a failure


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the first launcher decides for a round. Its hosts are in the order of the list, the first one first."""

    number: int = -1  # of the round; the first one is 0
    tickets: tuple[str, ...] = ()  # the ticket with which each host has come (``elastic_meeting.HostRecord``)
    sizes: tuple[int, ...] = ()  # how many workers each host starts
    line: str = ""  # what has changed, for people; empty at the start of the job
    restarts: int = 0  # how often all workers were restarted after a failure
    end: str = ""  # why the job ends instead
    finished: bool = False  # the job ends because all is done
    address: str = ""  # where the workers' store is
    port: int = 0

    @property
    def ends_job(self) -> bool:
        return self.finished or bool(self.end)


def decide(hosts: Sequence[HostState], before: Sequence[HostState], *, minimum: int, max_restarts: int) -> Plan | None:
    """What the hosts of a round do, ``before`` being those of the last one. None: wait for more hosts. Pure.

    A loss comes before a failure: programs that do not use Lockstep fail when they lose each other.
    """
    if before and all(host.finished for host in hosts):
        return Plan(finished=True)
    survivors, capacity = sum(host.survivors for host in hosts), sum(host.capacity for host in hosts)
    if capacity < minimum:
        return None
    changes, restarts = _changes(hosts, before), max(host.restarts for host in hosts)
    stayed = [host for host in hosts if host.index in {host.index for host in before}]
    has_losses = any(host.losses for host in stayed) or len(stayed) < len(before)
    failure = "" if has_losses else next((host.failure for host in stayed if host.failure), "")
    if not failure and survivors >= minimum:
        line = f"{'; '.join(changes)}; {_workers(survivors)} on" if changes else ""
        return Plan(sizes=tuple(host.survivors for host in hosts), line=line, restarts=restarts)
    cause = failure or f"{'; '.join(changes)}; {survivors} left of at least {minimum}"
    if restarts == max_restarts:
        return Plan(end=cause)
    line = f"{cause}; starting all again ({restarts + 1} of {max_restarts})"
    return Plan(sizes=tuple(host.capacity for host in hosts), line=line, restarts=restarts + 1)


def _changes(hosts: Sequence[HostState], before: Sequence[HostState]) -> list[str]:
    """One phrase for each that was lost or came."""
    indices, indices_before = [{host.index for host in states} for states in (hosts, before)]
    changes = [phrase for host in hosts for phrase in host.losses]
    changes += [f"{host.name} is gone" for host in before if host.index not in indices]
    if back := sum(host.back for host in hosts):
        changes.append(f"{back} lost worker{'s are' if back > 1 else ' is'} back")
    if before:
        changes += [f"{host.name} has joined" for host in hosts if host.index not in indices_before]
    return changes


def _workers(number: int) -> str:
    return "1 worker goes" if number == 1 else f"{number} workers go"
