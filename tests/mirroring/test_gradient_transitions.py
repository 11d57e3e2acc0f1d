"""Every transition of the table in ``mirroring/gradients/state.py``, with a strategy of two replicas.

A pass adds the same gradient each time, since the loss is linear in the weights. So the size of the next update says
how many passes it counts, whatever states they went through.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.mirroring.gradients.state import GradientHome
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.watcher import Totals
from lockstep.strategies.mirrored import MirroredStrategy

STATES = ("NONE", "REPLICAS", "PARTIAL_SUM", "FINAL_SUM", "SHOWN", "LOST")
TABLE = """
from            | NONE          | REPLICAS      | PARTIAL_SUM   | FINAL_SUM         | SHOWN         | LOST
no_sync_pass    | REPLICAS 1    | REPLICAS 2    | PARTIAL_SUM 2 | FINAL_SUM refused | REPLICAS 2    | LOST refused
run_with_pass   | PARTIAL_SUM 1 | PARTIAL_SUM 2 | PARTIAL_SUM 2 | FINAL_SUM refused | PARTIAL_SUM 2 | LOST refused
run_that_fails  | NONE 0        | LOST refused  | LOST refused  | LOST refused      | LOST refused  | LOST refused
run_without     | NONE 0        | PARTIAL_SUM 1 | PARTIAL_SUM 1 | FINAL_SUM 1       | SHOWN 1       | LOST refused
read            | SHOWN 0       | SHOWN 1       | SHOWN 1       | SHOWN 1           | SHOWN 1       | refused
double          | SHOWN 0       | SHOWN 2       | SHOWN 2       | SHOWN 2           | SHOWN 2       | refused
assign_none     | NONE 0        | NONE 0        | PARTIAL_SUM 0 | FINAL_SUM 0       | NONE 0        | LOST refused
sum_gradients   | FINAL_SUM 0   | FINAL_SUM 1   | FINAL_SUM 1   | FINAL_SUM 1       | FINAL_SUM 1   | refused
step            | NONE 0        | REPLICAS 1    | REPLICAS 1    | REPLICAS 1        | REPLICAS 1    | refused
update          | NONE 0        | NONE 0        | NONE 0        | NONE 0            | NONE 0        | refused
zero_grad       | NONE 0        | NONE 0        | NONE 0        | NONE 0            | NONE 0        | NONE 0
add_param_group | NONE 0        | REPLICAS 1    | PARTIAL_SUM 1 | FINAL_SUM 1       | PARTIAL_SUM 1 | LOST refused
"""
"""Where the gradients are afterwards, and how many passes the next update counts. ``refused``: a UsageError."""


def transitions() -> list[tuple[str, str, str]]:
    _, *rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
    return [(state, event, cell) for event, *cells in rows for state, cell in zip(STATES, cells, strict=True)]


class Failure(Exception):
    """Of a run."""


class Training:
    """One weight and what a program does with its gradient: a method for each event of the table."""

    def __init__(self, strategy: MirroredStrategy) -> None:
        self.strategy = strategy
        self.net = nn.Linear(2, 1, bias=False)
        self.mirrored = strategy.mirror(self.net)
        self.optimizer: MirroredOptimizer = strategy.mirror(torch.optim.SGD(self.net.parameters(), 1.0))
        self.rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])

    @property
    def state(self) -> str:
        gradients = self.optimizer.gradients
        if all(gradients.has_sums):
            return "SHOWN"
        is_empty = all(copy.grad is None for copies in self.optimizer.parameters for copy in copies)
        return "NONE" if is_empty and gradients.home is GradientHome.REPLICAS else gradients.home.name

    def bring_to(self, state: str) -> None:
        events: dict[str, list[Callable[[], None]]] = {
            "NONE": [],
            "REPLICAS": [self.no_sync_pass],
            "PARTIAL_SUM": [self.run_with_pass],
            "FINAL_SUM": [self.no_sync_pass, self.sum_gradients],
            "SHOWN": [self.no_sync_pass, self.read],
            "LOST": [self.run_with_pass, self.run_that_fails],
        }
        for event in events[state]:
            event()
        assert self.state == state

    def counted_passes(self, step: Callable[[], None]) -> float:
        """How many passes an update counts."""
        before = self.net.weight.detach().clone()
        step()
        (passes,) = set(((before - self.net.weight.detach())[0] / self.rows.sum(0)).round(decimals=4).tolist())
        return passes

    def _run(self, step: Callable[[Tensor], Any]) -> None:
        for shards in self.strategy.distribute_dataset([self.rows]):
            self.strategy.run(step, (shards,))

    def _backward(self, shard: Tensor) -> None:
        self.mirrored(shard).sum().backward()

    def no_sync_pass(self) -> None:
        with self.mirrored.no_sync():
            self._run(self._backward)

    def run_with_pass(self) -> None:
        self._run(self._backward)

    def run_that_fails(self) -> None:
        def step(shard: Tensor) -> None:
            self._backward(shard)
            raise Failure

        with pytest.raises(Failure):
            self._run(step)

    def run_without(self) -> None:
        self._run(lambda shard: self.mirrored(shard.detach()).detach())
        self._run(lambda shard: self.mirrored(shard.detach()).detach())

    def read(self) -> None:
        self._run(lambda _: self.mirrored.weight.grad)

    def double(self) -> None:
        def step(_: Tensor) -> None:
            if (gradient := self.mirrored.weight.grad) is not None:
                gradient.mul_(2.0)

        self._run(step)

    def assign_none(self) -> None:
        def step(_: Tensor) -> None:
            self.mirrored.weight.grad = None

        self._run(step)

    def sum_gradients(self) -> None:
        self.optimizer.sum_gradients()

    def step(self) -> None:
        self._run(lambda _: self.optimizer.step())

    def update(self) -> None:
        def step(_: Tensor) -> None:
            context: ReplicaContext | None = get_replica_context()
            assert context is not None
            self.optimizer.update(context, totals=Totals(0.0, 1.0))

        self._run(step)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def add_param_group(self) -> None:
        other = nn.Linear(2, 1)
        self.others = self.strategy.mirror(other)
        self.optimizer.add_param_group({"params": other.parameters()})


@pytest.fixture
def training(make_strategy: MakeStrategy) -> Training:
    return Training(make_strategy(2))


@pytest.mark.parametrize(("layout", "where"), [("shared", "outside"), ("own", "in replicas")], indirect=["layout"])
@pytest.mark.parametrize(("state", "event", "cell"), transitions())
def test_every_transition(state: str, event: str, cell: str, where: str, layout: str, make_strategy: MakeStrategy):
    training = Training(make_strategy(2))
    training.bring_to(state)
    home, *passes = cell.split()

    if home == "refused":
        with pytest.raises(UsageError, match="they are lost"):
            getattr(training, event)()
        assert training.state == state
        return
    getattr(training, event)()
    assert training.state == home

    step = training.step if where == "in replicas" else training.optimizer.step
    if passes == ["refused"]:
        with pytest.raises(UsageError, match="they are lost" if home == "LOST" else "added after sum_gradients"):
            step()
    else:
        assert training.counted_passes(step) == float(passes[0])


@pytest.mark.parametrize("state", ["REPLICAS", "PARTIAL_SUM", "FINAL_SUM", "SHOWN"])
def test_an_update_of_fit_counts_each_gradient_once(state: str, training: Training):
    training.bring_to(state)
    assert training.counted_passes(training.update) == 1 / 2  # divided by the counts of both replicas


@pytest.mark.parametrize("steps_inside", [True, False])
@pytest.mark.parametrize("replica", [0, 1])
def test_a_pass_of_one_replica_after_a_read_is_added(replica: int, steps_inside: bool, training: Training):
    def step(shard: Tensor) -> None:
        training._backward(shard)
        assert training.mirrored.weight.grad is not None
        if here().local_replica == replica:
            training.mirrored(training.rows).sum().backward()
        if steps_inside:
            training.optimizer.step()

    def update() -> None:
        training._run(step)
        if not steps_inside:
            assert training.state == "PARTIAL_SUM"
            training.optimizer.step()

    assert training.counted_passes(update) == 2.0


class ByHand(Training):
    """The same, where an optimizer holds the weight only from ``mirror_optimizer`` on."""

    def __init__(self, strategy: MirroredStrategy) -> None:
        super().__init__(strategy)
        del self.optimizer  # nothing else holds it

    def mirror_optimizer(self) -> None:
        self.optimizer = self.strategy.mirror(torch.optim.SGD(self.net.parameters(), 1.0))


@pytest.mark.parametrize(
    ("events", "state"), [(["run_with_pass"], "PARTIAL_SUM"), (["no_sync_pass", "read"], "PARTIAL_SUM")]
)
def test_an_optimizer_goes_on_with_the_gradients_of_an_update_by_hand(
    events: list[str], state: str, make_strategy: MakeStrategy
):
    training = ByHand(make_strategy(2))
    for event in events:
        getattr(training, event)()
    training.mirror_optimizer()
    assert training.state == state
    assert training.counted_passes(training.step) == 1.0
    training.optimizer.zero_grad()
    training.run_with_pass()
    assert training.state == "PARTIAL_SUM"

    training = ByHand(training.strategy)
    for event in events:
        getattr(training, event)()
    training.mirror_optimizer()
    training.run_that_fails()
    assert training.state == "LOST"


@pytest.mark.parametrize("sums_by_hand", [True, False])
def test_an_optimizer_that_is_dropped_is_gone_at_once(sums_by_hand: bool, training: Training):
    gone = ref(training.optimizer)
    gc.disable()
    try:
        training.run_with_pass()
        training.step()
        del training.optimizer
        assert gone() is None
    finally:
        gc.enable()
    if not sums_by_hand:
        training.optimizer = training.strategy.mirror(torch.optim.SGD(training.net.parameters(), 1.0))
    training.net.zero_grad()
    training.run_with_pass()
    assert training.net.weight.grad[0].tolist() == training.rows.sum(0).tolist()


def test_gradients_of_several_modules_without_an_optimizer_are_summed_in_the_first_run(make_strategy: MakeStrategy):
    training = ByHand(make_strategy(2))
    other = nn.Linear(2, 1, bias=False)
    mirrored = training.strategy.mirror(other)
    training._run(lambda shard: (training.mirrored(shard) + mirrored(shard)).sum().backward())
    for net in (training.net, other):
        assert net.weight.grad[0].tolist() == training.rows.sum(0).tolist()
