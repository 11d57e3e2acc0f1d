"""Suite ``cpu``: replicas of one process beside hand-written loops, and other frameworks where they are installed.

contenders, frameworks -> line_up: who takes part, and why others do not -> rounds -> figures, comparisons -> report
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.frameworks import PEERS, Places, contenders_of, versions_of
from benchmarks.harness import Absence, Rounds, log_progress, run_rounds, trials_of
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
from benchmarks.report import Report, Section, columns, report_of
from benchmarks.results import Comparison, Figures, compare_steps, fastest, figures_of, with_role
from benchmarks.trial import Conditions, Contender, Layout, Pace, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS
from lockstep.errors import ConfigError

PACE = Pace(warm_up=3, steps=10, rounds=3)
_SHARES = (2, 4)


def contenders_for(workload: str) -> tuple[Contender, ...]:
    """The contenders of a workload: ours, references, baselines, and last the checks.

    Baselines try both memory formats where there are convolutions, and the faster one counts.
    """
    layouts = layouts_of(workload)
    return (
        *(
            _ours(f"lockstep-{n}", f"MirroredStrategy, CPU split in {n}, one process, run + optimizer.step", n)
            for n in _SHARES
        ),
        _half("half alone", "nothing else running", 1),
        _half("halves together", "two such processes at once, which do not communicate", 2),
        *(_alone(layout) for layout in layouts),
        *(_ddp(processes, layout) for processes in _SHARES for layout in layouts),
        replace(
            _ours("lockstep-2 fit", "as lockstep-2, through Model.fit, whose loss is the epoch's running mean", 2),
            launcher=SpawnedBody(body=fit_model),
            role="check",
        ),
        _keeping(_alone(layouts[0]), train_alone_keeping),
        _keeping(_ddp(2, layouts[0]), train_ddp_keeping),
    )


def layouts_of(workload: str) -> tuple[Layout, ...]:
    """The memory formats that are worth a try, the faster one first."""
    return ("channels_last", "contiguous") if workload == "mobilenetv2" else ("contiguous",)


def suffix_of(layout: Layout) -> str:
    """What a contender's name says of a memory format."""
    return " channels_last" if layout == "channels_last" else ""


def _ours(name: str, settings: str, shares: int) -> Contender:
    settings = f"{settings}, memory_format auto"
    launcher = SpawnedBody(body=run_replicas)
    return Contender(name=name, settings=settings, launcher=launcher, shares=shares, layout="auto", role="ours")


def _half(name: str, how: str, processes: int) -> Contender:
    return Contender(
        name=name,
        settings=f"one replica of ours on half of each batch with cores // 2 threads, {how}; a reference",
        launcher=SpawnedBody(body=train_one_share),
        shares=2,
        processes=processes,
        layout="auto",
        role="reference",
    )


def _alone(layout: Layout) -> Contender:
    return Contender(
        name=f"single{suffix_of(layout)}",
        settings=f"one process, a hand-written loop, all cores as intra-op threads, {layout}",
        launcher=SpawnedBody(body=train_alone),
        shares=1,
        layout=layout,
    )


def _ddp(processes: int, layout: Layout) -> Contender:
    return Contender(
        name=f"ddp-{processes}{suffix_of(layout)}",
        settings=f"{processes} processes, {SETTINGS}, cores // processes threads each (at least 1), {layout}",
        launcher=SpawnedBody(body=train_ddp),
        shares=processes,
        processes=processes,
        layout=layout,
    )


def _keeping(baseline: Contender, body: Body) -> Contender:
    return replace(
        baseline,
        name=f"{baseline.name} keeping",
        settings=f"as {baseline.name}, with the allocator settings that our strategies make; a check",
        launcher=SpawnedBody(body=body),
        role="check",
    )


Invitation = Literal["no", "also", "only"]
"""Whether peers take part: not, beside our own contenders, or without them."""


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """Who takes part."""

    contenders: dict[str, list[Contender]]  # of each workload, by its name
    absences: tuple[Absence, ...]  # contenders that were asked for and cannot run
    versions: dict[str, str]  # of each peer that takes part, by its name


def line_up(
    workloads: Sequence[str], *, peers: Invitation, places: Places, only: Sequence[str] | None = None
) -> Lineup:
    """Chooses the contenders of each workload; raises ConfigError if ``only`` names nobody there."""
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for peer in PEERS if peers != "no" else ():
        try:
            versions[peer.name] = versions_of(peer, places)
        except ConfigError as error:
            missing[peer.name] = str(error)
    contenders: dict[str, list[Contender]] = {}
    absences: list[Absence] = []
    for workload in workloads:
        asked = _select(_invited(workload, peers, places), only)
        contenders[workload] = [each for each in asked if each.peer not in missing]
        absences += [
            Absence(workload=workload, contender=each.name, reason=missing[each.peer])
            for each in asked
            if each.peer in missing
        ]
    present = {each.peer for chosen in contenders.values() for each in chosen}
    return Lineup(
        contenders=contenders,
        absences=tuple(absences),
        versions={name: text for name, text in versions.items() if name in present},
    )


def _invited(workload: str, peers: Invitation, places: Places) -> list[Contender]:
    ours = [] if peers == "only" else contenders_for(workload)
    others = [] if peers == "no" else [one for peer in PEERS for one in contenders_of(peer, workload, places)]
    return [*(each for each in ours if each.counted), *others, *(each for each in ours if not each.counted)]


def _select(contenders: Sequence[Contender], only: Sequence[str] | None) -> list[Contender]:
    """Of the names in ``only`` those that this workload has, which must be at least one."""
    known = [each for each in only or () if each in [contender.name for contender in contenders]]
    return select_contenders(contenders, known or only)


MAX_STEP_RATIO: Mapping[str, float] = {"mobilenetv2": 0.75, "mlm": 1.0}
"""Our step time over the best baseline's."""
MAX_PEER_RATIO: Mapping[str, float] = {"mobilenetv2": 0.8, "mlm": 1.0}
"""Our step time at 2 replicas over the best peer's at 2."""
MIN_EFFICIENCY = 0.95
"""The step time of one share of the work on one share of the cores, over ours with the shares of all."""
MAX_MEMORY_RATIO = 0.65
"""Our resident memory at 4 replicas over that of DDP's four processes together."""
MAX_FIRST_STEP_RATIO = 1.0
"""Our time from process start to the end of the first step over DDP's at as many processes."""
MAX_EXCHANGE_SHARE: Mapping[str, float] = {"mobilenetv2": 0.03}
"""Exchange and update over the whole step."""


def comparisons_of(workload: str, figures: Sequence[Figures]) -> list[Comparison]:
    """Ours against baselines, peers and references; what needs a contender that did not run is left out."""
    ours, baselines, peers = (with_role(figures, role) for role in ("ours", "baseline", "peer"))
    ours_2, peers_2 = ([row for row in rows if row.contender.shares == 2] for rows in (ours, peers))
    found = []
    if workload in MAX_STEP_RATIO:
        found += _against_best(ours, baselines, "best baseline", MAX_STEP_RATIO[workload])
        found += _against_best(ours_2, peers_2, "best peer at 2 replicas", MAX_PEER_RATIO[workload])
    found += _efficiencies(figures)
    for row in ours:
        name, shares = row.contender.name, row.contender.shares
        ddp = fastest(each for each in baselines if each.contender.processes == shares > 1)
        if ddp is not None and shares == 4:
            found.append(
                Comparison(
                    text=f"peak resident memory, {name} / {ddp.contender.name}",
                    limit=MAX_MEMORY_RATIO,
                    values=(row.memory.peak_mb / ddp.memory.peak_mb,),
                )
            )
        if ddp is not None:
            found.append(
                Comparison(
                    text=f"start to first step, {name} / {ddp.contender.name}",
                    limit=MAX_FIRST_STEP_RATIO,
                    values=(row.first_step_s / ddp.first_step_s,),
                )
            )
        if workload in MAX_EXCHANGE_SHARE and row.exchange_share is not None:
            limit, values = MAX_EXCHANGE_SHARE[workload], (row.exchange_share,)
            found.append(Comparison(text=f"exchange and update / step, {name}", limit=limit, values=values))
    return found


def _against_best(ours: Sequence[Figures], others: Sequence[Figures], who: str, limit: float) -> list[Comparison]:
    """Others as they come, and others with channels_last: ours chooses the memory format by itself."""
    best = fastest(ours)
    tuned = fastest(row for row in others if row.contender.layout == "channels_last")
    plain = fastest(row for row in others if row.contender.layout != "channels_last")
    return [
        compare_steps(best, other, limit, text=f"step time, {best.contender.name} / {name}")
        for name, other in ((who, plain), (f"{who} with channels_last", tuned))
        if best is not None and other is not None
    ]


def _efficiencies(figures: Sequence[Figures]) -> list[Comparison]:
    """Ours against one share alone, that against the hardware's ceiling, and the ceiling against ours."""
    references = with_role(figures, "reference")
    alone = next((row for row in references if row.contender.processes == 1), None)
    together = next((row for row in references if row.contender.processes > 1), None)
    ours = next((row for row in with_role(figures, "ours") if row.contender.shares == 2), None)
    if alone is None or together is None or ours is None:
        return []
    name = f"{alone.contender.name} / {ours.contender.name}"
    return [
        compare_steps(alone, ours, MIN_EFFICIENCY, text=f"parallel efficiency, {name}", bound="at least"),
        compare_steps(alone, together),
        compare_steps(together, ours),
    ]


COLUMNS = columns(
    "step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "first step s", "peak MB", "RSS MB", "PSS MB",
    "loss", "parameters",
)  # fmt: skip
_MEANINGS = {
    "checks": "contenders that ran in the first round only; no comparison depends on them. References do a part of the "
    "work, to measure what the hardware gives.",
    "comparisons": "of step times: the quotient of the two contenders' median steps of the same round; the median, the "
    "lowest and the highest over the rounds. Of the three with the halves the first is the parallel efficiency, the "
    "second what the shared memory and caches of this machine leave of it for any program, the third how much of that "
    "ours has.",
    "models": "on torch all use Adam with `fused=True` and the same modules and loss functions; the workloads in Keras "
    "layers are in `benchmarks/peers/keras_models.py`. All in float32.",
}


def section_of(name: str, figures: Sequence[Figures], absences: Sequence[Absence] = ()) -> Section:
    """The table of a workload."""
    return Section(
        workload=name,
        title=WORKLOADS[name].title,
        columns=COLUMNS,
        figures=figures,
        comparisons=comparisons_of(name, figures),
        absences=absences,
        remark=_parameter_warning(figures),
    )


def _parameter_warning(figures: Sequence[Figures]) -> str:
    """Says who trains another number of parameters than the first contender; empty where all agree."""
    others = [f"{row.contender.name} {row.trained:,}" for row in figures if row.trained != figures[0].trained]
    if not others:
        return ""
    first = figures[0]
    return f"**Not the same model**: {first.contender.name} trains {first.trained:,} parameters, {', '.join(others)}."


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
    conditions = replace(conditions, peers=tuple(lineup.versions.items()))
    sections = [_section_of_run(name, lineup, rounds) for name in asked.workload]
    return report_of("cpu", conditions, "CPU benchmark", sections, rounds.samples, meanings=_MEANINGS)


def _section_of_run(name: str, lineup: Lineup, rounds: Rounds) -> Section:
    absences = [absence for absence in (*lineup.absences, *rounds.absences) if absence.workload == name]
    away = {absence.contender for absence in absences}
    present = [contender for contender in lineup.contenders[name] if contender.name not in away]
    return section_of(name, figures_of(present, rounds.samples, name), absences)
