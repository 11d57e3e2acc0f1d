"""Who takes part in which workload, at which settings."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.contenders.ddp import SETTINGS, train_ddp
from benchmarks.contenders.kept_memory import train_alone_keeping, train_ddp_keeping
from benchmarks.contenders.lockstep_fit import fit_model
from benchmarks.contenders.lockstep_run import run_replicas
from benchmarks.contenders.one_share import train_one_share
from benchmarks.contenders.plain import train_alone
from benchmarks.spawned import Body, SpawnedBody
from benchmarks.trial import Contender, Layout

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
