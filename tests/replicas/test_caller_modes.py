"""Modes of the caller are refused; its default device, torch's settings and profiles of all threads hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import lockstep as ls
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

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


class Calls(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        lambda: FlopCounterMode(display=False),
        Calls,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ],
    ids=["_FlopCounterMode", "Calls", "saved_tensors_hooks"],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mode_around_a_run_is_refused(mode: Callable[[], Any], replicas: int, make_strategy: MakeStrategy):
    step, _ = replicas_of(make_strategy(replicas))

    with mode(), pytest.raises(UsageError, match=r"around strategy\.run cannot see the replicas.*enter it inside"):
        step()
    step()


def test_a_mode_inside_the_step_sees_its_replica(make_strategy: MakeStrategy):
    def step() -> tuple[int, int]:
        with FlopCounterMode(display=False) as flops, Calls() as calls:
            torch.ones(2, 3) @ torch.ones(3, 2)
        return int(flops.get_total_flops()), calls.names["ones"]

    assert make_strategy(2).run(step) == (24, 2)


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


def profile_of(*, all_threads: bool) -> torch.profiler.profile:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config)


def test_a_profile_of_all_threads_has_a_track_for_each_replica(make_strategy: MakeStrategy, tmp_path: Path):
    step, _ = replicas_of(make_strategy(3))
    step()

    with profile_of(all_threads=True) as profile:
        with torch.profiler.record_function("before"):
            torch.ones(2)
        step()

    found = tracks(profile, tmp_path / "trace.json")
    replicas = [track for track in found.values() if "aten::conv2d" in track]
    assert len(replicas) == 3
    assert all(track["aten::conv2d"] == 1 and track["aten::convolution_backward"] == 1 for track in replicas)


def test_a_profile_that_does_not_see_the_replicas_warns(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with profile_of(all_threads=False), pytest.warns(UserWarning, match="profile_all_threads=True"):
        strategy.run(torch.ones, (2,))


def test_the_threads_of_replicas_have_the_names_that_profilers_show(make_strategy: MakeStrategy):
    step, _ = replicas_of(make_strategy(3))
    step()

    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

    assert {"replica 0", "replica 1", "replica 2"} <= set(names)
