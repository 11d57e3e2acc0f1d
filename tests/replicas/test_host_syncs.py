"""HostSyncs: what would make the host wait for a device, by operator and line, in replicas too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.replicas.device.host_syncs import HostSyncs
from lockstep.strategies.mirrored import MirroredStrategy

ROWS = torch.tensor([1.0, -2.0, 3.0])


@pytest.mark.parametrize(
    ("operator", "act"),
    [
        ("aten._local_scalar_dense", lambda x: x.sum().item()),
        ("aten._local_scalar_dense", lambda x: bool(x.sum() > 0)),
        ("aten.index", lambda x: x[x > 0]),
        ("aten.masked_select", lambda x: x.masked_select(x > 0)),
        ("aten.nonzero", lambda x: x.nonzero()),
        ("aten._unique2", lambda x: x.unique()),
        ("aten.bincount", lambda x: x.abs().long().bincount()),
        ("aten.equal", lambda x: torch.equal(x, x.clone())),
        ("aten.repeat_interleave", lambda x: x.repeat_interleave(x.abs().long())),
        ("aten._to_copy", lambda x: x.to("meta").to("cpu")),
        ("aten.index_put_", lambda x: x.clone().index_put_((x > 0,), torch.ones(2))),
    ],
)
def test_what_waits_is_told_with_operator_and_line(operator: str, act: Callable[[Tensor], Any]):
    with HostSyncs() as reads:
        try:
            act(ROWS)
        except NotImplementedError:  # a copy from "meta" has nothing to copy
            assert operator == "aten._to_copy"
    ((told, line),) = reads.syncs[:1]
    assert told == operator
    assert line == f"test_host_syncs.py:{act.__code__.co_firstlineno} in <lambda>"


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.clone().masked_fill_(x > 0, 1.0),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x.clone().index_put_((x > 0,), torch.ones(())),
        lambda x: x.repeat_interleave(torch.tensor([1, 1, 1]), output_size=3),
        lambda x: torch.stack([x.sum(), x.mean()]).tolist(),
        lambda x: x.to("meta", non_blocking=True),
    ],
)
def test_what_does_not_wait_is_not_told(act: Callable[[Tensor], Any]):
    with HostSyncs() as reads:
        act(ROWS)
    assert reads.syncs == []


def test_replicas_are_watched_and_only_in_the_block(make_strategy: Callable[..., MirroredStrategy]):
    strategy = make_strategy(2)

    def step() -> float:
        weight = torch.ones((), requires_grad=True)
        weight.register_hook(lambda gradient: gradient * gradient.item())  # in the backward pass
        (weight * 2.0).backward()
        return float(weight.detach())

    strategy.run(step)
    with HostSyncs() as reads:
        strategy.run(step)
    strategy.run(step)

    line = step.__code__.co_firstlineno
    lines = [f"test_host_syncs.py:{line + each}" for each in (2, 2, 4, 4)]
    assert sorted(where.split()[0] for _, where in reads.syncs) == lines
