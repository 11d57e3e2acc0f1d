"""fit on a real GPU: torch refuses every wait between steps, and the profiler sees none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lockstep as ls
from lockstep.config import DeviceRegistry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaGraphLaunch")


class Refuse(ls.Callback):
    """Has torch raise an error at every wait that it knows of, from the beginning of one batch to the end of another.

    Args:
        first: batch, from 0.
        last: batch, from 0.
    """

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self._first, self._last = first, last

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        """Waits are errors from here on."""
        if batch == self._first:
            torch.cuda.set_sync_debug_mode("error")
        elif batch == self._last:
            torch.cuda.set_sync_debug_mode("default")

    def close(self) -> None:
        """Whatever happened."""
        torch.cuda.set_sync_debug_mode("default")


class Profiled(ls.Callback):
    """Counts the waits, and the launches of graphs, that the profiler sees in the same batches."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self._first, self._last = first, last
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.waits: dict[str, int] = {}
        self.graphs = 0

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        """Begins, or ends and counts."""
        if batch == self._first:
            self._profile.start()
        elif batch == self._last:
            self._profile.stop()  # waits for the device itself, behind the last of these batches
            events = self._profile.events() or []
            ends = [event for event in events if event.name in WAITS]
            launched = max(event.time_range.start for event in events if event.name.startswith(LAUNCHES))
            self.graphs = sum(event.name == "cudaGraphLaunch" for event in events)
            self.waits = {name: sum(e.name == name and e.time_range.start < launched for e in ends) for name in WAITS}


@contextmanager
def model_on(shares: int, precision: str, graphs: bool) -> Iterator[ls.Model]:
    (gpu, *_) = ls.config.list_physical_devices("GPU")
    if shares > 1:
        limit = ls.config.LogicalDeviceConfiguration(memory_limit=1024)
        ls.config.set_logical_device_configuration(gpu, [limit] * shares)
    strategy = ls.MirroredStrategy([f"gpu:{number}" for number in range(shares)], seed=0)
    try:
        torch.manual_seed(0)
        with strategy.scope():
            module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))
            model = ls.Model(module)
            model.compile(
                optimizer=torch.optim.AdamW(module.parameters(), 1e-3),
                loss=nn.CrossEntropyLoss(reduction="none"),
                metrics=_accuracy(),
                precision=precision,  # type: ignore[arg-type]
                clip_norm=1.0,
                graphs=graphs,
            )
        yield model
    finally:
        strategy.close()


def _accuracy() -> dict[str, Any]:
    """A metric where torchmetrics is installed, which a machine with a GPU need not have; without it there is none."""
    if find_spec("torchmetrics") is None:
        return {}
    classification = import_module("torchmetrics.classification")
    return {"accuracy": classification.MulticlassAccuracy(3, average="micro")}


@pytest.mark.parametrize(
    ("precision", "graphs"), [("fp32", False), ("bf16", False), ("fp16", False), ("fp32", True), ("bf16", True)]
)
@pytest.mark.parametrize("shares", [1, 2])
def test_between_steps_nothing_waits_for_the_gpu(
    shares: int,
    precision: str,
    graphs: bool,
    fresh_devices: DeviceRegistry,
    record_property: Callable[[str, object], None],
):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(12, 16, 8, generator=random)
    batches = [(each, torch.randint(0, 3, (16,), generator=random)) for each in x]
    window = (6, 10) if graphs else (2, 10)  # the fourth step is captured, for which the host waits
    with model_on(shares, precision, graphs) as model:
        model.fit(batches, verbose=0)  # makes workspaces, pinned memory, the optimizer's state
        model.fit(batches, verbose=0, callbacks=[Refuse(*window)])

        profiled = Profiled(*window)
        model.fit(batches, verbose=0, callbacks=[profiled])
        record_property("waits that the profiler saw (limit 0)", sum(profiled.waits.values()))
        record_property("graphs that it saw launched", profiled.graphs)
        assert profiled.waits == dict.fromkeys(WAITS, 0)
        assert bool(profiled.graphs) is graphs
