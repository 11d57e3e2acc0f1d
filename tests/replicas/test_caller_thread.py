"""A replica alone runs in its caller's thread where its numbers are the same there, and in its own thread elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from tests.conftest import MakeStrategy
from tests.replicas.test_function_mode import DRAWS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lockstep as ls
from lockstep.errors import UsageError
from lockstep.replicas import caller_thread
from lockstep.replicas.cpu.linear import may_suit, onednn_is_faster
from lockstep.replicas.watcher import Watcher, watching

_COLOUR: ContextVar[str] = ContextVar("colour", default="none")


@pytest.fixture(autouse=True)
def _beside_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that libraries have left in this process after other tests' work count as those that draw nothing."""
    names = tuple(thread.name for thread in threading.enumerate() if thread is not threading.current_thread())
    monkeypatch.setattr(caller_thread, "_DRAW_NOTHING", caller_thread._DRAW_NOTHING + names)


@contextmanager
def another_thread() -> Iterator[None]:
    """A block beside a thread that could draw from torch's default generator."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="reader")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def other_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


NOT_HERE: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "another thread": another_thread,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a function mode": _Mode,
    "inference mode": torch.inference_mode,
    "saved tensors hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "threads": other_number_of_threads,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "watcher": lambda: watching(Watcher()),
}


def runs_here(strategy: ls.Strategy) -> bool:
    """Of a step with one number as its batch: whether it ran in the calling thread."""
    number = strategy.run(lambda _: threading.get_ident(), (torch.ones(1, 1),))
    return bool(number == threading.get_ident())


def test_a_replica_alone_runs_in_the_caller_s_thread(make_strategy: MakeStrategy):
    strategy = make_strategy(1)
    assert runs_here(strategy)
    with torch.no_grad():
        assert runs_here(strategy)
        assert strategy.run(torch.is_grad_enabled) is False
    assert not isinstance(make_strategy(2).run(threading.get_ident), int)


@pytest.mark.parametrize("name", NOT_HERE)
def test_it_runs_in_its_own_where_the_caller_s_state_asks_for_it(make_strategy: MakeStrategy, name: str):
    strategy = make_strategy(1)
    with NOT_HERE[name]():
        assert not runs_here(strategy)
    assert runs_here(strategy)


@pytest.mark.parametrize("name", DRAWS)
def test_its_random_numbers_are_those_of_its_own_thread(make_strategy: MakeStrategy, name: str):
    draws: list[list[Tensor]] = []
    for beside in (nullcontext, another_thread):
        strategy = make_strategy(1, seed=3)
        with beside():
            state = torch.get_rng_state()
            draws.append([strategy.run(DRAWS[name]) for _ in range(2)])
            assert torch.equal(torch.get_rng_state(), state)  # the caller's numbers are nobody else's
    assert all(map(torch.equal, *draws))
    assert not torch.equal(*draws[0])


def test_the_two_threads_go_on_in_one_sequence(make_strategy: MakeStrategy):
    strategy, other = make_strategy(1, seed=3), make_strategy(1, seed=3)
    here = [strategy.run(torch.rand, (4,)) for _ in range(4)]
    mixed = []
    for number in range(4):
        with another_thread() if number % 2 else nullcontext():
            mixed.append(other.run(torch.rand, (4,)))
    assert all(map(torch.equal, here, mixed))


def test_a_seed_set_in_the_step_is_the_replica_s(make_strategy: MakeStrategy):
    def step() -> Tensor:
        torch.manual_seed(5)
        return torch.rand(3)

    state = torch.get_rng_state()
    number = make_strategy(1).run(step)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng():
        assert torch.equal(step(), number)


def test_a_compiled_module_keeps_its_replica_s_thread(make_strategy: MakeStrategy):
    strategy = make_strategy(1)
    with strategy.scope():
        model = ls.Model(nn.Linear(2, 2))
    assert runs_here(strategy)
    model.compile("sgd", nn.MSELoss(), compile_module=True)  # compiles nothing before the first step
    assert not runs_here(strategy)


def test_a_step_sees_no_cache_of_casts(make_strategy: MakeStrategy):
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        assert make_strategy(1).run(torch.is_autocast_cache_enabled) is False
        assert torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(before)


def test_nothing_of_a_failed_step_stays(make_strategy: MakeStrategy):
    strategy = make_strategy(1)

    def step(x: Tensor) -> None:
        torch.rand(3)
        torch.set_grad_enabled(False)
        _COLOUR.set("red")
        raise ValueError("no")

    state, cache = torch.get_rng_state(), torch.is_autocast_cache_enabled()
    (batch,) = strategy.distribute_dataset([torch.ones(4, 2)])
    with pytest.raises(ValueError, match="no"):
        strategy.run(step, (batch,))
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _COLOUR.get()) == (True, cache, "none")
    assert ls.get_replica_context() is None
    assert runs_here(strategy)


def test_an_interrupt_before_the_step_leaves_the_caller_s_state_and_a_strategy_that_runs():
    class Interrupted:
        def get_state(self) -> Tensor:
            raise KeyboardInterrupt

    thread = caller_thread.CallerThread(Interrupted(), torch.get_num_threads())  # type: ignore[arg-type]
    state, cache = torch.get_rng_state(), torch.is_autocast_cache_enabled()
    with pytest.raises(KeyboardInterrupt):
        thread.run(int)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_autocast_cache_enabled() is cache
    assert not thread.is_here


def test_a_run_in_a_replica_and_one_of_a_closed_strategy_are_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(1)
    with pytest.raises(UsageError, match="run"):
        strategy.run(lambda: strategy.run(int))
    strategy.close()
    with pytest.raises(UsageError, match="closed"):
        strategy.run(int)


def test_a_run_in_a_merge_call_is_refused_and_not_waited_for(make_strategy: MakeStrategy):
    strategy = make_strategy(1)

    def step(x: Tensor) -> None:
        assert threading.current_thread() is threading.main_thread()
        context = ls.get_replica_context()
        assert context is not None
        context.merge_call(lambda owner, x: owner.run(torch.sum, (x,)), (x,))

    with pytest.raises(UsageError, match="in a merge_call"):
        strategy.run(step, (torch.ones(2, 2),))
    assert runs_here(strategy)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_draws_from_its_hundredth_run_on(make_strategy: MakeStrategy, replicas: int):
    def trained(beside: Callable[[], AbstractContextManager[None]]) -> tuple[list[Tensor], list[Tensor]]:
        net = oracle.mlp()
        strategy = make_strategy(replicas, seed=1)
        mirrored = strategy.mirror(net)
        optimizer = strategy.mirror(oracle.sgd(net.parameters()))
        numbers = [0]

        def step(x: Tensor) -> Tensor:
            noise = torch.rand(x.shape, dtype=x.dtype) if numbers[0] >= 100 else torch.zeros_like(x)
            loss = ls.compute_average_loss(mirrored(x + noise).square().mean(1))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return noise

        drawn: list[Tensor] = []
        with beside():
            for x in strategy.distribute_dataset([oracle.vectors()[0][0]] * 104):
                drawn += strategy.local_results(strategy.run(step, (x,)))[:replicas]
                numbers[0] += 1
        return [parameter.detach() for parameter in net.parameters()], drawn

    (weights, drawn), (in_threads, drawn_in_threads) = trained(nullcontext), trained(another_thread)
    assert all(map(torch.equal, weights, in_threads))
    assert all(map(torch.equal, drawn, drawn_in_threads))
    late = [noise for noise in drawn if noise.count_nonzero()]
    assert len(late) == 4 * replicas
    assert not any(torch.equal(one, other) for one, other in pairwise(late))


def test_a_module_whose_format_was_changed_keeps_the_mode(make_strategy: MakeStrategy):
    # torch's gradient of an instance norm of one row is wrong in channels_last (torch 2.13); the mode mends it.
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)).double()
    expected = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)).double()
    expected.load_state_dict(net.state_dict())
    strategy = make_strategy(1)
    mirrored = strategy.mirror(net)
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)

    def step(x: Tensor) -> None:
        (mirrored(x).exp().sum()).backward()

    (batch,) = strategy.distribute_dataset([x])
    strategy.run(step, (batch,))
    assert not runs_here(strategy)
    expected(x).exp().sum().backward()
    for parameter, other in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize(
    ("leaves", "weight", "expected"),
    [
        ([torch.zeros(32, 64), torch.zeros(32)], 64 * 64, False),
        ([torch.zeros(32, 64)], 512 * 512, True),
        ([torch.zeros(32, 128, dtype=torch.long), 3, None], 128 * 128, True),  # tokens: a row each
        ([torch.zeros(32, 128, dtype=torch.long)], 16 * 16, False),
        ([], 16, True),  # a step that takes its batch from elsewhere
        ([object()], 16, True),
        ([torch.zeros(4, 4), object()], 16, False),
        ([], 0, False),  # no module
    ],
)
def test_which_steps_may_have_products_for_onednn(leaves: list[Any], weight: int, expected: bool):
    assert may_suit(leaves, weight) is expected


@pytest.mark.skipif(not onednn_is_faster(), reason="torch's own linear layers are the faster ones here")
def test_a_product_larger_than_was_foreseen_has_the_same_bits_in_both_threads(make_strategy: MakeStrategy):
    results = []
    for beside in (nullcontext, another_thread):
        strategy = make_strategy(1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Linear(256, 256)
            x = torch.randn(4, 256)
        mirrored = strategy.mirror(net)
        (batch,) = strategy.distribute_dataset([x])
        with beside():
            results.append(strategy.run(lambda x, call=mirrored: call(x.repeat(64, 1)), (batch,)))
    assert torch.equal(*results)
    foreseen = F.linear(x.repeat(64, 1), net.weight, net.bias)
    assert torch.equal(results[0], foreseen)
