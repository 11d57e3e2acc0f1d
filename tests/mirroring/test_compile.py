"""torch.compile for mirrored modules: one code for all replicas, the numbers of the module as it is, or a refusal."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from tests.conftest import here
from tests.tiers import partly_slow
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, ReplicaError
from lockstep.mirroring.module.compile import _LOOKUP, Compilation
from lockstep.replicas.issue_policy import IssuePolicy
from lockstep.strategies.mirrored import MirroredStrategy


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.outer = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.drop(torch.tanh(self.norm(self.inner(x)))))
        return out


class Breaking(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture
def strategy(
    split_cpu: Callable[[int], tuple[LogicalDevice, ...]], nothing_compiled: None
) -> Iterator[MirroredStrategy]:
    with torch._inductor.config.patch(compile_threads=1), closing(MirroredStrategy(split_cpu(2), seed=0)) as made:
        yield made


def steps(strategy: MirroredStrategy, module: nn.Module, compilation: Compilation | None) -> dict[str, Tensor]:
    """Trains a copy of ``module`` for three steps, of 8, 8 and 5 rows, and evaluates it; weights and outputs."""
    mirrored = strategy.mirror(copy.deepcopy(module))
    mirrored.compile_as(compilation)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))

    def train(x: Tensor) -> None:
        ls.compute_average_loss(mirrored(x).square().sum(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.randn(21, 8, generator=torch.Generator().manual_seed(0))
    for batch in strategy.distribute_dataset([x[:8], x[8:16], x[16:]]):
        strategy.run(train, (batch,))
    with torch.no_grad():
        outputs = strategy.run(lambda: mirrored.eval()(x[:4]))
    return mirrored.module.state_dict() | {"outputs": strategy.local_results(outputs)[1]}


@pytest.mark.slow
def test_two_replicas_compile_once_and_have_the_numbers_of_the_module_as_it_is(strategy: MirroredStrategy) -> None:
    torch.manual_seed(0)
    net = Net()
    plain = steps(strategy, net, None)
    assert counters["stats"]["unique_graphs"] == 0

    compiled = steps(strategy, net, Compilation())
    # Training on shards of 4 rows, and one code for 3 and 2; evaluation on 4: not one more for the second replica.
    assert counters["stats"]["unique_graphs"] == 3
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value)

    again = steps(strategy, net, Compilation())
    assert counters["stats"]["unique_graphs"] == 3
    assert all(torch.equal(again[name], compiled[name]) for name in compiled)


def test_replicas_that_look_up_their_code_at_once_all_find_it(strategy: MirroredStrategy) -> None:
    mirrored = strategy.mirror(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    mirrored.compile_as(Compilation(backend="aot_eager"))

    def often() -> None:
        for rows in [1, 2] * 500:
            mirrored(torch.ones(rows, 3))

    strategy.run(often)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_turn_that_does_not_come_is_an_error_and_leaves_the_turn_to_whose_it_is(
    strategy: MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored = strategy.mirror(nn.Linear(3, 1))
    mirrored.compile_as(Compilation(backend="eager"))
    monkeypatch.setattr("lockstep.mirroring.module.compile.COMPILE_LIMIT_S", 0.01)
    with _LOOKUP.locked("Other", ends_with_look_up=False), pytest.raises(ReplicaError) as raised:
        strategy.run(mirrored, (torch.ones(2, 3),))
    assert "Linear has waited 0.01 s for a compiled module" in str(raised.value)
    monkeypatch.setattr("lockstep.mirroring.module.compile.COMPILE_LIMIT_S", 60.0)
    strategy.run(mirrored, (torch.ones(2, 3),))


class Noisy(nn.Module):
    """Outputs its input where dropout keeps it, doubled, and 0 elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        if "recomputed" in self.how:
            dropped: Tensor = checkpoint(self._dropped, x, use_reentrant=False)
            return dropped
        return self._dropped(x)

    def _dropped(self, x: Tensor) -> Tensor:
        # The square of ones: its gradient needs what dropout gave, computed anew where it is recomputed.
        kept = nn.functional.dropout(x * self.scale, 0.5, inplace="in place" in self.how)
        return kept * kept / 2 + 0.0 * torch.randn_like(x)


def drawn(replicas: tuple[LogicalDevice, ...], how: str = "usual") -> list[tuple[Tensor, Tensor]]:
    """In two steps, each replica's outputs of ``Noisy`` and what its backward gives, halved."""
    with closing(MirroredStrategy(replicas, seed=3)) as strategy:
        mirrored = strategy.mirror(Noisy(how))
        mirrored.compile_as(Compilation())

        def step() -> tuple[Tensor, Tensor]:
            x = torch.ones(4, 64, requires_grad=True)
            outputs = mirrored(x)
            return outputs.detach(), torch.autograd.grad(outputs.sum(), x)[0] / 2

        return [result for _ in range(2) for result in strategy.local_results(strategy.run(step))]


HOW = ("usual", "in place", "recomputed", "recomputed in place")


@pytest.mark.parametrize("how", partly_slow(HOW, "in place", "recomputed"))
def test_compiled_dropout_draws_from_each_replica_and_is_the_same_in_every_run(
    strategy: MirroredStrategy, split_cpu: Callable[[int], tuple[LogicalDevice, ...]], how: str
) -> None:
    first = drawn(split_cpu(2), how)
    torch.rand(5)  # what others draw from torch's default generator changes nothing
    again = drawn(split_cpu(2), how)

    for (outputs, gradient), (same, same_gradient) in zip(first, again, strict=True):
        assert torch.equal(outputs, same)
        assert torch.equal(gradient, same_gradient)
        assert torch.equal(outputs, gradient)  # one mask for both passes
        assert set(outputs.unique().tolist()) == {0.0, 2.0}
    assert not any(torch.equal(one, other) for (one, _), (other, _) in itertools.combinations(first, 2))


def test_compiled_dropout_is_the_same_whether_replicas_run_at_once_or_one_after_another(
    strategy: MirroredStrategy, split_cpu: Callable[[int], tuple[LogicalDevice, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = drawn(split_cpu(2))
    monkeypatch.setattr(IssuePolicy, "width", lambda policy, fn: 1)
    in_turn = drawn(split_cpu(2))
    assert all(
        torch.equal(one, other) for pair in zip(at_once, in_turn, strict=True) for one, other in zip(*pair, strict=True)
    )


class Thrice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        dropout = nn.functional.dropout
        return dropout(x + 1, inplace=True), dropout(x + 2, inplace=True), dropout(x + 3)


def test_each_dropout_of_a_compiled_forward_draws_its_own_numbers(strategy: MirroredStrategy) -> None:
    mirrored = strategy.mirror(Thrice())
    mirrored.compile_as(Compilation())
    for outputs in strategy.local_results(strategy.run(mirrored, (torch.ones(64, requires_grad=True),))):
        masks = [each != 0 for each in outputs]
        assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        drawn = (
            torch.empty_like(x).uniform_(2, 4),
            torch.empty_like(x).normal_(7, 2),
            torch.distributions.Normal(x, 2),
        )
        return *drawn[:2], drawn[2].rsample(), nn.functional.rrelu(-x, 1 / 8, 1 / 3, training=True)


def test_compiled_draws_in_place_are_those_that_were_asked_for(strategy: MirroredStrategy) -> None:
    mirrored = strategy.mirror(InPlace())
    mirrored.compile_as(Compilation())
    x = torch.ones(10_000, requires_grad=True)
    one, other = (strategy.local_results(strategy.run(mirrored, (x,)))[replica] for replica in range(2))
    for found, differs, mean, deviation in zip(
        one, other, (3, 7, 1, -11 / 48), (2 / 12**0.5, 2, 2, 5 / 24 / 12**0.5), strict=True
    ):
        assert not torch.equal(found, differs)
        assert found.mean().item() == pytest.approx(mean, abs=0.05 * deviation)
        assert found.std().item() == pytest.approx(deviation, rel=0.05)


def test_compiled_uniform_numbers_are_above_0_and_below_1() -> None:
    seed, number = 12, 2**20
    assert torch.empty(number).uniform_(generator=torch.Generator().manual_seed(seed)).min() == 0
    numbers = torch.ops.lockstep.random([number], torch.tensor(seed), "rand")
    assert numbers.min() > 0
    assert numbers.max() < 1


class Long(nn.Module):
    """One kernel that takes long."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.sin(x)
        return x


def test_a_compiled_kernel_in_one_replica_does_not_stop_the_python_of_another(
    two_cores: None, strategy: MirroredStrategy
) -> None:
    mirrored = strategy.mirror(Long())
    mirrored.compile_as(Compilation())
    x, done = torch.ones(200_000), threading.Event()
    strategy.run(mirrored, (x,))

    def step() -> list[float]:
        moments = [perf_counter()]
        if here().local_replica == 0:
            mirrored(x)
            done.set()
        while not done.is_set():
            moments.append(perf_counter())
        return [*moments, perf_counter()]

    (began, *_, ended), looped = strategy.local_results(strategy.run(step))
    middle = [moment for moment in looped if 0.3 < (moment - began) / (ended - began) < 0.7]
    assert len(middle) > 10


class Dividing(nn.Module):
    def __init__(self, divide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.divide = divide

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return self.divide(x, by)


DIVISIONS = (torch.floor_divide, torch.remainder, torch.fmod)


@pytest.mark.parametrize(
    "divide", partly_slow(DIVISIONS, torch.floor_divide, torch.fmod), ids=lambda function: function.__name__
)
def test_a_replica_that_divides_integers_by_zero_always_has_the_error_itself(
    strategy: MirroredStrategy, monkeypatch: pytest.MonkeyPatch, divide: Callable[[Tensor, Tensor], Tensor]
) -> None:
    monkeypatch.setattr(IssuePolicy, "width", lambda policy, fn: 2)
    dividing, other = strategy.mirror(Dividing(divide)), strategy.mirror(Long())
    for module in (dividing, other):
        module.compile_as(Compilation())
    x, floats = torch.arange(500_000), torch.ones(1_000)
    ones = torch.ones_like(x)
    zero = ones.index_fill(0, torch.tensor(250_000), 0)
    strategy.run(lambda: (dividing(x, ones), other(floats)))

    def step() -> list[str]:
        context = here()
        reported = []
        for _ in range(30):
            try:
                if context.local_replica == 0:
                    dividing(x, zero)
                else:
                    dividing(x, ones), [other(floats) for _ in range(20)]
            except RuntimeError as error:
                reported.append(str(error))
        return reported

    by_zero, without = strategy.local_results(strategy.run(step))
    assert (len(by_zero), without) == (30, [])
    assert all("ZeroDivisionError" in each for each in by_zero)
    # Not thrown where it was noted, which may be in a thread of the kernel's own and would end the process.
    assert not any("note_integer_div_by_zero" in each for each in by_zero)


class Tied(nn.Module):
    """Embeds tokens, and compares them with all embeddings: its weight's gradient is a sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 128)
        self.inner = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.inner(self.table(x))), self.table.weight)


@pytest.mark.slow
def test_compiled_products_go_to_onednn_where_it_is_faster(
    strategy: MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.replicas.compiled.onednn_is_faster", lambda: True)
    torch.manual_seed(0)
    module = Tied()
    exact = copy.deepcopy(module).double()
    tokens = torch.randint(300, (640,))
    mirrored = strategy.mirror(module)
    mirrored.compile_as(Compilation())
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 1.0))

    def step() -> None:
        mirrored(tokens).square().mean().backward()
        optimizer.step()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        strategy.run(step)

    products = {event.key: event.count for event in profiler.key_averages()}["mkldnn::_linear_pointwise"]
    assert products == 2 * 6  # in each replica: two in the forward, and two for each in the backward
    (2 * exact(tokens).square().mean()).backward()
    for ours, right in zip(module.parameters(), exact.parameters(), strict=True):
        assert right.grad is not None
        torch.testing.assert_close(ours.double(), right - right.grad, rtol=1e-5, atol=1e-5)


TWICE = """
import sys, torch, lockstep as ls
from lockstep.mirroring.module.compile import Compilation
from torch._dynamo.utils import counters

cpu, = ls.config.list_physical_devices("CPU")
ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
torch.manual_seed(0)
strategy = ls.MirroredStrategy(seed=0)
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
mirrored = strategy.mirror(module)
mirrored.compile_as(Compilation())
optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))

def step(x):
    mirrored(x).sum().backward()
    optimizer.step()

for batch in strategy.distribute_dataset([torch.ones(4, 8)]):
    strategy.run(step, (batch,))
counted = counters["inductor"]
print(counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"], ls.fingerprint(module))
"""


@pytest.mark.slow
def test_a_second_process_finds_the_compiled_code_and_has_the_same_bits(
    python: Callable[..., Any], tmp_path: Path
) -> None:
    found = []
    for _ in range(2):
        program = python("-c", TWICE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        printed, errors = program.communicate(timeout=300)
        assert program.wait(60) == 0, errors
        found.append(printed.split())

    (hits, misses, bits), (later_hits, later_misses, later_bits) = found
    assert (hits, later_misses) == ("0", "0")
    assert int(misses) == int(later_hits) > 0
    assert bits == later_bits


def test_draws_that_compiled_code_cannot_take_from_the_replica_are_refused(strategy: MirroredStrategy) -> None:
    with pytest.raises(ConfigError, match=r"draws random numbers on a CPU \(aten.*set dropout to 0"):
        steps(strategy, Net(dropout=0.5), Compilation(backend="aot_eager"))

    class Choosing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, torch.multinomial(torch.ones(8), 3)]

    with pytest.raises(ConfigError, match=r"draws random numbers by aten\.multinomial"):
        steps(strategy, Choosing(8, 8), Compilation())

    net = Net(dropout=0.5).eval()
    mirrored = strategy.mirror(net)
    mirrored.compile_as(Compilation(backend="aot_eager"))
    outputs = strategy.run(mirrored, (torch.ones(2, 8),))
    torch.testing.assert_close(strategy.local_results(outputs)[1], net(torch.ones(2, 8)))


def test_a_forward_that_cannot_be_one_graph_is_refused(strategy: MirroredStrategy) -> None:
    with pytest.raises(ConfigError, match=r"torch\.compile cannot take the whole forward of Breaking: "):
        steps(strategy, Breaking(), Compilation(backend="aot_eager"))


def test_a_failure_of_inductor_is_one_plain_error(strategy: MirroredStrategy) -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ConfigError, match=r"cannot take the whole forward of Net: .*no-such-compiler"),
    ):
        steps(strategy, Net(), Compilation())


def test_settings_that_cannot_be_used(strategy: MirroredStrategy) -> None:
    assert Compilation.of(False) is None
    assert Compilation.of({"dynamic": True}) == Compilation(dynamic=True)
    with pytest.raises(ConfigError, match="give True, False or a dict of mode, dynamic, backend"):
        Compilation.of({"fullgraph": False})
    with pytest.raises(ConfigError, match="mode='reduce-overhead'; choose one of"):
        Compilation.of({"mode": "reduce-overhead"})
    with pytest.raises(ConfigError, match="backend='inducktor' is unknown to torch, or makes"):
        Compilation(backend="inducktor")
    synced = strategy.mirror(Net(), sync_batchnorm=True)
    with pytest.raises(ConfigError, match="meets other replicas in its forward"):
        synced.compile_as(Compilation())


def test_a_function_that_the_step_calls_is_not_compiled_at_every_call(strategy: MirroredStrategy) -> None:
    graphs = []

    def noted(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Tensor]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=noted, dynamic=True)
    def gated(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight) * torch.sigmoid(x)

    mirrored = strategy.mirror(nn.Linear(8, 8, bias=False))

    def forward(x: Tensor) -> Tensor:
        return gated(x, next(mirrored.parameters()))

    for rows in (8, 8, 6, 10, 12, 14):
        x = torch.randn(rows, 8)
        (batch,) = strategy.distribute_dataset([x])
        found = strategy.gather(strategy.run(forward, (batch,)), axis=0)
        torch.testing.assert_close(found, (x @ mirrored.weight) * torch.sigmoid(x))

    assert len(graphs) <= 4  # each replica at most for a first shape, and once more for all others


@pytest.mark.parametrize("draw", [torch.randn_like, lambda x: torch.normal(x, 1.0)], ids=["seeds", "operator"])
def test_a_compiled_function_that_the_step_calls_draws_from_each_replica(
    split_cpu: Callable[[int], tuple[LogicalDevice, ...]],
    nothing_compiled: None,
    monkeypatch: pytest.MonkeyPatch,
    draw: Callable[[Tensor], Tensor],
) -> None:
    @torch.compile
    def noisy(x: Tensor) -> Tensor:
        return x + draw(torch.zeros_like(x))

    def drawn() -> list[Tensor]:
        with closing(MirroredStrategy(split_cpu(2), seed=3)) as strategy:
            steps = [strategy.run(lambda: noisy(torch.ones(8))) for _ in range(2)]
            return [outputs for step in steps for outputs in strategy.local_results(step)]

    first = drawn()
    torch.rand(5)  # what others draw from torch's default generator changes nothing
    again = drawn()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as while another thread compiles
    monkeypatch.setattr(IssuePolicy, "width", lambda policy, fn: 1)
    in_turn = drawn()
    assert all(torch.equal(*pair) for other in (again, in_turn) for pair in zip(first, other, strict=True))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(first, 2))


def test_a_step_may_call_a_compiled_update(strategy: MirroredStrategy) -> None:
    def trained(prepare: Callable[[Any], Any]) -> Tensor:
        torch.manual_seed(0)
        module = strategy.mirror(nn.Linear(4, 2))
        optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))
        clear, update = prepare(optimizer.zero_grad), prepare(optimizer.step)

        def step(x: Tensor) -> None:
            clear()
            (module(x).square().sum() / 8).backward()
            update()

        for batch in strategy.distribute_dataset([torch.ones(8, 4), torch.arange(20.0).view(5, 4)]):
            strategy.run(step, (batch,))
        return module.weight.detach().clone()

    assert torch.equal(trained(torch.compile), trained(lambda method: method))
