"""Who takes part, in the order of importance: when the time runs out, the last ones are left out."""

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
from benchmarks.processes import SpawnedBody
from benchmarks.suites.cpu import layouts_of, suffix_of
from benchmarks.trial import Contender, Layout, Workload

ONE, FOUR, ONE_COMPILED, DDP = "lockstep-1", "lockstep-4", "lockstep-1 compiled", "ddp-4"
EAGER, COMPILED = "eager", "compiled"
SHARES = 4
_PRELOADED = "benchmarks.gpu.contenders"
_EXPECTED_S, _COMPILING_S = 9.0, 25.0  # guessed, not measured, for an H100 and 16 cores; they only decide who begins

_PEER_BODIES: dict[str, tuple[str, Callable[..., None]]] = {
    "accelerate": ("Hugging Face Accelerate", peers.train_accelerate),
    "fabric": ("Lightning Fabric", peers.train_fabric),
    "trainer": ("transformers' Trainer", peers.train_trainer),
}


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contender on the GPU."""

    contender: Contender
    expected_s: float  # of one trial, before anything is known
    absent: str = ""  # why it cannot take part; empty if it can


def entrants(workload: Workload, device: DeviceType, pace: Pace) -> tuple[Entrant, ...]:
    """The contenders of a workload: ours and the hand-written loops first, then the peers."""
    setting = Setting(device=device, precision=precision_of(workload.name), pace=pace)
    first, *others = layouts_of(workload.name.partition("-")[0])

    def entrant(
        name: str, settings: str, body: Callable[..., None], *, absent: str = "", shares: int = 1, **parts: Any
    ) -> Entrant:
        compiled = COMPILED in name
        options = {"compiled": compiled} if body in (train_plain, train_ours) else {}
        launcher = SpawnedBody(body=partial(body, setting=setting, **options), preloaded=_PRELOADED)
        return Entrant(
            contender=Contender(name=name, settings=settings, launcher=launcher, shares=shares, **parts),
            expected_s=_COMPILING_S if compiled else _EXPECTED_S,
            absent=absent,
        )

    def ours(name: str, where: str, shares: int = 1) -> Entrant:
        settings = f"MirroredStrategy on {where}, one process, memory_format auto"
        return entrant(name, settings, train_ours, shares=shares, role="ours", layout="auto")

    def plain(name: str, how: str, layout: Layout) -> Entrant:
        settings = f"a hand-written loop, {how}, {layout}, fused Adam, input copied one step ahead"
        return entrant(name + suffix_of(layout), settings, train_plain, layout=layout)

    by_compiler = f"torch.compile of forward pass and loss, mode {COMPILE_MODE}"
    quarter = f"{SHARES} logical devices, each with 1/{SHARES} of {MEMORY_SHARE:.0%} of the GPU's memory"
    ddp = "DistributedDataParallel, processes that share the GPU, gloo, gradient_as_bucket_view, static_graph, no"
    return (
        ours(ONE, "the undivided GPU, Model.fit"),
        plain(EAGER, "eager", first),
        ours(FOUR, f"{quarter}, Model.fit", SHARES),
        entrant(DDP, f"{ddp} buffer broadcast, {first}", train_ddp, shares=SHARES, processes=SHARES, layout=first),
        plain(COMPILED, by_compiler, first),
        ours(ONE_COMPILED, "the undivided GPU, Model.fit, compile_module=True"),
        *(plain(EAGER, "eager", layout) for layout in others),
        *(
            entrant(
                name,
                f"{title}, one process, {first}, fused Adam",
                body,
                absent=peers.missing(name),
                role="peer",
                peer=name,
                layout=first,
            )
            for name, (title, body) in _PEER_BODIES.items()
        ),
    )
