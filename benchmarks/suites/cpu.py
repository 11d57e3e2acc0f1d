"""Who takes part in this run: our roster, the peers whose environments are there, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.frameworks import PEERS, Peer, Places, contenders_of, versions_of
from benchmarks.harness import Absence
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
from benchmarks.report import Conditions
from benchmarks.trial import Contender, Layout, Trial, Workload
from lockstep.errors import ConfigError

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
    """Who takes part.

    Args:
        contenders: of each workload, by its name.
        absences: contenders that were asked for and cannot run.
        versions: of each peer that takes part, by its name.
    """

    contenders: dict[str, list[Contender]]
    absences: tuple[Absence, ...]
    versions: dict[str, str]


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
    asked = {name: _chosen(_invited(name, peers, places), only) for name in workloads}
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


def _chosen(contenders: Sequence[Contender], only: Sequence[str] | None) -> list[Contender]:
    chosen = [contender for contender in contenders if not only or contender.name in only]
    if not chosen:
        known = ", ".join(repr(contender.name) for contender in contenders) or "none"
        raise ConfigError(f"--only {' '.join(only or ())} names no contender; choose from {known}")
    return chosen


def picked(contenders: Sequence[Contender], only: Sequence[str] | None) -> list[Contender]:
    """Those that were asked for by name, in their own order; None for all.

    Raises:
        ConfigError: a name is nobody's.
    """
    names = [contender.name for contender in contenders]
    unknown = [name for name in only or () if name not in names]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)} names no contender; choose from {', '.join(map(repr, names))}")
    return [contender for contender in contenders if not only or contender.name in only]


def trials_of(workload: Workload, contenders: Iterable[Contender], conditions: Conditions) -> list[Trial]:
    """One trial of each on all cores, in their order."""
    return [
        Trial(
            workload=workload,
            contender=contender,
            warm_up=conditions.warm_up,
            steps=conditions.steps,
            cores=conditions.machine.cores,
        )
        for contender in contenders
    ]
