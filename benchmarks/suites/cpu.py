"""Suites ``cpu`` and ``peers``: replicas of one process beside hand-written loops, and beside other frameworks.

contenders -> rounds -> figures, comparisons -> report; a framework without an environment is absent, with the reason
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks.frameworks import PEERS, peers_of, versions_of
from benchmarks.harness import Absence, Rounds, run_rounds, trials_of
from benchmarks.loops import SETTINGS, layouts_of, run_replicas, suffix_of, train_alone, train_ddp, train_one_shard
from benchmarks.processes import SpawnedBody
from benchmarks.report import Report, Section, columns, report_of
from benchmarks.results import Comparison, Figures, compare_steps, fastest, figures_of, with_role
from benchmarks.trial import Conditions, Contender, Layout, Pace, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS
from lockstep.errors import ConfigError

PACE = Pace(warm_up=3, steps=10, rounds=3)
_REPLICAS = (2, 4)


def contenders_for(workload: str) -> tuple[Contender, ...]:
    """The contenders of a workload: ours, references and baselines.

    Baselines try both memory formats where there are convolutions, and the faster one counts.
    """
    layouts = layouts_of(workload)
    return (
        *map(_ours, _REPLICAS),
        _half("half alone", "nothing else running", 1),
        _half("halves together", "two such processes at once, which do not communicate", 2),
        *map(_alone, layouts),
        *(_ddp(processes, layout) for processes in _REPLICAS for layout in layouts),
    )


def _ours(replicas: int) -> Contender:
    return Contender(
        name=f"lockstep-{replicas}",
        settings=f"MirroredStrategy, CPU split in {replicas}, one process, run + optimizer.step, memory_format auto",
        launcher=SpawnedBody(body=run_replicas),
        replicas=replicas,
        layout="auto",
        role="ours",
    )


def _half(name: str, how: str, processes: int) -> Contender:
    return Contender(
        name=name,
        settings=f"one replica of ours on half of each batch with cores // 2 threads, {how}; a reference",
        launcher=SpawnedBody(body=train_one_shard),
        replicas=2,
        processes=processes,
        layout="auto",
        role="reference",
    )


def _alone(layout: Layout) -> Contender:
    return Contender(
        name=f"single{suffix_of(layout)}",
        settings=f"one process, a hand-written loop, all cores as intra-op threads, {layout}",
        launcher=SpawnedBody(body=train_alone),
        replicas=1,
        layout=layout,
    )


def _ddp(processes: int, layout: Layout) -> Contender:
    return Contender(
        name=f"ddp-{processes}{suffix_of(layout)}",
        settings=f"{processes} processes, {SETTINGS}, cores // processes threads each (at least 1), {layout}",
        launcher=SpawnedBody(body=train_ddp),
        replicas=processes,
        processes=processes,
        layout=layout,
    )


def found_versions(peers: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The versions of the frameworks whose environments are there, and for the others the reasons; by name."""
    versions, missing = {}, {}
    for peer in peers:
        try:
            versions[peer] = versions_of(peer)
        except ConfigError as error:
            missing[peer] = str(error)
    return versions, missing


def chosen_contenders(
    every: Mapping[str, Sequence[Contender]], only: Sequence[str] | None
) -> dict[str, list[Contender]]:
    """By workload, its contenders whose names are in ``only``; all for None. Raises a ConfigError for unknown names."""
    names = {each.name for each in select_contenders([each for of_one in every.values() for each in of_one], only)}
    return {name: [each for each in of_one if each.name in names] for name, of_one in every.items()}


def sections_of(
    wanted: Mapping[str, Sequence[Contender]],
    rounds: Rounds,
    missing: Mapping[str, str],
    section: Callable[[str, Sequence[Figures], Sequence[Absence]], Section],
) -> list[Section]:
    """The section of each workload, given why frameworks are missing, by name."""
    sections = []
    for name, of_one in wanted.items():
        absences = [
            Absence(workload=name, contender=each.name, reason=missing[each.peer])
            for each in of_one
            if each.peer in missing
        ]
        absences += [absence for absence in rounds.absences if absence.workload == name]
        sections.append(section(name, figures_of(of_one, rounds.samples, name), absences))
    return sections


MAX_STEP_RATIO: Mapping[str, float] = {"mobilenetv2": 0.75, "mlm": 1.0}
"""Our step time over the best baseline's."""
MAX_PEER_RATIO: Mapping[str, float] = {"mobilenetv2": 0.8, "mlm": 1.0}
"""Our step time at 2 replicas over the best peer's at 2."""
MIN_EFFICIENCY = 0.95
"""The step time of one replica on half of the batch and of the cores, over ours with both halves."""
MAX_MEMORY_RATIO = 0.65
"""Our resident memory at 4 replicas over that of DDP's four processes together."""
MAX_FIRST_STEP_RATIO = 1.0
"""Our time from process start to the end of the first step over DDP's at as many processes."""
MAX_EXCHANGE_SHARE: Mapping[str, float] = {"mobilenetv2": 0.03}
"""Exchange and update over the whole step."""


def comparisons_of(workload: str, figures: Sequence[Figures]) -> list[Comparison]:
    """Ours against baselines, peers and references; what needs a contender that did not run is left out."""
    ours, baselines, peers = (with_role(figures, role) for role in ("ours", "baseline", "peer"))
    ours_2, peers_2 = ([row for row in rows if row.contender.replicas == 2] for rows in (ours, peers))
    found = []
    if workload in MAX_STEP_RATIO:
        found += _against_best(ours, baselines, "best baseline", MAX_STEP_RATIO[workload])
        found += _against_best(ours_2, peers_2, "best peer at 2 replicas", MAX_PEER_RATIO[workload])
    found += _efficiencies(figures)
    for row in ours:
        name, replicas = row.contender.name, row.contender.replicas
        ddp = fastest(each for each in baselines if each.contender.processes == replicas > 1)
        if ddp is not None:
            other, start = ddp.contender.name, row.first_step_s / ddp.first_step_s
            if replicas == 4:
                text, memory = f"peak resident memory, {name} / {other}", row.memory.peak_mb / ddp.memory.peak_mb
                found.append(Comparison(text=text, values=(memory,), limit=MAX_MEMORY_RATIO))
            text = f"start to first step, {name} / {other}"
            found.append(Comparison(text=text, values=(start,), limit=MAX_FIRST_STEP_RATIO))
        if workload in MAX_EXCHANGE_SHARE and row.exchange_share is not None:
            text, limit = f"exchange and update / step, {name}", MAX_EXCHANGE_SHARE[workload]
            found.append(Comparison(text=text, values=(row.exchange_share,), limit=limit))
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
    """Ours against one half alone, that against the hardware's ceiling, and the ceiling against ours."""
    references = with_role(figures, "reference")
    alone = next((row for row in references if row.contender.processes == 1), None)
    together = next((row for row in references if row.contender.processes > 1), None)
    ours = next((row for row in with_role(figures, "ours") if row.contender.replicas == 2), None)
    if alone is None or together is None or ours is None:
        return []
    name = f"{alone.contender.name} / {ours.contender.name}"
    return [
        compare_steps(alone, ours, MIN_EFFICIENCY, text=f"parallel efficiency, {name}", bound="at least"),
        compare_steps(alone, together),
        compare_steps(together, ours),
    ]


COLUMNS = columns(
    "step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "first step s", "peak MB", "PSS MB", "loss",
    "parameters",
)  # fmt: skip
_MEANINGS = {
    "comparisons": "of step times: the quotient of the two contenders' median steps of the same round. Of the three "
    "with the halves the first is the parallel efficiency, the second what the shared memory and caches of this "
    "machine leave of it for any program, the third how much of that ours has.",
    "models": "on torch all use Adam with `fused=True` and the same modules and loss functions; the workloads in Keras "
    "layers are in `benchmarks/peers/keras_models.py`. All in float32.",
}


def section_of(name: str, figures: Sequence[Figures], absences: Sequence[Absence] = ()) -> Section:
    """The table of a workload. A remark names who trains another number of parameters than the first contender."""
    others = [f"{row.contender.name} {row.trained:,}" for row in figures if row.trained != figures[0].trained]
    remark = ""
    if others:
        first = f"{figures[0].contender.name} trains {figures[0].trained:,} parameters"
        remark = f"**Not the same model**: {first}, {', '.join(others)}."
    return Section(
        workload=name,
        title=WORKLOADS[name].title,
        columns=COLUMNS,
        figures=figures,
        comparisons=comparisons_of(name, figures),
        absences=absences,
        remark=remark,
    )


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), default=USUAL_WORKLOADS)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures the contenders of each workload in turn; as the suite ``peers`` with the other frameworks."""
    others = peers_of if asked.suite == "peers" else lambda workload: []
    wanted = chosen_contenders({name: [*contenders_for(name), *others(name)] for name in asked.workload}, asked.only)
    peers = {each.peer for of_workload in wanted.values() for each in of_workload}
    versions, missing = found_versions([peer for peer in PEERS if peer in peers])
    trials = [
        trial
        for name, of_one in wanted.items()
        for trial in trials_of(WORKLOADS[name], [each for each in of_one if each.peer not in missing], conditions)
    ]
    rounds = run_rounds(trials, rounds=conditions.rounds)
    sections = sections_of(wanted, rounds, missing, section_of)
    conditions = replace(conditions, facts=tuple(versions.items()))
    name = f"cpu-{conditions.machine.cores}"
    return report_of(name, conditions, "CPU benchmark", sections, rounds.samples, meanings=_MEANINGS)
