"""Suite ``cpu``: replicas of one process beside hand-written loops, and beside other frameworks where they are there.

roster, frameworks -> line_up: who takes part, and why others do not -> rounds -> figures and targets -> Markdown, JSON
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.frameworks import PEERS, Peer, Places, contenders_of, versions_of
from benchmarks.harness import Absence, Rounds, Sample, log_progress, run_rounds, trials_of
from benchmarks.loops import (
    SETTINGS,
    fit_model,
    run_replicas,
    train_alone,
    train_alone_keeping,
    train_ddp,
    train_ddp_keeping,
    train_one_share,
)
from benchmarks.processes import Body, SpawnedBody
from benchmarks.report import Report, head, settings_list, target_table
from benchmarks.results import Efficiency, Figures, Target, efficiencies_of, figures_of, targets_of
from benchmarks.trial import Conditions, Contender, Layout, Pace, Workload, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS
from lockstep.errors import ConfigError
from lockstep.report import markdown_table

PACE = Pace(warm_up=3, steps=10, rounds=3)

_CONVOLUTIONAL = frozenset({"mobilenetv2"})
_SUFFIX: dict[Layout, str] = {"channels_last": " channels_last", "contiguous": ""}
_SHARES = (2, 4)


def roster(workload: str) -> tuple[Contender, ...]:
    """The contenders of a workload, ours first, then the yardsticks, checks that are not counted last.

    Rivals try both memory formats where there are convolutions, and the faster one counts.
    """
    layouts = layouts_of(workload)
    return (
        *(_replicas(shares) for shares in _SHARES),
        *(_halves(processes) for processes in (1, 2)),
        *(_alone(layout) for layout in layouts),
        *(_ddp(processes, layout) for processes in _SHARES for layout in layouts),
        _fit(2),
        _keeping(_alone(layouts[0]), train_alone_keeping),
        _keeping(_ddp(2, layouts[0]), train_ddp_keeping),
    )


def layouts_of(workload: str) -> tuple[Layout, ...]:
    """The memory formats that are worth a try, the faster one first."""
    return ("channels_last", "contiguous") if workload in _CONVOLUTIONAL else ("contiguous",)


def _replicas(shares: int) -> Contender:
    return Contender(
        name=f"lockstep-{shares}",
        settings=f"MirroredStrategy, CPU split in {shares}, one process, memory_format auto, run + optimizer.step",
        launcher=SpawnedBody(body=run_replicas),
        shares=shares,
        layout="auto",
        role="ours",
    )


def _halves(processes: int) -> Contender:
    how = "nothing else running" if processes == 1 else "two such processes at once, which do not communicate"
    return Contender(
        name="half alone" if processes == 1 else "halves together",
        settings=f"one replica of ours on half of each batch with cores // 2 threads, {how}; a yardstick",
        launcher=SpawnedBody(body=train_one_share),
        shares=2,
        processes=processes,
        layout="auto",
        role="yardstick",
    )


def _fit(shares: int) -> Contender:
    return Contender(
        name=f"lockstep-{shares} fit",
        settings=f"as lockstep-{shares}, through Model.fit, whose loss is the epoch's running mean; a check",
        launcher=SpawnedBody(body=fit_model),
        shares=shares,
        layout="auto",
        role="check",
    )


def _alone(layout: Layout) -> Contender:
    return Contender(
        name=f"single{_SUFFIX[layout]}",
        settings=f"one process, a hand-written loop, all cores as intra-op threads, {layout}",
        launcher=SpawnedBody(body=train_alone),
        shares=1,
        layout=layout,
    )


def _ddp(processes: int, layout: Layout) -> Contender:
    return Contender(
        name=f"ddp-{processes}{_SUFFIX[layout]}",
        settings=f"{processes} processes, {SETTINGS}, cores // processes threads each (at least 1), {layout}",
        launcher=SpawnedBody(body=train_ddp),
        shares=processes,
        processes=processes,
        layout=layout,
    )


def _keeping(rival: Contender, body: Body) -> Contender:
    return replace(
        rival,
        name=f"{rival.name} keeping",
        settings=f"as {rival.name}, with the allocator settings that our strategies make; a check",
        launcher=SpawnedBody(body=body),
        role="check",
    )


Invitation = Literal["no", "also", "only"]
"""Whether peers take part: not, beside the roster, or without it."""


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """Who takes part."""

    contenders: dict[str, list[Contender]]  # of each workload, by its name
    absences: tuple[Absence, ...]  # contenders that were asked for and cannot run
    versions: dict[str, str]  # of each peer that takes part, by its name


def line_up(
    workloads: Sequence[str], *, peers: Invitation, places: Places, only: Sequence[str] | None = None
) -> Lineup:
    """Chooses the contenders of each workload.

    Args:
        workloads: their names.
        peers: whether peers take part.
        places: where the peers are.
        only: names of the contenders that are wanted; None for all.

    Raises:
        ConfigError: nobody of that name takes part in a workload.
    """
    missing = {} if peers == "no" else _missing(places)
    asked = {name: _select(_invited(name, peers, places), only) for name in workloads}
    return Lineup(
        contenders={
            name: [contender for contender in contenders if contender.peer not in missing]
            for name, contenders in asked.items()
        },
        absences=tuple(
            Absence(workload=name, contender=contender.name, reason=missing[contender.peer])
            for name, contenders in asked.items()
            for contender in contenders
            if contender.peer in missing
        ),
        versions=_versions(asked, missing, places),
    )


def _invited(workload: str, peers: Invitation, places: Places) -> list[Contender]:
    ours = roster(workload)
    others = [] if peers == "no" else [one for peer in PEERS for one in contenders_of(peer, workload, places)]
    counted = [] if peers == "only" else [contender for contender in ours if contender.counted]
    checks = [] if peers == "only" else [contender for contender in ours if not contender.counted]
    return [*counted, *others, *checks]


def _missing(places: Places) -> dict[str, str]:
    """Why a peer cannot take part, by its name."""
    return {peer.name: reason for peer in PEERS if (reason := _reason(peer, places))}


def _reason(peer: Peer, places: Places) -> str:
    try:
        versions_of(peer, places)
    except ConfigError as error:
        return str(error)
    return ""


def _versions(asked: dict[str, list[Contender]], missing: dict[str, str], places: Places) -> dict[str, str]:
    taking_part = {contender.peer for contenders in asked.values() for contender in contenders} - missing.keys()
    return {peer.name: versions_of(peer, places) for peer in PEERS if peer.name in taking_part}


def _select(contenders: Sequence[Contender], only: Sequence[str] | None) -> list[Contender]:
    """Each workload has the contenders that it knows, and at least one of them."""
    known = [each for each in only or () if each in [contender.name for contender in contenders]]
    return select_contenders(contenders, known or only)


_HEADINGS = (
    "contender", "step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "first step s", "peak MB", "RSS MB",
    "PSS MB", "loss", "parameters",
)  # fmt: skip


_LEGEND = """\
## What the columns mean

- contenders called a check ran in the first round only and take no part in the targets; yardsticks do a part of the
  work, to tell what the hardware gives.
- step ms, p10, p90: of the timed steps of all rounds together.
- ratio: to the best rival, the one whose ratio is 1: the median step over the rival's of the same round, and of these
  the median. Below 1 is faster than the best rival. Rivals are the hand-written loops on torch alone; ours, the peers
  and the yardsticks are held against the best of them.
- CPU ms: CPU time of a step, of all threads and processes together. With all cores busy it is the step times the cores;
  it counts waiting in a spinning barrier, and hardly feels what else the machine does.
- exchange + update: from the moment when the last replica arrives at `optimizer.step` to the moment when all have left
  it, as part of the step.
- first step: from the start of the processes to the end of the slowest one's first step, imports and model included.
- peak, RSS, PSS: memory of all processes of the contender together, read inside the last step. Peak is the sum of their
  resident peaks (VmHWM) and is what the targets compare: so much the machine must have, even where a process gives some
  back at the end of its step. RSS counts pages that processes share in each of them, PSS shares them out.
- loss: of the last step. Every contender trains the same model on the same batches, so these agree but for dropout, the
  batch statistics of each replica or process and, on TensorFlow and JAX, the random weights that they begin with.
- parameters: that the optimizer changes.
- step times: the quotient of the two contenders' median steps of the same round; the median, the lowest and the highest
  over the rounds. The first is the parallel efficiency, the second what the shared memory and caches of this machine
  leave of it for any program, the third how much of that ours has.
- On torch all use Adam with `fused=True` and the same modules and loss functions; the workloads in Keras layers are in
  `benchmarks/peers/keras_models.py`. All in float32."""


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """A workload and what its contenders did."""

    workload: Workload  # the work
    figures: tuple[Figures, ...]  # one a contender
    efficiencies: tuple[Efficiency, ...] = ()  # of ours, where it was measured
    absences: tuple[Absence, ...] = ()  # who was to take part and did not

    @property
    def targets(self) -> list[Target]:
        """The targets that it speaks about."""
        return targets_of(self.workload.name, self.figures, self.efficiencies)


def render(conditions: Conditions, results: Sequence[WorkloadResult]) -> str:
    """The whole report."""
    parts = [head(conditions, "CPU benchmark"), *(_section(result) for result in results), _LEGEND]
    return "\n\n".join(parts) + "\n"


def _section(result: WorkloadResult) -> str:
    rows = [*(_row(row) for row in result.figures), *(_empty_row(absence) for absence in result.absences)]
    blocks = [
        f"## {result.workload.title}",
        markdown_table(_HEADINGS, rows),
        _parameter_warning(result.figures),
        target_table(result.targets),
        _efficiency_table(result.efficiencies),
        "\n".join(
            [*settings_list(result.figures), *(f"- {one.contender}: not run: {one.reason}" for one in result.absences)]
        ),
    ]
    return "\n\n".join(block for block in blocks if block)


def _efficiency_table(efficiencies: Sequence[Efficiency]) -> str:
    rows = [[one.text, f"{one.value:.3f}", f"{min(one.rounds):.3f}", f"{max(one.rounds):.3f}"] for one in efficiencies]
    return markdown_table(("step times", "median round", "lowest", "highest"), rows) if rows else ""


def _parameter_warning(figures: Sequence[Figures]) -> str:
    """Says who trains another number of parameters than the first contender; empty where all agree."""
    expected = figures[0].trained if figures else 0
    others = [f"{row.contender.name} {row.trained:,}" for row in figures if row.trained != expected]
    if not others:
        return ""
    return f"**Not the same model**: {figures[0].contender.name} trains {expected:,} parameters, {', '.join(others)}."


def _row(row: Figures) -> list[str]:
    memory = row.memory
    share = "" if row.exchange_share is None else f"{row.exchange_share:.1%}"
    return [
        row.contender.name,
        *(f"{value:.1f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)),
        f"{row.ratio:.3f}",
        f"{row.cpu_ms:.0f}",
        share,
        f"{row.first_step_s:.2f}",
        *(f"{value:.0f}" for value in (memory.peak_mb, memory.rss_mb, memory.pss_mb)),
        f"{row.loss:.4f}",
        f"{row.trained:,}",
    ]


def _empty_row(absence: Absence) -> list[str]:
    return [absence.contender, "not run", *[""] * (len(_HEADINGS) - 2)]


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=USUAL_WORKLOADS)
    parser.add_argument(
        "--peers",
        choices=("no", "also", "only"),
        default="no",
        help="whether Accelerate, Fabric, TensorFlow and JAX take part; make bench SUITE=peers installs them",
    )
    parser.add_argument("--environments", type=Path, default=Path(".venv-peers"), help="folder of their environments")
    parser.add_argument("--programs", type=Path, default=Path("benchmarks/peers"), help="folder of their programs")


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures the contenders of each workload in turn."""
    places = Places(environments=asked.environments, programs=asked.programs)
    lineup = line_up(asked.workload, peers=asked.peers, places=places, only=asked.only)
    trials = [
        trial for name in asked.workload for trial in trials_of(WORKLOADS[name], lineup.contenders[name], conditions)
    ]
    rounds = run_rounds(trials, rounds=conditions.rounds, progress=log_progress)
    results = [_result(name, lineup, rounds) for name in asked.workload]
    return report_of(replace(conditions, peers=tuple(lineup.versions.items())), results, rounds.samples)


def _result(name: str, lineup: Lineup, rounds: Rounds) -> WorkloadResult:
    absences = [absence for absence in (*lineup.absences, *rounds.absences) if absence.workload == name]
    away = {absence.contender for absence in absences}
    present = [contender for contender in lineup.contenders[name] if contender.name not in away]
    return WorkloadResult(
        workload=WORKLOADS[name],
        figures=tuple(figures_of(present, rounds.samples, name)),
        efficiencies=tuple(efficiencies_of(present, rounds.samples, name)),
        absences=tuple(absences),
    )


def report_of(conditions: Conditions, results: Sequence[WorkloadResult], samples: Sequence[Sample]) -> Report:
    """The report of a run."""
    targets = [
        {"workload": result.workload.name, **asdict(target), "reached": target.reached}
        for result in results
        for target in result.targets
    ]
    record = {
        "conditions": asdict(conditions),
        "targets": targets,
        "efficiencies": [
            {"workload": result.workload.name, **asdict(each)} for result in results for each in result.efficiencies
        ],
        "absences": [asdict(absence) for result in results for absence in result.absences],
        "samples": [asdict(sample) for sample in samples],
    }
    return Report(
        name=f"cpu-{conditions.machine.cores}", date=conditions.date, text=render(conditions, results), record=record
    )
