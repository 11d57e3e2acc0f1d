"""Who takes part: ours on 1, 2 and 4 replicas, the original in one process, and under torchrun in two."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.programs import Program
from benchmarks.spawned import SpawnedBody
from benchmarks.trial import Contender

_PROCESSES = 2
_SHARES = (1, 2, 4)


def contenders(cores: int) -> tuple[Contender, ...]:
    """All contenders, ours first.

    Args:
        cores: of the machine. Where each process of torchrun has more than one, it runs once as torchrun starts it,
            which is with one thread, and once told to take its share.
    """
    share = max(1, cores // _PROCESSES)
    return (
        *(_ours(replicas) for replicas in _SHARES),
        _alone(),
        _under_torchrun(None),
        *((_under_torchrun(share),) if share > 1 else ()),
    )


def _ours(replicas: int) -> Contender:
    from benchmarks.trainer.steps import train_ours

    devices = "the whole CPU, as a user has it without a split" if replicas == 1 else f"CPU split in {replicas}"
    return Contender(
        name=f"lockstep-{replicas}",
        settings=f"lockstep.integrations.transformers.Trainer, MirroredStrategy, {devices}, one process",
        launcher=SpawnedBody(body=train_ours),
        shares=replicas,
        role="ours",
    )


def _alone() -> Contender:
    from benchmarks.trainer.steps import train_alone

    return Contender(
        name="trainer",
        settings="transformers.Trainer, one process, all cores as intra-op threads",
        launcher=SpawnedBody(body=train_alone),
        shares=1,
    )


def _under_torchrun(threads: int | None) -> Contender:
    """Threads are those that it is told to use; None leaves it to torchrun, which takes one."""
    told = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    how = "one thread each, as torchrun starts it" if threads is None else f"OMP_NUM_THREADS={threads}"
    return Contender(
        name=f"torchrun-{_PROCESSES}" + ("" if threads is None else " told"),
        settings=f"transformers.Trainer under torchrun, {_PROCESSES} processes, DDP over gloo, {how}",
        launcher=Program(
            python=Path(sys.executable),
            words=("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_PROCESSES}"),
            script=Path(__file__).with_name("under_torchrun.py"),
            variables=told,
            takes_batches=False,
        ),
        shares=_PROCESSES,
        processes=_PROCESSES,
    )
