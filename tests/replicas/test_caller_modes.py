"""The modes of the caller hold in the replicas, and see there what they would see of one device."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lockstep as ls
from lockstep.strategies.mirrored import MirroredStrategy

ROWS = 9


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3000), nn.Linear(3000, 10))


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 3, 8, 8, generator=random), torch.randint(10, (ROWS,), generator=random)


def one_device(steps: int = 1) -> nn.Module:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module


def replicas_of(strategy: MirroredStrategy) -> tuple[Callable[[], None], nn.Module]:
    """A function that makes a step on all replicas, and the module that it trains."""
    module = strategy.mirror(network())
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y, reduction="none")
        ls.compute_average_loss(loss, global_batch_size=ROWS).backward()
        optimizer.step()

    shards = list(strategy.distribute_dataset([batch()]))
    return lambda: strategy.run(step, shards[0]), module


def flops(counter: FlopCounterMode) -> dict[str, int]:
    counts = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
    return {name: count for name, count in counts.items() if name != "MirroredModule"}


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_flop_counter_counts_what_one_device_does(replicas: int, make_strategy: MakeStrategy):
    with FlopCounterMode(display=False) as expected:
        one_device()
    step, _ = replicas_of(make_strategy(replicas))
    with FlopCounterMode(display=False) as counted:
        step()
    assert counted.get_total_flops() == expected.get_total_flops() > 0
    assert flops(counted) == flops(expected)


class Calls(TorchFunctionMode):
    """Counts the functions of torch that are called, in a way that two threads at once would break."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.inside = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.inside += 1
        assert self.inside == 1
        self.names[getattr(func, "__name__", str(func))] += 1
        self.inside -= 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts operators likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.inside += 1
        assert self.inside == 1
        result = func(*args, **(kwargs or {}))
        self.names[str(func)] += 1
        self.inside -= 1
        return result


@pytest.mark.parametrize(
    ("make", "seen"),
    [(Calls, "cross_entropy"), (Operators, "aten.convolution.default")],
    ids=["functions", "operators"],
)
def test_modes_see_each_replica_and_no_two_at_once(make: Any, seen: str, make_strategy: MakeStrategy):
    step, module = replicas_of(make_strategy(3))

    with make() as mode:
        step()
        step()
    step()

    assert mode.names[seen] == 3 * 2
    expected = one_device(3)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_mode_that_changes_what_functions_do_does_so_in_the_replicas(make_strategy: MakeStrategy):
    class NoRelu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.relu else func(*args, **(kwargs or {}))

    with NoRelu():
        seen = make_strategy(2).run(lambda: torch.relu(-torch.ones(2)))
    assert all(torch.equal(each, -torch.ones(2)) for each in seen)


def test_dropout_and_random_numbers_under_a_mode_are_a_replicas_own(make_strategy: MakeStrategy):
    def draw() -> Tensor:
        return torch.cat([torch.rand(3), F.dropout(torch.ones(50))])

    plain = make_strategy(2, seed=3).run(draw)
    with Calls():
        watched = make_strategy(2, seed=3).run(draw)
    assert all(torch.equal(*pair) for pair in zip(plain, watched, strict=True))
    assert not torch.equal(plain[0], plain[1])


def test_hooks_for_saved_tensors_act_in_the_replicas(make_strategy: MakeStrategy):
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.half()

    def step() -> Tensor:
        x = torch.full((3,), 0.1, requires_grad=True)
        x.exp().sum().backward()
        assert x.grad is not None
        return x.grad

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
        expected = step()
        seen = make_strategy(2).run(step)

    assert packed == [3] * 3
    assert all(torch.equal(each, expected) for each in seen)
    assert not torch.equal(expected, step())


def test_hooks_that_are_forbidden_are_so_in_the_replicas(make_strategy: MakeStrategy):
    def step() -> None:
        with torch.autograd.graph.save_on_cpu():
            pass

    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        make_strategy(2).run(step)


def test_the_default_device_of_the_caller(make_strategy: MakeStrategy):
    def step() -> list[str]:
        with torch.device("cpu"):
            inside = torch.ones(2)
        return [torch.ones(2).device.type, inside.device.type, torch.rand(2).device.type]

    strategy = make_strategy(2)
    with torch.device("meta"):
        assert strategy.run(step) == ["meta", "cpu", "meta"]
    assert strategy.run(step) == ["cpu", "cpu", "cpu"]


def test_what_torch_keeps_for_the_process_holds_in_the_replicas(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        seen = strategy.run(lambda: (torch.ones(1).dtype, torch.are_deterministic_algorithms_enabled()))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(before)

    assert seen == (torch.float64, True)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected")
def test_anomaly_detection_finds_a_nan_in_a_replicas_backward_pass(make_strategy: MakeStrategy):
    def step() -> None:
        torch.zeros(1, requires_grad=True).sqrt().mul(0).sum().backward()

    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward"):
        make_strategy(2).run(step)


def tracks(profile: torch.profiler.profile, path: Path) -> dict[int, Counter[str]]:
    """By the number of the thread, the operators and annotations on its track in a trace."""
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found: dict[int, Counter[str]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            found.setdefault(event["tid"], Counter())[event["name"]] += 1
    return found


def test_a_profile_has_a_track_for_each_replica(make_strategy: MakeStrategy, tmp_path: Path):
    step, _ = replicas_of(make_strategy(3))
    step()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.profiler.record_function("before"):
            torch.ones(2)
        step()

    found = tracks(profile, tmp_path / "trace.json")
    replicas = [track for track in found.values() if "before" not in track]
    assert len(replicas) == 3
    assert all(track["aten::conv2d"] == 1 and track["aten::convolution_backward"] == 1 for track in replicas)
    averages = {event.key: event.count for event in profile.key_averages()}
    assert averages["aten::conv2d"] == 3
    assert averages["before"] == 1


def test_a_profile_with_a_schedule_sees_the_steps_that_it_asks_for(make_strategy: MakeStrategy):
    step, _ = replicas_of(make_strategy(2))
    seen: list[int] = []

    def count(profile: torch.profiler.profile) -> None:
        seen.extend(event.count for event in profile.key_averages() if event.key == "aten::conv2d")

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=count) as profile:
        for _ in range(6):
            step()
            profile.step()

    assert seen == [2 * 2]


def test_after_a_profile_replicas_are_not_profiled(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert strategy.run(torch.autograd._profiler_enabled) is True
    assert strategy.run(torch.autograd._profiler_enabled) is False


def test_a_profile_of_a_run_that_failed_ends_well(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def fails() -> None:
        raise KeyError("of the step")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), pytest.raises(KeyError):
        strategy.run(fails)
    assert strategy.run(torch.autograd._profiler_enabled) is False


def test_the_modes_of_the_caller_are_as_before_after_a_run(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    with Calls() as calls, Operators() as operators:
        strategy.run(lambda: torch.ones(2) + 1)
        seen = copy.copy(operators.names)
        torch.ones(2) + 1

    assert operators.names["aten.add.Tensor"] == seen["aten.add.Tensor"] + 1 == 3
    assert calls.names["ones"] == 3
    torch.ones(2)
    assert calls.names["ones"] == 3


def test_the_threads_of_replicas_have_the_names_that_profilers_show(make_strategy: MakeStrategy):
    step, _ = replicas_of(make_strategy(3))
    step()
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert {"replica 0", "replica 1", "replica 2"} <= set(names)
