"""Who takes part, in the order of importance: where the time runs out, the last ones go without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu import peers
from benchmarks.gpu.loops import (
    COMPILE_MODE,
    MEMORY_SHARE,
    DeviceType,
    Pace,
    Setting,
    train_ddp,
    train_ours,
    train_plain,
)
from benchmarks.gpu.workloads import precision_of
from benchmarks.processes import Body, SpawnedBody
from benchmarks.suites.cpu import layouts_of
from benchmarks.trial import Contender, Layout, Workload

ONE, FOUR, ONE_COMPILED, DDP = "lockstep-1", "lockstep-4", "lockstep-1 compiled", "ddp-4"
EAGER, COMPILED = "eager", "compiled"
SHARES = 4
_PRELOADED = "benchmarks.gpu.contenders"
_EXPECTED_S, _COMPILING_S = 9.0, 25.0  # thought, not measured: of an H100 and 16 cores; they only decide who begins

_PEER_BODIES: dict[str, tuple[str, Callable[..., None]]] = {
    "accelerate": ("Hugging Face Accelerate", peers.train_accelerate),
    "fabric": ("Lightning Fabric", peers.train_fabric),
    "trainer": ("transformers' Trainer", peers.train_trainer),
}


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contender on the GPU, and how long it is expected to take before anything is known."""

    contender: Contender  # who
    expected_s: float  # of one trial, from start to end
    absent: str = ""  # why it cannot take part; empty if it can


def entrants(workload: Workload, device: DeviceType, pace: Pace) -> tuple[Entrant, ...]:
    """The contenders of a workload: ours and the hand-written loops first, then the peers."""
    setting = Setting(device=device, precision=precision_of(workload), pace=pace)
    first, *others = layouts_of(workload.name.partition("-")[0])
    return (
        _ours(setting),
        _plain(setting, first, compiled=False),
        _four(setting),
        _ddp(setting, first),
        _plain(setting, first, compiled=True),
        _ours(setting, compiled=True),
        *(_plain(setting, layout, compiled=False) for layout in others),
        *(_peer(setting, name, first) for name in _PEER_BODIES),
    )


def _ours(setting: Setting, *, compiled: bool = False) -> Entrant:
    told = ", compile_module=True" if compiled else ""
    return _entrant(
        ONE_COMPILED if compiled else ONE,
        f"MirroredStrategy on the undivided GPU, Model.fit{told}, one process, memory_format auto",
        partial(train_ours, setting=setting, compiled=compiled),
        compiles=compiled,
        role="ours",
        layout="auto",
    )


def _four(setting: Setting) -> Entrant:
    device = f"{SHARES} logical devices, each with 1/{SHARES} of {MEMORY_SHARE:.0%} of the GPU's memory"
    return _entrant(
        FOUR,
        f"MirroredStrategy on {device}, Model.fit, one process, memory_format auto",
        partial(train_ours, setting=setting),
        role="ours",
        shares=SHARES,
        layout="auto",
    )


def _plain(setting: Setting, layout: Layout, *, compiled: bool) -> Entrant:
    how = f"torch.compile of forward pass and loss, mode {COMPILE_MODE}" if compiled else "eager"
    suffix = " channels_last" if layout == "channels_last" else ""
    return _entrant(
        (COMPILED if compiled else EAGER) + suffix,
        f"a hand-written loop, {how}, {layout}, fused Adam, input copied one step ahead",
        partial(train_plain, setting=setting, compiled=compiled),
        compiles=compiled,
        layout=layout,
    )


def _ddp(setting: Setting, layout: Layout) -> Entrant:
    settings = "DistributedDataParallel, processes that share the GPU, gloo, gradient_as_bucket_view, static_graph"
    return _entrant(
        DDP,
        f"{settings}, no buffer broadcast, {layout}",
        partial(train_ddp, setting=setting),
        shares=SHARES,
        processes=SHARES,
        layout=layout,
    )


def _peer(setting: Setting, name: str, layout: Layout) -> Entrant:
    title, body = _PEER_BODIES[name]
    return _entrant(
        name,
        f"{title}, one process, {layout}, fused Adam",
        partial(body, setting=setting),
        absent=peers.missing(name),
        role="peer",
        peer=name,
        layout=layout,
    )


def _entrant(
    name: str, settings: str, body: Body, *, compiles: bool = False, absent: str = "", shares: int = 1, **parts: Any
) -> Entrant:
    launcher = SpawnedBody(body=body, preloaded=_PRELOADED)
    return Entrant(
        contender=Contender(name=name, settings=settings, launcher=launcher, shares=shares, **parts),
        expected_s=_COMPILING_S if compiles else _EXPECTED_S,
        absent=absent,
    )
