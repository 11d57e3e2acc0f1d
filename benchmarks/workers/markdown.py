"""The report on many workers as Markdown: a table a workload and place, and how ours compares. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.harness import Absence
from benchmarks.markdown import Conditions, head, settings_list
from benchmarks.trial import Workload
from benchmarks.workers.figures import Comparison, Row
from lockstep.report import markdown_table

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
