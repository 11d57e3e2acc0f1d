"""Who takes part in the benchmark of many workers: ours and DDP, on one host, and on two that a slowed link joins.

one host:   workers-2                   ddp-2    ddp-2 channels_last    ddp-2 channels_last keeping
two hosts:  hosts-2x2  hosts-2x2 bf16   ddp-2x2  ddp-2x2 channels_last keeping, and its fp16
            each once more where the link is not slowed: what is left is the part that does not wait for it
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.contenders.ddp import SETTINGS, train_ddp
from benchmarks.contenders.kept_memory import train_ddp_keeping
from benchmarks.contenders.workers_run import run_worker
from benchmarks.hosts import Link
from benchmarks.roster import layouts_of
from benchmarks.spawned import Body, SpawnedBody
from benchmarks.trial import Contender, Layout
from lockstep.collectives.options import Compression

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
