"""Suite ``workers``: many workers beside DistributedDataParallel, on one host and on two that a slowed link joins.

one host:   workers-2                   ddp-2    ddp-2 channels_last    ddp-2 channels_last keeping
two hosts:  hosts-2x2  hosts-2x2 bf16   ddp-2x2  ddp-2x2 channels_last keeping, and its fp16
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

from benchmarks.harness import Absence, Rounds, run_rounds, trials_of
from benchmarks.hosts import Link, why_no_hosts
from benchmarks.loops import SETTINGS, layouts_of, run_worker, train_ddp
from benchmarks.processes import Body, SpawnedBody
from benchmarks.report import Report, Section, columns, report_of
from benchmarks.results import Comparison, Figures, compare_steps, figures_of, with_role
from benchmarks.trial import Conditions, Contender, Layout, Pace, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS
from lockstep.collectives.communicator import Compression

PACE = Pace(warm_up=3, steps=10, rounds=3)
ONE_HOST_LIMIT = 1.0
"""Our step time with two workers on this machine over DDP's with two processes."""
TWO_HOSTS_LIMIT = 0.8
"""Our step time with two hosts of two replicas over DDP's with two processes on each."""
_WORKERS = 2
_HALVED = (" bf16", " fp16")


def on_one_host(workload: str) -> tuple[Contender, ...]:
    """Two workers of one replica, and two processes of DDP, which share this machine as it is."""
    layouts = layouts_of(workload)
    return (
        _ours("workers-2", 2, None),
        *(_ddp("ddp-2", 2, layout, None) for layout in reversed(layouts)),
        _ddp("ddp-2", 2, layouts[0], None, keeping=True),
    )


def on_two_hosts(workload: str, link: Link) -> tuple[Contender, ...]:
    """A worker of two replicas on each host, and two processes of DDP on each; a host has half of the cores."""
    layouts = layouts_of(workload)
    return (
        _ours("hosts-2x2", 4, link),
        _ours("hosts-2x2", 4, link, "bf16"),
        _ddp("ddp-2x2", 4, layouts[-1], link),
        _ddp("ddp-2x2", 4, layouts[0], link, keeping=True),
        _ddp("ddp-2x2", 4, layouts[0], link, keeping=True, halved=True),
    )


def is_halved(contender: Contender) -> bool:
    """Whether it sends gradients in half precision, with its rounding."""
    return contender.name.endswith(_HALVED)


def _ours(name: str, replicas: int, link: Link | None, compression: Compression | None = None) -> Contender:
    each = replicas // _WORKERS
    where = "this machine" if link is None else "a host each"
    settings = f"MultiWorkerMirroredStrategy, {_WORKERS} workers of {each} {'replica' if each == 1 else 'replicas'}"
    sent = "" if compression is None else f", gradients sent in {compression}"
    return Contender(
        name=name if compression is None else f"{name} {compression}",
        settings=f"{settings}, {where}, gloo, memory_format auto, run + optimizer.step{sent}",
        launcher=SpawnedBody(body=partial(run_worker, compression=compression), link=link),
        replicas=replicas,
        processes=_WORKERS,
        layout="auto",
        role="ours",
    )


def _ddp(
    name: str, processes: int, layout: Layout, link: Link | None, *, keeping: bool = False, halved: bool = False
) -> Contender:
    body: Body = partial(train_ddp, keeping=keeping, halved=halved)
    options = {"channels_last": layout == "channels_last", "keeping": keeping, "fp16": halved}
    where = f"{processes} processes" if link is None else f"{processes} processes, {processes // 2} on each host"
    memory = ", with the allocator settings that our strategies make" if keeping else ""
    sent = ", gradients sent in fp16" if halved else ""
    return Contender(
        name=" ".join([name, *(option for option, chosen in options.items() if chosen)]),
        settings=f"{where}, {SETTINGS}, cores // processes threads each (at least 1), {layout}{memory}{sent}",
        launcher=SpawnedBody(body=body, link=link),
        replicas=processes,
        processes=processes,
        layout=layout,
    )


def comparisons_of(figures: Sequence[Figures], limit: float) -> list[Comparison]:
    """Ours over each of DDP's settings that sends as many bytes a number; the limit is for full precision."""
    return [
        compare_steps(own, other, None if is_halved(own.contender) else limit)
        for own in with_role(figures, "ours")
        for other in with_role(figures, "baseline")
        if is_halved(own.contender) == is_halved(other.contender)
    ]


_MEANINGS = {
    "one host": "the processes share this machine as it is. Two hosts: network namespaces on this machine, each with "
    "its half of the cores, joined by a pair of virtual interfaces; `tc tbf` slows the link in both directions. The "
    "processes of both hosts share this machine's memory and caches.",
    "sent MB": "10**6 bytes that leave each host in a step, headers included, as the interface counts them. Among four "
    "processes each number passes the link one and a half times in each direction, between two workers once.",
    "keeping": "with the allocator settings that our strategies make, which DDP's users do not have by default.",
}


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=USUAL_WORKLOADS)
    parser.add_argument(
        "--link-mbit", type=float, default=1000.0, help="Mbit/s between the two hosts (default 1000); hosts need root"
    )


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures all contenders in turn, on one host and on two; where these cannot be made, the report says why."""
    link = Link(mbit=asked.link_mbit)
    everyone = [each for name in asked.workload for each in (*on_one_host(name), *on_two_hosts(name, link))]
    wanted = {each.name for each in select_contenders(everyone, asked.only)}
    reason = why_no_hosts()
    trials, tables = [], []
    for name in asked.workload:
        for contenders, hosts in ((on_one_host(name), ""), (on_two_hosts(name, link), link.text)):
            chosen = [each for each in contenders if each.name in wanted]
            if chosen:
                tables.append((name, chosen, hosts))
            if not (hosts and reason):
                trials += trials_of(WORKLOADS[name], chosen, conditions)
    rounds = run_rounds(trials, rounds=conditions.rounds)
    sections = [
        section_of(name, chosen, rounds, link=hosts, reason=reason if hosts else "") for name, chosen, hosts in tables
    ]
    name = f"workers-cpu-{conditions.machine.cores}"
    return report_of(name, conditions, "Many workers on CPUs", sections, rounds.samples, meanings=_MEANINGS)


def section_of(workload: str, contenders: Sequence[Contender], rounds: Rounds, *, link: str, reason: str) -> Section:
    """The table of a workload on one host, or on two with ``link`` between them; ``reason``: why nobody ran."""
    figures = figures_of(contenders, rounds.samples, workload)
    names = [each.name for each in contenders]
    absences = [Absence(workload=workload, contender=name, reason=reason) for name in names if reason]
    absences += [each for each in rounds.absences if each.workload == workload and each.contender in names]
    sent = ("sent MB",) if link else ()
    shown = columns("step ms", "p10", "p90", *sent, "CPU ms", "exchange + update", "first step s", "peak MB", "loss")
    return Section(
        workload=workload,
        title=f"{f'Two hosts, link {link}' if link else 'One host'}: {WORKLOADS[workload].title}",
        columns=shown,
        figures=figures,
        comparisons=comparisons_of(figures, TWO_HOSTS_LIMIT if link else ONE_HOST_LIMIT),
        absences=absences,
    )
