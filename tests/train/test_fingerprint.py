"""The fingerprint of a Model, which fit prints as its last line: equal on all layouts of two replicas."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object
from lockstep.errors import ClusterError, CollectiveError
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def batches() -> Batches:
    random = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 6, generator=random), torch.randint(0, 4, (24,), generator=random)
    return list(zip(x.split(8), y.split(8), strict=True))


def compiled(strategy: ls.Strategy) -> Model:
    torch.manual_seed(0)
    # 780 weights in the first layer: ZeRO-1 cuts it.
    net = nn.Sequential(nn.Linear(6, 130), nn.BatchNorm1d(130), nn.Dropout(0.5), nn.Linear(130, 4))
    with strategy.scope():
        model = Model(net)
    model.compile(lambda parameters: torch.optim.AdamW(parameters, 0.01), nn.CrossEntropyLoss())
    return model


def trained(strategy: ls.Strategy) -> dict[str, Any]:
    """The fingerprints before and after, and what is printed if the chief alone is asked to print."""
    model, printed = compiled(strategy), io.StringIO()
    before = ls.fingerprint(model)
    with contextlib.redirect_stdout(printed):
        model.fit(batches(), epochs=2, verbose=2 if strategy.workers.is_chief else 0)
    return {"before": before, "after": ls.fingerprint(model), "printed": printed.getvalue().splitlines()[-1:]}


def job() -> dict[str, list[Any]]:
    """What each of two workers has found, by the kind of strategy."""
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], ls.Strategy]] = {
        "ZeRO-1": lambda: ls.ParallelStrategy(data=2, seed=1, device="cpu:0", shard_optimizer=True),
        "FSDP": lambda: ls.ParallelStrategy(data=2, seed=1, device="cpu:0", shard_parameters=True),
        "mirrored": lambda: ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=1),
    }
    found = {}
    for kind, make in makers.items():
        with contextlib.closing(make()) as strategy:
            found[kind] = all_gather_object(strategy.workers.processes, kind, trained(strategy))
    return {**found, "alone": [alone()]}


def alone() -> str:
    """The chief alone asks for a fingerprint; the error that all get."""
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=1)
    model = compiled(strategy)
    ask = partial(ls.fingerprint, model) if strategy.workers.is_chief else partial(strategy.reduce, "sum", 1.0)
    with contextlib.closing(strategy), pytest.raises((CollectiveError, ClusterError)) as caught:
        ask()
    return str(caught.value)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ls.launch(job, workers=2, timeout_s=150)


@pytest.mark.workers
@pytest.mark.parametrize("kind", ["mirrored", "ZeRO-1", "FSDP"])
def test_two_workers_have_that_of_two_devices_also_with_sharded_state(
    kind: str, found: dict[str, list[Any]], make_strategy: Callable[..., MirroredStrategy]
):
    expected = trained(make_strategy(2, seed=1))
    chief, other = found[kind]
    assert chief == expected
    assert chief["printed"] == [f"fingerprint {chief['after']}"]
    assert other == {**chief, "printed": []}


@pytest.mark.workers
def test_a_worker_that_does_not_ask_for_it_is_named(found: dict[str, list[Any]]):
    (message,) = found["alone"]
    assert "worker 1" in message
    assert "fingerprint" in message


def test_one_fit_and_one_in_two_parts_have_the_same(make_strategy: Callable[..., MirroredStrategy]):
    whole, parts = compiled(make_strategy(2, seed=1)), compiled(make_strategy(2, seed=1))
    whole.fit(batches(), epochs=2, verbose=0)
    parts.fit(batches(), epochs=1, verbose=0)
    between = ls.fingerprint(parts)
    parts.fit(batches(), epochs=2, initial_epoch=1, verbose=0)
    assert ls.fingerprint(parts) == ls.fingerprint(whole) != between


def test_the_position_in_the_data_is_in_it(make_strategy: Callable[..., MirroredStrategy]):
    model = compiled(make_strategy(2))
    seen: list[str] = []
    note = ls.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(ls.fingerprint(model)))
    for group in model.optimizer.param_groups:  # type: ignore[union-attr]
        group["lr"] = 0.0
    model.fit([(x * 0, y) for x, y in batches()], callbacks=[note], verbose=0)
    assert len(set(seen)) == 3


def test_a_model_has_one_before_it_is_compiled(make_strategy: Callable[..., MirroredStrategy]):
    with make_strategy(2).scope():
        torch.manual_seed(0)
        one, other = Model(nn.Linear(2, 1)), Model(nn.Linear(2, 1))
    assert ls.fingerprint(one) != ls.fingerprint(other)


def test_a_state_without_a_fingerprint_does_not_cost_the_training(
    make_strategy: Callable[..., MirroredStrategy], capsys: pytest.CaptureFixture[str]
):
    model = compiled(make_strategy(2))
    model.optimizer.param_groups[0]["mine"] = object()  # type: ignore[union-attr]
    history = model.fit(batches(), verbose=2)
    assert len(history.history["loss"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no fingerprint")
    assert "mine" in last
