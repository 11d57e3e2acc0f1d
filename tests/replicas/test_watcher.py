"""A watcher sees what a strategy does: devices, runs, and each replica's gradients before they are summed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.errors import UsageError
from lockstep.replicas.watcher import (
    PROCEED,
    Differentiation,
    Run,
    TorchCalled,
    Totals,
    Watcher,
    ambient_watchers,
    watching,
)

if TYPE_CHECKING:
    from lockstep.config import LogicalDevice
    from lockstep.strategies.mirrored import MirroredStrategy

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Ears(Watcher):
    """Keeps all that it hears."""

    def __init__(self) -> None:
        self.devices: list[tuple[str, ...]] = []
        self.views: list[Any] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
        self.after: dict[int, torch.Tensor] = {}

    def devices_chosen(self, devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
        self.devices.append(tuple(device.name for device in devices))
        return devices[:2]

    def run_begins(self, run: Run) -> None:
        self.views.append(run.views)

    def update_begins(self, replica: int, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        (weight,) = parameters
        assert weight.grad is not None
        self.before[replica] = (
            weight.grad.clone(),
            weight.detach().clone(),
            float(totals.count),
        )

    def update_ended(self, replica: int, parameters: Sequence[nn.Parameter]) -> None:
        self.after[replica] = parameters[0].detach().clone()


def train(strategy: MirroredStrategy) -> nn.Module:
    torch.manual_seed(0)
    module = strategy.mirror(nn.Linear(3, 1, bias=False))
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step(x: torch.Tensor, *, scale: float) -> None:
        (module(x).sum() * scale).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset([X]):
        strategy.run(step, (batch,), {"scale": 0.5})
    return module


def test_a_watcher_hears_devices_runs_and_gradients(make_strategy: Callable[..., MirroredStrategy]):
    ears = Ears()
    with watching(ears):
        module = train(make_strategy(3))

    assert ears.devices == [("cpu:0", "cpu:1", "cpu:2")]
    (views,) = ears.views
    assert [len(args[0]) for args, _ in views] == [3, 2]  # the two devices that were returned, not the three chosen
    assert [named for _, named in views] == [{"scale": 0.5}] * 2
    torch.testing.assert_close(ears.before[0][0], 0.5 * X[:3].sum(0, keepdim=True))
    torch.testing.assert_close(ears.before[1][0], 0.5 * X[3:].sum(0, keepdim=True))
    assert [ears.before[replica][2] for replica in range(2)] == [1.0, 0.0]
    stepped = ears.before[0][1] - 0.1 * 0.5 * X.sum(0, keepdim=True)
    for replica in range(2):
        torch.testing.assert_close(ears.after[replica], stepped)
    torch.testing.assert_close(next(module.parameters()).detach(), stepped)


def test_outside_the_block_nobody_hears(make_strategy: Callable[..., MirroredStrategy]):
    ears = Ears()
    with watching(ears):
        assert ambient_watchers.get() == (ears,)
    train(make_strategy(2))

    assert ambient_watchers.get() == ()
    assert (ears.devices, ears.views, ears.before) == ([], [], {})


def test_what_a_watcher_raises_ends_the_run_and_leaves_the_strategy_usable(
    make_strategy: Callable[..., MirroredStrategy],
):
    class EnoughSeen(BaseException):
        pass

    class Impatient(Watcher):
        def update_begins(self, replica: int, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
            raise EnoughSeen

    strategy = make_strategy(2)
    with watching(Impatient()), pytest.raises(EnoughSeen):
        train(strategy)

    assert train(strategy) is not None


def test_the_default_moments_change_nothing(make_strategy: Callable[..., MirroredStrategy]):
    with watching(Watcher()):
        observed = train(make_strategy(2))
    unobserved = train(make_strategy(2))

    assert torch.equal(next(observed.parameters()), next(unobserved.parameters()))


def test_the_modules_of_a_strategy_are_listed_in_order(make_strategy: Callable[..., MirroredStrategy]):
    strategy = make_strategy(2)
    first, second = strategy.mirror(nn.Linear(1, 1)), strategy.mirror(nn.Linear(2, 2))

    assert isinstance(strategy, ls.Strategy)
    assert strategy.mirrored_modules == (first, second)


class Diary(Watcher):
    """Writes down the moments of replica 0 and of the caller, and fails in one of them."""

    def __init__(self, failing: str = "") -> None:
        self.moments: list[str] = []
        self.error: BaseException | None = None
        self._failing = failing

    def note(self, moment: str, replica: int = 0) -> None:
        if replica == 0:
            self.moments.append(moment)
        if moment == self._failing:
            raise EnoughSeen(moment)

    def run_begins(self, run: Run) -> None:
        self.note("run_begins")

    @contextmanager
    def in_replica(self, replica: int) -> Iterator[None]:
        self.note("in_replica", replica)
        yield
        self.note("left", replica)

    def torch_called(self, replica: int) -> TorchCalled | None:
        def look(func: Any, args: Any, kwargs: Any) -> Any:
            if func in (torch.Tensor.sum, torch.Tensor.neg):
                self.note(func.__name__, replica)
            return PROCEED

        return look

    def differentiates(self, replica: int, differentiation: Differentiation) -> None:
        (root,) = differentiation.roots
        assert root.grad_fn is not None
        assert (differentiation.inputs is None) is not differentiation.returns
        self.note("differentiates", replica)

    def collective_called(self, replica: int, name: str, value: Any) -> None:
        self.note(name, replica)

    def update_begins(self, replica: int, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        self.note("update_begins", replica)

    def update_ended(self, replica: int, parameters: Sequence[nn.Parameter]) -> None:
        self.note("update_ended", replica)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        self.error = error
        self.note("run_ended")


class EnoughSeen(BaseException):
    pass


MOMENTS = [
    *("run_begins", "in_replica", "differentiates", "sum", "all_reduce", "differentiates"),
    *("update_begins", "update_ended", "left", "run_ended"),
]


def watched_step(strategy: MirroredStrategy) -> Callable[[torch.Tensor], None]:
    module = strategy.mirror(nn.Linear(3, 1))
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step(x: torch.Tensor) -> None:
        context = ls.get_replica_context()
        assert context is not None
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(leaf.mean(), leaf)
        loss = module(x).sum()
        context.all_reduce("sum", loss.detach())
        loss.backward()
        optimizer.step()
        context.merge_call(lambda strategy: X.neg())  # for all replicas, and so no call of a replica

    return step


@pytest.mark.parametrize("replicas", [1, 2])
def test_each_moment_comes_when_it_should(make_strategy: Callable[..., MirroredStrategy], replicas: int):
    diary, strategy = Diary(), make_strategy(replicas)
    step = watched_step(strategy)

    for _ in range(3):  # beside the looks at a first run, and without
        with strategy.watched_by(diary):
            strategy.run(step, (X,))
    strategy.run(step, (X,))

    assert diary.moments == MOMENTS * 3
    assert diary.error is None


@pytest.mark.parametrize("moment", dict.fromkeys(MOMENTS))
def test_what_a_moment_raises_ends_the_run(make_strategy: Callable[..., MirroredStrategy], moment: str):
    strategy, outer = make_strategy(2), Diary()
    step = watched_step(strategy)

    with strategy.watched_by(outer), strategy.watched_by(Diary(moment)), pytest.raises(EnoughSeen, match=moment):
        strategy.run(step, (X,))
    assert isinstance(outer.error, EnoughSeen)
    assert outer.moments[-1] == "run_ended"

    strategy.run(step, (X,))


def test_the_first_answer_to_a_torch_call_stands(make_strategy: Callable[..., MirroredStrategy]):
    class Answering(Watcher):
        def __init__(self, answer: int) -> None:
            self.answer = answer

        def torch_called(self, replica: int) -> TorchCalled | None:
            return lambda func, *_: torch.tensor(self.answer) if func is torch.Tensor.sum else PROCEED

    strategy = make_strategy(1)
    with strategy.watched_by(Answering(7)), strategy.watched_by(Answering(8)):
        assert strategy.run(lambda: int(X.sum())) == 7


def cost_of_a_run(strategy: MirroredStrategy) -> int:
    """The engine's calls in the caller's thread and the frames in a replica's, of a later run of a step."""
    calls, engine = [0], str(Path(ls.__file__).parent)

    def count(frame: FrameType, event: str, _: object) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(engine)

    def step() -> int:
        return len(list(walk_stack(None)))

    for _ in range(2):
        strategy.run(step)
    sys.setprofile(count)
    try:
        frames = strategy.run(step)
    finally:
        sys.setprofile(None)
    return calls[0] + int(frames)


def test_a_run_that_nobody_looks_at_costs_nothing(make_strategy: Callable[..., MirroredStrategy]):
    class Indifferent(Diary):
        def looks_at(self, run: Run) -> Sequence[Watcher]:
            return ()

    strategy, watcher = make_strategy(2), Indifferent()
    strategy.watchers.clear()
    plain = cost_of_a_run(strategy)

    with strategy.watched_by(watcher):
        assert cost_of_a_run(strategy) == plain
    assert watcher.moments == []
    with strategy.watched_by(Diary()):
        assert cost_of_a_run(strategy) > plain


def test_a_watcher_is_switched_off_alone(make_strategy: Callable[..., MirroredStrategy]):
    strategy, calls = make_strategy(2), [0]
    module = nn.Linear(3, 1)
    mirrored = strategy.mirror(module)

    def counts(x: torch.Tensor) -> None:
        calls[0] += 1

    def penalises(x: torch.Tensor) -> None:
        module.weight.square().sum().backward()

    strategy.watchers.remove(strategy.check_choice)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(counts, (X,))
        with pytest.raises(UsageError, match="plain Linear"):  # by the guard, which looks on
            strategy.run(penalises, (X,))

    strategy.watchers.append(strategy.check_choice)
    with pytest.warns(UserWarning, match="changes 'calls'"):
        strategy.run(counts, (X,))
    assert mirrored.module is module
