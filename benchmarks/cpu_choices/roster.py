"""The choices that are compared, the engine's own first."""

from __future__ import annotations

from benchmarks.contenders.lockstep_run import run_replicas
from benchmarks.cpu_choices.bodies import run_in_bf16, run_pinned, run_with_all_cores
from benchmarks.spawned import Body, SpawnedBody
from benchmarks.trial import Contender

_SHARES = (2, 4)


def choices() -> tuple[Contender, ...]:
    """All of them; the first is what the others' ratios are to."""
    return tuple(
        _choice(f"{name}, {shares}", f"{shares} replicas, {settings}", body, shares)
        for shares in _SHARES
        for name, settings, body in (
            ("as it is", "each with its share of the cores as intra-op threads, float32", run_replicas),
            ("pinned", "each replica's thread kept on cores of its own", run_pinned),
            ("all cores each", "each with as many intra-op threads as there are cores", run_with_all_cores),
            ("bf16", "the forward pass under autocast in bfloat16", run_in_bf16),
        )
    )


def _choice(name: str, settings: str, body: Body, shares: int) -> Contender:
    return Contender(
        name=name, settings=settings, launcher=SpawnedBody(body=body), shares=shares, layout="auto", role="ours"
    )
