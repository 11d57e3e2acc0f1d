"""Suite ``workers``: many workers beside DistributedDataParallel, on one host and on two that a slowed link joins.

one host:   workers-2                   ddp-2    ddp-2 channels_last    ddp-2 channels_last keeping
two hosts:  hosts-2x2  hosts-2x2 bf16   ddp-2x2  ddp-2x2 channels_last keeping, and its fp16
            each once more where the link is not slowed: what is left is the part that does not wait for it
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

from benchmarks.harness import Absence, Rounds, Sample, log_progress, run_rounds, trials_of
from benchmarks.hosts import Link, why_no_hosts
from benchmarks.loops import SETTINGS, run_worker, train_ddp, train_ddp_keeping
from benchmarks.processes import Body, SpawnedBody
from benchmarks.report import Report, head, settings_list
from benchmarks.results import Figures, figures_of
from benchmarks.suites.cpu import layouts_of
from benchmarks.trial import Conditions, Contender, Layout, Pace, Workload, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS, find_workload
from lockstep.collectives.communicator import Compression
from lockstep.report import markdown_table

PACE = Pace(warm_up=3, steps=10, rounds=3)

_WORKERS = 2
_REPLICAS_ON_A_HOST = 2
_FREE = " free"
_HALVED = (" bf16", " fp16")


def on_one_host(workload: str) -> tuple[Contender, ...]:
    """Two workers of one replica, and two processes of DDP, which share this machine as it is."""
    layouts = layouts_of(workload)
    return (
        _ours(f"workers-{_WORKERS}", _WORKERS, None),
        *(_ddp(f"ddp-{_WORKERS}", _WORKERS, layout, None) for layout in reversed(layouts)),
        _ddp(f"ddp-{_WORKERS}", _WORKERS, layouts[0], None, keeping=True),
    )


def on_two_hosts(workload: str, link: Link) -> tuple[Contender, ...]:
    """A worker of two replicas on each host, and two processes of DDP on each; a host has half of the cores."""
    layouts = layouts_of(workload)
    shares = _WORKERS * _REPLICAS_ON_A_HOST
    stem = f"{_WORKERS}x{_REPLICAS_ON_A_HOST}"
    return (
        _ours(f"hosts-{stem}", shares, link),
        _ours(f"hosts-{stem}", shares, link, "bf16"),
        _ddp(f"ddp-{stem}", shares, layouts[-1], link),
        _ddp(f"ddp-{stem}", shares, layouts[0], link, keeping=True),
        _ddp(f"ddp-{stem}", shares, layouts[0], link, keeping=True, halved=True),
    )


def on_free_hosts(workload: str) -> tuple[Contender, ...]:
    """Those on two hosts that send full precision, where the link is not slowed: who rounds computes the same."""
    return tuple(
        replace(contender, name=free_name(contender.name), role="yardstick")
        for contender in on_two_hosts(workload, Link(mbit=None))
        if not is_halved(contender)
    )


def free_name(name: str) -> str:
    """What a contender is called where the link is not slowed."""
    return f"{name}{_FREE}"


def is_halved(contender: Contender) -> bool:
    """Whether it sends gradients in half precision, with its rounding."""
    return contender.name.endswith(_HALVED)


def _ours(name: str, shares: int, link: Link | None, compression: Compression | None = None) -> Contender:
    body: Body = run_worker if compression is None else partial(run_worker, compression=compression)
    each = shares // _WORKERS
    where = "this machine" if link is None else "a host each"
    settings = f"MultiWorkerMirroredStrategy, {_WORKERS} workers of {each} {'replica' if each == 1 else 'replicas'}"
    return Contender(
        name=_with(name, compression),
        settings=f"{settings}, {where}, gloo, memory_format auto, run + optimizer.step{_sent_as(compression)}",
        launcher=SpawnedBody(body=body, link=link),
        shares=shares,
        processes=_WORKERS,
        layout="auto",
        role="ours",
    )


def _ddp(
    name: str,
    processes: int,
    layout: Layout,
    link: Link | None,
    *,
    keeping: bool = False,
    halved: bool = False,
) -> Contender:
    train = train_ddp_keeping if keeping else train_ddp
    body: Body = partial(train, halved=True) if halved else train
    told = "channels_last" if layout == "channels_last" else None
    memory = ", with the allocator settings that our strategies make" if keeping else ""
    where = f"{processes} processes" if link is None else f"{processes} processes, {processes // 2} on each host"
    return Contender(
        name=_with(name, told, "keeping" if keeping else None, "fp16" if halved else None),
        settings=f"{where}, {SETTINGS}, cores // processes threads each (at least 1), {layout}{memory}"
        + _sent_as("fp16" if halved else None),
        launcher=SpawnedBody(body=body, link=link),
        shares=processes,
        processes=processes,
        layout=layout,
    )


def _with(name: str, *more: str | None) -> str:
    return " ".join([name, *(word for word in more if word)])


def _sent_as(dtype: str | None) -> str:
    return "" if dtype is None else f", gradients sent in {dtype}"


ONE_HOST_LIMIT = 1.0
"""Our step time with two workers on this machine over DDP's with two processes."""
TWO_HOSTS_LIMIT = 0.8
"""Our step time with two hosts of two replicas over DDP's with two processes on each."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender.

    Args:
        figures: what every benchmark shows.
        free_ms: its median step where the link is not slowed; None where that was not measured.
        link_ms: how much longer its step is over the slowed link: the median over the rounds.
        sent_mb: MB (10**6 bytes) that leave each host in a step; 0 on one host.
    """

    figures: Figures
    free_ms: float | None = None
    link_ms: float | None = None
    sent_mb: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Step times of two contenders, divided round by round.

    Args:
        text: what is divided by what.
        rounds: the quotients, one a round.
        limit: what the median is to be at most; None where nothing was promised.
    """

    text: str
    rounds: tuple[float, ...]
    limit: float | None

    @property
    def value(self) -> float:
        """The median over the rounds."""
        return median(self.rounds)

    @property
    def reached(self) -> bool:
        """Whether it is within the limit; so is what has none."""
        return self.limit is None or self.value <= self.limit


def rows_of(contenders: Sequence[Contender], samples: Sequence[Sample], workload: str) -> tuple[Row, ...]:
    """One row a contender, in their order.

    Args:
        contenders: who took part, those with a free link left out.
        samples: of all workloads and contenders.
        workload: which one.
    """
    rows = []
    for figures in figures_of(contenders, samples, workload):
        own = _of(samples, workload, figures.contender.name)
        free = _of(samples, workload, free_name(figures.contender.name))
        slowed, unslowed = _medians(own), _medians(free)
        waits = [slowed[index] - unslowed[index] for index in slowed if index in unslowed]
        rows.append(
            Row(
                figures=figures,
                free_ms=median(step for sample in free for step in sample.step_ms) if free else None,
                link_ms=median(waits) if waits else None,
                sent_mb=median(sample.sent_mb for sample in own),
            )
        )
    return tuple(rows)


def comparisons_of(
    contenders: Sequence[Contender], samples: Sequence[Sample], workload: str, *, limit: float
) -> tuple[Comparison, ...]:
    """Ours over each of DDP's settings that sends as many bytes a number; the limit is for full precision.

    Args:
        contenders: who took part, those with a free link left out.
        samples: of all workloads and contenders.
        workload: which one.
        limit: of the quotients.
    """
    ours = [contender for contender in contenders if contender.role == "ours"]
    others = [contender for contender in contenders if contender.role == "rival"]
    return tuple(
        Comparison(
            text=f"{own.name} / {other.name}",
            rounds=rounds,
            limit=None if is_halved(own) else limit,
        )
        for own in ours
        for other in others
        if is_halved(own) == is_halved(other)
        and (rounds := _quotients(_of(samples, workload, own.name), _of(samples, workload, other.name)))
    )


def _quotients(over: Sequence[Sample], under: Sequence[Sample]) -> tuple[float, ...]:
    ours, theirs = _medians(over), _medians(under)
    return tuple(ours[index] / theirs[index] for index in sorted(ours) if index in theirs)


def _medians(samples: Sequence[Sample]) -> Mapping[int, float]:
    return {sample.round: median(sample.step_ms) for sample in samples}


def _of(samples: Sequence[Sample], workload: str, contender: str) -> list[Sample]:
    return [sample for sample in samples if (sample.workload, sample.contender) == (workload, contender)]


Place = Literal["one host", "two hosts"]

_COMMON = ("step ms", "p10", "p90")
_ENDING = ("CPU ms", "exchange + update", "first step s", "peak MB", "loss")
_LINK = ("link not slowed ms", "for the link ms", "sent MB")

_LEGEND = """\
## What the columns mean

- one host: the processes share this machine as it is. Two hosts: network namespaces on this machine, each with its
  half of the cores, joined by a pair of virtual interfaces; `tc tbf` slows the link in both directions. The processes
  of both hosts share this machine's memory and caches.
- step ms, p10, p90: of the timed steps of all rounds together; a step of several processes is the mean of theirs.
- link not slowed ms: the median step of the same contender on the same hosts where nothing slows the link: what
  computing and the processes' own work takes. for the link ms: how much longer the step is over the slowed link, the
  median over the rounds: what was not hidden behind the backward pass. Not measured in half precision.
- sent MB: 10**6 bytes that leave each host in a step, headers included, as the interface counts them. Among four
  processes each number passes the link one and a half times in each direction, between two workers once.
- CPU ms: CPU time of a step, of all threads of all processes.
- exchange + update: from the moment when the last local replica arrives at `optimizer.step` to the moment when all
  have left it, as part of the step; it contains the wait for the other worker, if that one is later.
- first step: from the start of the processes to the end of the slowest one's first step, imports, model, and the
  meeting of all workers included.
- peak: the sum of all processes' resident peaks (VmHWM).
- loss: of the last step, of each process's own part, averaged. All train the same model on the same batches; they
  differ by dropout, by batch statistics and by rounding.
- keeping: with the allocator settings that our strategies make, which no user of DDP has without looking for them.
- quotients: of the two contenders' median steps of the same round; the median, the lowest and the highest over the
  rounds."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A workload at one place.

    Args:
        workload: the work.
        place: on how many hosts.
        link: of two hosts, such as "1000 Mbit/s".
        rows: one a contender.
        comparisons: ours with the others.
        absences: who was to take part and did not.
    """

    workload: Workload
    place: Place
    link: str
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    absences: tuple[Absence, ...] = ()

    @property
    def title(self) -> str:
        """Such as "Two hosts, link 1000 Mbit/s: MobileNetV2 ..."."""
        where = "One host" if self.place == "one host" else f"Two hosts, link {self.link}"
        return f"{where}: {self.workload.title}"


def render_workers(conditions: Conditions, sections: Sequence[Section]) -> str:
    """The whole report."""
    parts = [head(conditions, "Many workers on CPUs"), *map(_section, sections), _LEGEND]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> str:
    columns = (*_COMMON, *(_LINK if section.place == "two hosts" else ()), *_ENDING)
    rows = [[row.figures.contender.name, *map(_cells(row).__getitem__, columns)] for row in section.rows]
    rows += [[absence.contender, "not run", *[""] * (len(columns) - 1)] for absence in section.absences]
    blocks = [
        f"## {section.title}",
        markdown_table(("contender", *columns), rows),
        _comparison_table(section.comparisons),
        "\n".join(
            [
                *settings_list([row.figures for row in section.rows]),
                *(f"- {one.contender}: not run: {one.reason}" for one in section.absences),
            ]
        ),
    ]
    return "\n\n".join(block for block in blocks if block)


def _cells(row: Row) -> dict[str, str]:
    figures = row.figures
    return {
        "step ms": f"{figures.median_ms:.1f}",
        "p10": f"{figures.p10_ms:.1f}",
        "p90": f"{figures.p90_ms:.1f}",
        "link not slowed ms": "" if row.free_ms is None else f"{row.free_ms:.1f}",
        "for the link ms": "" if row.link_ms is None else f"{row.link_ms:.1f}",
        "sent MB": f"{row.sent_mb:.1f}",
        "CPU ms": f"{figures.cpu_ms:.0f}",
        "exchange + update": "" if figures.exchange_share is None else f"{figures.exchange_share:.1%}",
        "first step s": f"{figures.first_step_s:.2f}",
        "peak MB": f"{figures.memory.peak_mb:.0f}",
        "loss": f"{figures.loss:.4f}",
    }


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    rows = [
        [
            one.text,
            "" if one.limit is None else f"at most {one.limit:.2f}",
            f"{one.value:.3f}",
            f"{min(one.rounds):.3f}",
            f"{max(one.rounds):.3f}",
            "" if one.limit is None else "yes" if one.reached else "NO",
        ]
        for one in comparisons
    ]
    return markdown_table(("step time", "limit", "median round", "lowest", "highest", "reached"), rows) if rows else ""


@dataclass(frozen=True, kw_only=True)
class WorkersSettings:
    """What is measured.

    Args:
        workloads: their names.
        link: between the two hosts.
        only: names of contenders; None for all. A contender brings its run without a slowed link with it.
    """

    workloads: tuple[str, ...]
    link: Link
    only: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        known = [one for name in self.workloads for place in _places(name, self.link) for one in place[1]]
        select_contenders(known, self.only)


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=USUAL_WORKLOADS)
    parser.add_argument(
        "--link-mbit", type=float, default=1000.0, help="Mbit/s between the two hosts (default 1000); hosts need root"
    )


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures all contenders in turn, on one host and on two; where these cannot be made, the report says why."""
    settings = WorkersSettings(
        workloads=tuple(asked.workload),
        link=Link(mbit=asked.link_mbit),
        only=None if asked.only is None else tuple(asked.only),
    )
    reason = why_no_hosts()
    trials = [
        trial
        for name in settings.workloads
        for trial in trials_of(find_workload(name), _taking_part(settings, name, hosts=not reason), conditions)
    ]
    rounds = run_rounds(trials, rounds=conditions.rounds, progress=log_progress)
    sections = [
        section
        for name in settings.workloads
        for place, contenders in _places(name, settings.link)
        if (section := _section_of_run(settings, name, place, contenders, rounds, reason)).rows or section.absences
    ]
    record = {
        "conditions": asdict(conditions),
        "comparisons": [
            {"workload": section.workload.name, "place": section.place, **asdict(one), "reached": one.reached}
            for section in sections
            for one in section.comparisons
        ],
        "absences": [asdict(absence) for section in sections for absence in section.absences],
        "samples": [asdict(sample) for sample in rounds.samples],
    }
    text = render_workers(conditions, sections)
    return Report(name=f"workers-cpu-{conditions.machine.cores}", date=conditions.date, text=text, record=record)


def _places(workload: str, link: Link) -> tuple[tuple[Place, tuple[Contender, ...]], ...]:
    return (("one host", on_one_host(workload)), ("two hosts", on_two_hosts(workload, link)))


def _taking_part(settings: WorkersSettings, workload: str, *, hosts: bool) -> list[Contender]:
    """In the order in which they run; one with a free link right after its own."""
    chosen = _chosen(settings, on_one_host(workload))
    free = {contender.name: contender for contender in on_free_hosts(workload)}
    for contender in _chosen(settings, on_two_hosts(workload, settings.link)) if hosts else ():
        chosen += [contender, *([free[name]] if (name := free_name(contender.name)) in free else [])]
    return chosen


def _chosen(settings: WorkersSettings, contenders: Sequence[Contender]) -> list[Contender]:
    return [contender for contender in contenders if settings.only is None or contender.name in settings.only]


def _section_of_run(
    settings: WorkersSettings,
    name: str,
    place: Place,
    contenders: Sequence[Contender],
    rounds: Rounds,
    reason: str,
) -> Section:
    chosen = _chosen(settings, contenders)
    present = [] if place == "two hosts" and reason else chosen
    limit = ONE_HOST_LIMIT if place == "one host" else TWO_HOSTS_LIMIT
    return Section(
        workload=find_workload(name),
        place=place,
        link=settings.link.text,
        rows=rows_of(present, rounds.samples, name),
        comparisons=comparisons_of(present, rounds.samples, name, limit=limit),
        absences=tuple(
            Absence(workload=name, contender=one.name, reason=reason) for one in chosen if one not in present
        ),
    )
