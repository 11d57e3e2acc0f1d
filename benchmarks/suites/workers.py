"""Suite ``workers``: many workers beside DistributedDataParallel, on one host and on two that a slowed link joins.

one host:   workers-2                   ddp-2    ddp-2 channels_last    ddp-2 channels_last keeping
two hosts:  hosts-2x2  hosts-2x2 bf16   ddp-2x2  ddp-2x2 channels_last keeping, and its fp16
            each once more where the link is not slowed: what is left is the part that does not wait for it
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks.harness import Absence, Sample, log_progress, run_rounds, trials_of
from benchmarks.hosts import Link, why_no_hosts
from benchmarks.loops import SETTINGS, run_worker, train_ddp, train_ddp_keeping
from benchmarks.processes import Body, SpawnedBody
from benchmarks.report import Column, Report, Section, columns, report_of
from benchmarks.results import Comparison, Figures, compare_steps, figures_of, samples_of, with_role
from benchmarks.suites.cpu import layouts_of
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


def on_free_hosts(workload: str) -> tuple[Contender, ...]:
    """Those on two hosts that send full precision, where the link is not slowed."""
    return tuple(
        replace(contender, name=free_name(contender.name), role="reference")
        for contender in on_two_hosts(workload, Link(mbit=None))
        if not is_halved(contender)
    )


def free_name(name: str) -> str:
    """What a contender is called where the link is not slowed."""
    return f"{name} free"


def is_halved(contender: Contender) -> bool:
    """Whether it sends gradients in half precision, with its rounding."""
    return contender.name.endswith(_HALVED)


def _ours(name: str, shares: int, link: Link | None, compression: Compression | None = None) -> Contender:
    each = shares // _WORKERS
    where = "this machine" if link is None else "a host each"
    settings = f"MultiWorkerMirroredStrategy, {_WORKERS} workers of {each} {'replica' if each == 1 else 'replicas'}"
    sent = "" if compression is None else f", gradients sent in {compression}"
    return Contender(
        name=name if compression is None else f"{name} {compression}",
        settings=f"{settings}, {where}, gloo, memory_format auto, run + optimizer.step{sent}",
        launcher=SpawnedBody(body=partial(run_worker, compression=compression), link=link),
        shares=shares,
        processes=_WORKERS,
        layout="auto",
        role="ours",
    )


def _ddp(
    name: str, processes: int, layout: Layout, link: Link | None, *, keeping: bool = False, halved: bool = False
) -> Contender:
    body: Body = partial(train_ddp_keeping if keeping else train_ddp, halved=halved)
    options = {"channels_last": layout == "channels_last", "keeping": keeping, "fp16": halved}
    where = f"{processes} processes" if link is None else f"{processes} processes, {processes // 2} on each host"
    memory = ", with the allocator settings that our strategies make" if keeping else ""
    sent = ", gradients sent in fp16" if halved else ""
    return Contender(
        name=" ".join([name, *(option for option, chosen in options.items() if chosen)]),
        settings=f"{where}, {SETTINGS}, cores // processes threads each (at least 1), {layout}{memory}{sent}",
        launcher=SpawnedBody(body=body, link=link),
        shares=processes,
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


def link_columns(samples: Sequence[Sample], workload: str) -> dict[str, Column]:
    """The columns of two hosts that compare a contender with itself where the link is not slowed."""

    def free(row: Figures) -> Sequence[Sample]:
        return samples_of(samples, workload, free_name(row.contender.name))

    def free_cell(row: Figures) -> str:
        steps = [step for sample in free(row) for step in sample.step_ms]
        return f"{median(steps):.1f}" if steps else ""

    def link_cell(row: Figures) -> str:
        slowed, unslowed = _medians(row.samples), _medians(free(row))
        waits = [slowed[index] - unslowed[index] for index in slowed if index in unslowed]
        return f"{median(waits):.1f}" if waits else ""

    return {"link not slowed ms": free_cell, "for the link ms": link_cell}


def _medians(samples: Sequence[Sample]) -> Mapping[int, float]:
    return {sample.round: median(sample.step_ms) for sample in samples}


_MEANINGS = {
    "one host": "the processes share this machine as it is. Two hosts: network namespaces on this machine, each with "
    "its half of the cores, joined by a pair of virtual interfaces; `tc tbf` slows the link in both directions. The "
    "processes of both hosts share this machine's memory and caches.",
    "link not slowed ms": "the median step of the same contender on the same hosts where nothing slows the link. for "
    "the link ms: how much longer the step is over the slowed link, the median over the rounds: what was not hidden "
    "behind the backward pass. Not measured in half precision.",
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
    trials = []
    for name in asked.workload:
        chosen = [each for each in on_one_host(name) if each.name in wanted]
        free = {each.name: each for each in on_free_hosts(name)}
        for each in on_two_hosts(name, link):
            if not reason and each.name in wanted:  # with the same one on a free link right after it
                chosen += [each, *(free[other] for other in [free_name(each.name)] if other in free)]
        trials += trials_of(WORKLOADS[name], chosen, conditions)
    samples = run_rounds(trials, rounds=conditions.rounds, progress=log_progress).samples
    sections = []
    for name in asked.workload:
        for contenders, hosts in ((on_one_host(name), ""), (on_two_hosts(name, link), link.text)):
            chosen = [each for each in contenders if each.name in wanted]
            if chosen:
                sections.append(section_of(name, chosen, samples, link=hosts, reason=reason if hosts else ""))
    return report_of("workers-cpu", conditions, "Many workers on CPUs", sections, samples, meanings=_MEANINGS)


def section_of(
    workload: str, contenders: Sequence[Contender], samples: Sequence[Sample], *, link: str, reason: str = ""
) -> Section:
    """The table of a workload on one host, or on two with ``link`` between them; ``reason``: why nobody ran."""
    figures = [] if reason else figures_of(contenders, samples, workload)
    shown = columns("step ms", "p10", "p90")
    if link:
        shown |= {**link_columns(samples, workload), **columns("sent MB")}
    shown |= columns("CPU ms", "exchange + update", "first step s", "peak MB", "loss")
    return Section(
        workload=workload,
        title=f"{f'Two hosts, link {link}' if link else 'One host'}: {WORKLOADS[workload].title}",
        columns=shown,
        figures=figures,
        comparisons=comparisons_of(figures, TWO_HOSTS_LIMIT if link else ONE_HOST_LIMIT),
        absences=[Absence(workload=workload, contender=each.name, reason=reason) for each in contenders if reason],
    )
