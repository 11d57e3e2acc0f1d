"""The evaluator beside a job of several workers: its strategies are of its own process alone, and wait for nobody."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from torch import nn

import lockstep as ls


@pytest.fixture(params=["listed", "left out"])
def _evaluator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody answers at these addresses: they are of a network that is nobody's.
    cluster = {"chief": ["192.0.2.1:20000"], "worker": ["192.0.2.2:20000"]}
    if request.param == "listed":
        cluster["evaluator"] = ["192.0.2.3:20000"]
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}))


@pytest.mark.usefixtures("_evaluator")
@pytest.mark.parametrize("make", [ls.MultiWorkerMirroredStrategy, ls.MirroredStrategy])
def test_it_evaluates_by_itself(make: type[ls.Strategy], split_cpu):
    data = [(torch.ones(3, 2), torch.tensor([[1.0], [2.0], [6.0]]))]

    with closing(make([device.name for device in split_cpu(2)], seed=0)) as strategy, strategy.scope():
        module = nn.Linear(2, 1)
        nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
        model = ls.Model(module)
        model.compile(loss=lambda outputs, targets: (outputs - targets).abs().squeeze(1))

        assert (strategy.workers.size, strategy.workers.is_chief, strategy.num_replicas_in_sync) == (1, True, 2)
        assert model.evaluate(data, verbose=0) == {"loss": pytest.approx(3.0)}
        assert strategy.reduce("sum", 1) == 2
